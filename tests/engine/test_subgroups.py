"""Group engines over parts of the ranks: side by side at different step counts, and a process in two of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hyper_mpmd as hm
from hyper_mpmd.engine.group import GroupEngine

from .graphs import moe
from .ranks import step_inputs


def steps(engine: GroupEngine, seeds: range) -> int:
    """Launches of random loads, one a seed; each output is checked. Returns how many there were."""
    for seed in seeds:
        inputs, loads, expected = step_inputs(engine.world_size, seed)
        plan = hm.compile(moe(engine.world_size), loads, world=engine.world_size, rank=engine.rank)
        out = engine.run(plan, timeout=25, **inputs[engine.rank])["y"]
        torch.testing.assert_close(out, expected[engine.rank], rtol=1e-4, atol=1e-4)
    return len(seeds)


def two_pairs_job() -> int:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    with GroupEngine(pairs[mine]) as engine:
        return steps(engine, range(5) if mine == 0 else range(100, 140))


def test_two_pairs_run_at_different_step_counts(rank_pools):
    assert rank_pools[4].run(two_pairs_job) == [5, 5, 40, 40]


def two_groups_job() -> tuple[int, int]:
    """Ranks 1 and 2 run plans of all four ranks and, between these, plans of the two of them."""
    pair = dist.new_group([1, 2])
    done = [0, 0]
    with GroupEngine() as everyone:
        both = GroupEngine(pair) if dist.get_rank() in (1, 2) else None
        for turn in range(4):
            done[0] += steps(everyone, range(turn * 3, turn * 3 + 3))
            if both is not None:
                done[1] += steps(both, range(50 + turn, 52 + turn))
        if both is not None:
            both.close()
    return done[0], done[1]


def test_a_rank_in_two_groups_runs_the_plans_of_both(rank_pools):
    assert rank_pools[4].run(two_groups_job) == [(12, 0), (12, 8), (12, 8), (12, 0)]


def one_pair_dies_job() -> str:
    """Rank 1 raises before a launch of its pair: its peer is told, the other pair never notices."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    with GroupEngine(pairs[mine]) as engine:
        steps(engine, range(3))
        try:
            if dist.get_rank() == 1:
                engine.abort(ValueError("no batch"))
                raise hm.HyperMpmdError("no batch")
            steps(engine, range(3, 10))
        except hm.HyperMpmdError as error:
            seen = f"{type(error).__name__}: {error}"
        else:
            seen = "unharmed"
        steps(engine, range(10, 12))
    return seen


def test_what_a_rank_raises_ends_the_launch_of_its_own_group_only(rank_pools):
    seen = rank_pools[4].run(one_pair_dies_job)
    assert seen[0].startswith("GroupAborted: rank 1: ValueError: no batch"), seen
    assert seen[1] == "HyperMpmdError: no batch"
    assert seen[2:] == ["unharmed", "unharmed"], seen
