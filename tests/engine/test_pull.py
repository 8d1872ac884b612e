"""Pull: readers fetch rows from where they were made. The same bits as push, whatever the routing,."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd.engine.group import GroupEngine
from hyper_mpmd.errors import OpParameterError, PullSourceError, RaceError, SignalError
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.moe_inputs import make_inputs
from hyper_mpmd.modules.routing import make_routing
from hyper_mpmd.scheduler.prove import prove
from hyper_mpmd.scheduler.records import NONE
from hyper_mpmd.testing.draft import Draft
from hyper_mpmd.testing.sample_ops import Copy, ScaleInPlace

from .ranks import Ranks

SIZES = (32, 48, 12, 3)  # H, I, E, K
COUNTS = {
    "even": lambda source, expert: 9,
    "skewed": lambda source, expert: 120 if expert == 1 else expert % 3,
    "single": lambda source, expert: 70 if expert == 0 else 0,
    "one source": lambda source, expert: 25 if source == 1 else 0,
    "to the next": lambda source, expert: 31 if expert // 3 == (source + 1) % 4 else 0,
    "none": lambda source, expert: 0,
}


def rows_graph(ranks: int, mode: Any, to: Any = "scatter", then_overwrite: bool = False) -> hm.TaskGraph:
    """x is copied and travels; then the copy is overwritten in place, if asked for."""
    g = hm.TaskGraph("rows", ranks=ranks)
    x = g.input("x", (g.rows("rows", groups=3 * ranks), 40))
    made = g.vector("make", Copy(), x)
    g.output("got", g.comm("dispatch", hm.ops.Put(to=to, mode=mode), made))
    if then_overwrite:
        g.output("scaled", g.vector("scale", ScaleInPlace(), made))
    return g


def step(ranks: int, pattern: str) -> tuple[list[list[int]], list[dict[str, torch.Tensor]]]:
    loads = [[COUNTS[pattern](source, expert) for expert in range(3 * ranks)] for source in range(ranks)]
    made = torch.Generator().manual_seed(len(pattern))
    return loads, [{"x": torch.randn(sum(counts), 40, generator=made)} for counts in loads]


@pytest.mark.parametrize("pattern", COUNTS)
@pytest.mark.parametrize("to", ["scatter", "all", "shift"])
@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_pulled_rows_are_those_that_a_push_brings(pattern, to, policy):
    loads, inputs = step(4, pattern)
    tiles = {"make": (16, 40), "dispatch": (24, 40)}
    have, want = (
        hm.compile(rows_graph(4, mode, to), loads, world=4, policy=policy, tiles=tiles).run(inputs, timeout=30)
        for mode in ("pull", "push")
    )
    assert all(torch.equal(a["got"], b["got"]) for a, b in zip(have, want, strict=True))
    assert sum(len(a["got"]) for a in have) == sum(map(sum, loads)) * (4 if to == "all" else 1)


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_a_task_that_overwrites_pulled_rows_waits_for_all_readers(policy):
    loads, inputs = step(4, "skewed")
    world = hm.compile(rows_graph(4, "pull", then_overwrite=True), loads, world=4, policy=policy)
    plain = hm.compile(rows_graph(4, "push"), loads, world=4).run(inputs, timeout=30)
    for _ in range(5):
        for own, want, given in zip(world.run(inputs, timeout=30), plain, inputs, strict=True):
            assert torch.equal(own["got"], want["got"])
            assert torch.equal(own["scaled"], ScaleInPlace().reference(None, given["x"]))


def test_readers_start_with_their_own_rows_and_go_round_the_ranks_tile_by_tile():
    loads, _ = step(4, "even")
    for plan in hm.compile(rows_graph(4, "pull"), loads, world=4, tiles={"dispatch": (8, 40)}).plans:
        tasks = np.sort(plan.tasks[plan.tasks["op"] == 1], order="number")
        first = [int(peer) for peer in tasks["peer"][:8]]
        assert first == [(plan.rank + distance) % 4 for distance in (0, 1, 2, 3)] * 2
        names = [plan.task_name(index) for index in range(len(plan.tasks))]
        peers = {name.partition("<-r")[2] for name in names if name.startswith("dispatch") and "<-" in name}
        assert peers == {str(peer) for peer in range(4) if peer != plan.rank}
        assert not any("->" in name for name in names)


def test_only_the_pulled_tensor_is_symmetric_and_nobody_waits_for_credit():
    loads, _ = step(2, "even")
    pull, push = (hm.compile(rows_graph(2, mode), loads, world=2).plans[0] for mode in ("pull", "push"))
    symmetric = [list(plan.sections["tensors"]["role"]) for plan in (pull, push)]
    assert [roles.index(3) for roles in symmetric] == [1, 2]  # "make" against "dispatch"
    credits = [int((plan.sections["waits"]["threshold"] == 0).sum()) for plan in (pull, push)]
    assert credits[0] == 0 < credits[1]


def test_pulling_what_no_peer_could_read_is_refused_by_name():
    g = hm.TaskGraph("g", ranks=2)
    x = g.input("x", (g.rows("rows", groups=2), 8))
    with pytest.raises(PullSourceError, match=r"task 'send': 'x' is an input.*mode=\"push\""):
        g.comm("send", hm.ops.Dispatch(mode="pull"), x)
    pushed = g.comm("gather", hm.ops.Put(to="all"), x)
    with pytest.raises(PullSourceError, match="'gather' comes from other ranks, through task 'gather'"):
        g.comm("send", hm.ops.Put(to="shift", mode="pull"), pushed)
    with pytest.raises(OpParameterError, match=r"Combine\.mode='pull'"):
        hm.ops.Combine(mode="pull")
    with pytest.raises(OpParameterError, match=r"Dispatch\.mode='fetch'"):
        hm.ops.Dispatch(mode="fetch")


@pytest.mark.parametrize("left_out", ["the wait for the rows", "the word of the reader"])
def test_a_world_that_leaves_out_one_half_of_the_agreement_is_refused(left_out):
    loads, _ = step(2, "even")
    drafts = [Draft(plan) for plan in hm.compile(rows_graph(2, "pull"), loads, world=2).plans]
    pulls = [task for queue in drafts[0].queues for task in queue.tasks if task.op == 1 and task.peer == 1]
    assert pulls
    if left_out == "the wait for the rows":
        pulls[0].waits = [[event, n] for event, n in pulls[0].waits if int(drafts[0].events[event]["slot"]) == NONE]
        expected: type[Exception] = RaceError
    else:
        pulls[0].signals = [signal for signal in pulls[0].signals if signal[0] == 0]
        expected = SignalError
    with pytest.raises(expected, match="make"):
        prove([draft.plan() for draft in drafts])


def moe_step(world: int, seed: int, mode: Any, pattern: str) -> tuple[hm.TaskGraph, Any, list[dict[str, Any]]]:
    hidden, inner, experts, top_k = SIZES
    routing = make_routing(pattern, tokens=7 + 11 * seed, experts=experts, top_k=top_k, ranks=world, seed=seed)
    graph = moe_ffn(hidden, inner, experts, top_k, ranks=world, dispatch_mode=mode, keep=seed % 2 == 1)
    return graph, routing.loads(), make_inputs(routing, hidden, inner, dtype="float32", seed=seed)


def launches_job(rank: int, world: int) -> list[dict[str, np.ndarray]]:
    """Launches of plans that differ in loads, policy, outputs and mode, on one workspace."""
    outs = []
    with GroupEngine() as engine:
        for seed in range(12):
            graph, loads, inputs = moe_step(
                world, seed, "pull" if seed % 3 else "push", ("zipf:1.2", "single")[seed % 2]
            )
            plan = hm.compile(graph, loads, world=world, rank=rank, policy=("O0", "O1")[seed // 2 % 2])
            for _ in range(2):
                made = engine.run(plan, workers=1 + seed % 2, timeout=25, **inputs[rank])
            outs.append({name: tensor.numpy() for name, tensor in made.items()})
    return outs


@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_pull_and_push_in_turn_give_the_bits_of_one_process_that_pushes(world):
    results = Ranks(world, launches_job).results()
    assert [kind for kind, *_ in results] == ["value"] * world, results
    for seed in range(12):
        graph, loads, inputs = moe_step(world, seed, "push", ("zipf:1.2", "single")[seed % 2])
        for (_, outs, _), want in zip(
            results, hm.compile(graph, loads, world=world).run(inputs, timeout=30), strict=True
        ):
            assert outs[seed].keys() == want.keys()
            assert all(np.array_equal(outs[seed][name], tensor.numpy()) for name, tensor in want.items())
