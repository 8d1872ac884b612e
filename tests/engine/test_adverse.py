"""Workers held up at random compute the same bits; caches that are not coherent, and lost signals, are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.engine.compare import max_rel_error
from hyper_mpmd.engine.group import GroupEngine
from hyper_mpmd.scheduler.world import World
from hyper_mpmd.testing.adverse import adverse, cached_polls, dropped_signal, signalling_tasks
from hyper_mpmd.testing.graphs import graphs, inputs_for, loads_of, tiles_of
from hyper_mpmd.testing.worlds import moe_world

from .graphs import LOADS, ffn, ffn_inputs, moe
from .ranks import Ranks, step_inputs, steps_in_a_loop


def same(first: list[dict[str, torch.Tensor]], second: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(own[name], other[name]) for own, other in zip(first, second, strict=True) for name in own)


def run_adversely(world: World, inputs: Any, seed: int, launches: int) -> None:
    """Launch after launch, each with delays of its own, and other numbers of workers, against the reference."""
    first = world.run(inputs, timeout=60)
    assert max_rel_error(first, world.run(inputs, engine="reference")) <= 1e-5
    for launch in range(launches):
        with adverse(1 + seed * launches + launch):
            assert same(world.run(inputs, workers=1 + launch % 4, timeout=60), first), launch


@pytest.mark.parametrize("seed", range(40))
def test_mixture_of_experts_worlds_under_random_delays(seed):
    plans = moe_world(seed)
    inputs = inputs_for(plans[0].graph, plans[0].header.loads, seed=seed)
    assert inputs is not None
    run_adversely(World(plans), inputs, seed, 60)


@given(data=st.data(), ranks=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_random_worlds_under_random_delays(data, ranks):
    random_world_under_delays(data, ranks, 30)


def random_world_under_delays(data, ranks, launches):
    graph = data.draw(graphs(ranks=ranks))
    loads, tiles = data.draw(loads_of(graph)), data.draw(tiles_of(graph))
    seed = data.draw(st.integers(0, 999))
    inputs = inputs_for(graph, loads, seed=seed)
    assume(inputs is not None)
    policy = data.draw(st.sampled_from(["O0", "O1", "published"]))
    tiles = {} if policy == "published" else {"tiles": tiles}
    run_adversely(hm.compile(graph, loads, policy=policy, world=ranks, **tiles), inputs, seed, launches)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_launches_under_random_delays():
    for seed in range(400):
        plans = moe_world(seed)
        inputs = inputs_for(plans[0].graph, plans[0].header.loads, seed=seed)
        if inputs is not None:
            run_adversely(World(plans), inputs, seed, 200)
    hypothesis_part(200, 150)


def hypothesis_part(examples: int, launches: int) -> None:
    @given(data=st.data(), ranks=st.integers(1, 4))
    @settings(max_examples=examples, deadline=None)
    def many(data, ranks):
        random_world_under_delays(data, ranks, launches)

    many()


def adverse_job(rank: int, world: int, steps: int) -> int:
    with adverse(100 + rank):
        return steps_in_a_loop(rank, world, steps)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_are_held_up_at_random_stay_in_step(world):
    results = Ranks(world, adverse_job, 40).results()
    assert [result[:2] for result in results] == [("value", 40)] * world


@pytest.mark.parametrize("ranks", [1, 2])
def test_counters_polled_through_a_cache_are_told_from_the_plan(ranks):
    inputs, loads, _ = step_inputs(ranks, 0)
    world = hm.compile(moe(ranks), loads, world=ranks, device="ascend-a3")
    for seed in range(1, 6):
        with cached_polls(seed), pytest.raises(errors.TaskFailedError, match="stale read: a worker's cache holds 0"):
            world.run(inputs, workers=3, timeout=10)
    world.run(inputs, timeout=30)


# ---- the signal of one task is lost ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPER_MPMD_HANG_DIR", str(tmp_path))


def test_one_lost_signal_is_the_named_root_cause():
    plan, inputs = hm.compile(ffn(), loads=LOADS, device="ascend-a3"), ffn_inputs()
    wanted = plan.run(**inputs, timeout=30)
    for task in signalling_tasks(plan)[::7]:
        with dropped_signal(plan, task), pytest.raises(errors.LaunchTimeout) as caught:
            plan.run(**inputs, workers=2, timeout=0.1)
        root = caught.value.report["root"]
        assert root["kind"] == "lost signal", task
        waiting = [core for core in caught.value.report["cores"] if core["state"] == "waiting"]
        assert any({"task": task, "state": "ended"}.items() <= signaller.items()
                   for core in waiting for signaller in core["signallers"]), task  # fmt: skip
        assert task in root["text"]
        assert "may have been lost" in root["text"]
        assert same([plan.run(**inputs, timeout=30)], [wanted])


def test_a_signal_lost_between_ranks_is_named_with_both():
    inputs, loads, _ = step_inputs(2, 3)
    world = hm.compile(moe(2), loads, world=2)
    wanted = world.run(inputs, timeout=30)
    for plan in world.plans:
        for task in signalling_tasks(plan, remote=True)[:4]:
            with dropped_signal(plan, task), pytest.raises(errors.LaunchTimeout) as caught:
                world.run(inputs, workers=2, timeout=0.1)
            assert caught.value.report["root"]["kind"] == "lost signal", task
            assert f"from {task} on rank {plan.rank}, " in str(caught.value)
            assert same(world.run(inputs, timeout=30), wanted)


def dropping_job(rank: int, world: int) -> tuple[list[str], dict[str, Any]]:
    seen, report = [], {}
    inputs, loads, expected = step_inputs(world, 3)
    plan = hm.compile(moe(world), loads, world=world, rank=rank)
    with GroupEngine() as engine:
        for launch in range(3):
            try:
                if launch == 1 and rank == 1:
                    with dropped_signal(plan, signalling_tasks(plan, remote=True)[0]):
                        engine.run(plan, timeout=0.5, **inputs[rank])
                else:
                    out = engine.run(plan, timeout=0.5 if launch == 1 else 25, **inputs[rank])["y"]
                    torch.testing.assert_close(out, expected[rank], rtol=1e-4, atol=1e-4)
                seen.append("right")
            except errors.LaunchTimeout as error:
                seen.append(str(error))
                report = error.report | {"file": str(error.path)}
    return seen, report


def test_a_signal_lost_between_processes_ends_both_alike_and_the_next_launch_works():
    results = Ranks(2, dropping_job).results()
    assert [kind for kind, *_ in results] == ["value", "value"], results
    (told, missing), (other, sent) = (value for _, value, _ in results)
    assert told == other
    first, text, last = told
    assert (first, last) == ("right", "right")
    assert text.splitlines()[0].startswith(("rank 0: ", "rank 1: "))
    # Each rank leaves what its own cores did: rank 0 what it lacks, rank 1 that the task which signals it has ended.
    assert missing["seen"] == [0]
    assert "/hyper-mpmd-hang-rank0-" in missing["file"]
    assert "/hyper-mpmd-hang-rank1-" in sent["file"]
    lacking = [core for core in missing["cores"] if core["state"] == "waiting" and core["have"] < core["need"]]
    assert any(one == {"rank": 1, "state": "in another process"} for core in lacking for one in core["signallers"])
    assert sent["seen"] == [1]
    assert sent["root"]["kind"] == "other process"


def test_what_cannot_be_dropped_is_refused():
    plan = hm.compile(ffn(), loads=LOADS)
    with pytest.raises(errors.EngineError, match=r"no task 'up\.e9\.t9'"), dropped_signal(plan, "up.e9.t9"):
        pass
    task = signalling_tasks(plan)[0]
    with pytest.raises(errors.EngineError, match="there is no signal 99"), dropped_signal(plan, task, 99):
        pass
    for seed in (0, -1, True, 1 << 64, 1.5):
        with pytest.raises(errors.EngineError, match="seed is"), adverse(seed):
            pass
