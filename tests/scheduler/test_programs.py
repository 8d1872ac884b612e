"""Programs of empty tasks, and planning at the size that real graphs reach."""

from __future__ import annotations

import time

import numpy as np
import pytest
from comparing import SMALL

import hyper_mpmd as hm
from hyper_mpmd.scheduler.bounds import bounds, longest_path
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.scheduler.records import AIC, AIV
from hyper_mpmd.testing.programs import chain, flat, grid, plan_of


def test_edges_become_one_event_a_consumer():
    program = TileProgram.from_edges([5, 6, 7, 8], [(0, 2), (1, 2), (0, 3), (0, 3)], [AIC, AIV, AIC, AIV])
    assert program.waits.tolist() == [(0, 2), (1, 1)]
    assert program.signals.tolist() == [(0, 0), (0, 1), (0, 0)]
    assert program.events["threshold"].tolist() == [2, 1]
    assert program.tasks["wait_count"].tolist() == [0, 0, 1, 1]
    assert program.tasks["signal_count"].tolist() == [2, 1, 0, 0]
    assert program.tasks["op"].tolist() == [0, 1, 0, 1]
    assert program.tasks["number"].tolist() == [0, 0, 1, 1]
    assert program.ops["kind"].tolist() == [AIC, AIV]


def test_empty_programs_are_scheduled():
    plan = plan_of(TileProgram.from_edges([], []), SMALL)
    assert len(plan.tasks) == 0
    assert len(plan.sections["queues"]) == 5


@pytest.mark.parametrize(
    ("make", "path"),
    [(lambda: chain(100), 100 + 99 * 7), (lambda: flat(100), 1), (lambda: grid(10), 19 + 18 * 7)],
    ids=["chain", "flat", "grid"],
)
def test_shapes_have_the_longest_path_that_they_should(make, path):
    plan = plan_of(make(), SMALL)
    assert longest_path([plan]) == path
    found = bounds(plan)
    assert plan.predicted_ns >= max(found.path, found.work_aiv)
    assert plan.predicted_ns <= 100 + 100 * 7


def test_the_longest_path_decides_who_goes_first():
    # Task 0 and the chain 1 -> 2 -> 3 -> 4 compete for one core at the start; the chain must not wait.
    program = TileProgram.from_edges([50, 10, 40, 40, 40], [(1, 2), (2, 3), (3, 4)])
    one_core = SMALL.model_copy(update={"aiv": 1, "event_ns": 0})
    plan = plan_of(program, one_core)
    order = plan.tasks["number"].tolist()
    assert order[0] == 1
    assert plan.predicted_ns == 180


def test_a_core_waits_for_the_event_and_not_only_for_its_own_turn():
    # Two consumers, two idle cores: neither may start before the producer's signal has arrived.
    plan = plan_of(TileProgram.from_edges([10, 5, 5], [(0, 1), (0, 2)]), SMALL)
    assert sorted(plan.tasks["start_ns"].tolist()) == [0, 17, 17]


@pytest.mark.parametrize("shape", [lambda: chain(10**6), lambda: flat(10**6), lambda: grid(1000)])
def test_a_million_empty_tasks_are_scheduled_in_seconds(shape):
    begin = time.process_time()
    plan = plan_of(shape(), "ascend-a3")
    assert time.process_time() - begin < 20
    assert len(plan.tasks) == 10**6


def test_a_quarter_of_a_million_tiles_are_lowered_and_scheduled_in_seconds():
    graph = hm.TaskGraph("large")
    rows = graph.rows("tokens", groups=256)
    h = graph.cube("up", hm.ops.GroupedMatmul(), graph.input("x", (rows, 64)), graph.input("w", (256, 64, 4096)))
    graph.output("y", graph.vector("act", hm.ops.SwiGLU(), h))
    counts = np.random.default_rng(0).multinomial(50_000, np.full(256, 1 / 256))
    begin = time.process_time()
    plan = hm.compile(graph, counts, device="ascend-a3", tiles={"up": (16, 64), "act": (16, 32)})
    assert time.process_time() - begin < 20
    assert len(plan.tasks) > 250_000
    assert bounds(plan).path > 0


def test_the_plan_of_256_experts_takes_moments():
    graph = hm.TaskGraph("moe")
    rows = graph.rows("tokens", groups=256)
    w1, w2 = graph.input("w1", (256, 7168, 4096), "bfloat16"), graph.input("w2", (256, 2048, 7168), "bfloat16")
    h = graph.cube("up", hm.ops.GroupedMatmul(), graph.input("x", (rows, 7168), "bfloat16"), w1)
    graph.output("y", graph.cube("down", hm.ops.GroupedMatmul(), graph.vector("act", hm.ops.SwiGLU(), h), w2))
    counts = np.random.default_rng(0).multinomial(4096 * 8, np.random.default_rng(1).dirichlet(np.ones(256)))
    begin = time.process_time()
    plan = hm.compile(graph, counts, device="ascend-a3")
    assert time.process_time() - begin < 2
    for name, (high, wide) in plan.header.tiles.items():
        assert high >= 32, name
        assert wide >= 128, name


def test_tiles_the_cost_model_chooses_are_not_degenerate():
    for device in ("cpu", "ascend-a2", "ascend-a3"):
        for tokens, hidden, intermediate, experts in ((2048, 1024, 512, 8), (32768, 2048, 768, 128), (64, 512, 256, 4)):
            graph = hm.TaskGraph("moe")
            rows = graph.rows("tokens", groups=experts)
            w1 = graph.input("w1", (experts, hidden, 2 * intermediate))
            w2 = graph.input("w2", (experts, intermediate, hidden))
            h = graph.cube("up", hm.ops.GroupedMatmul(), graph.input("x", (rows, hidden)), w1)
            a = graph.vector("act", hm.ops.SwiGLU(), h)
            graph.output("y", graph.cube("down", hm.ops.GroupedMatmul(), a, w2))
            counts = np.random.default_rng(0).multinomial(tokens, np.full(experts, 1 / experts))
            plan = hm.compile(graph, counts, device=device)
            for op in plan.ops_with_tasks():
                boxes = plan.sections["accesses"]
                mine = plan.tasks[plan.tasks["op"] == op]
                written = boxes[mine["access_begin"] + mine["access_count"] - 1]
                whole = plan.sections["tensors"][written["tensor"][0]]
                assert written["cols"].min() >= min(64, int(whole["cols"]) // 4), (device, tokens, op)
            least = plan.tasks["cost_ns"].min()
            assert least > plan.device.task_ns  # a task does more than it costs to have it
