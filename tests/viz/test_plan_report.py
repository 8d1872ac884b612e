"""The report says what the plan holds."""

from __future__ import annotations

import pytest

import hyper_mpmd as hm
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.routing import make_routing
from hyper_mpmd.viz.summary import summarize


def plans(ranks=1, policy="O1", device="cpu", hidden=64, intermediate=32):
    routing = make_routing("zipf:1.5", tokens=50, experts=4, top_k=2, ranks=ranks)
    graph = moe_ffn(hidden, intermediate, 4, 2, ranks=ranks)
    return hm.compile(graph, routing.loads(), world=ranks, policy=policy, device=device), routing


@pytest.mark.parametrize("policy", ["O0", "O1"])
@pytest.mark.parametrize("device", ["cpu", "ascend-a3"])
def test_path_and_work_do_not_exceed_the_prediction(policy, device):
    world, _ = plans(policy=policy, device=device)
    found = summarize(world[0])
    assert 0 < found.bounds["path"] <= found.predicted_ns
    assert 0 < max(ns for name, ns in found.bounds.items() if name.startswith("work")) <= found.predicted_ns


def test_a_memory_bound_beyond_the_prediction_is_pointed_out():
    graph = hm.TaskGraph("wide")
    rows = graph.rows("rows", groups=64)
    x, w = graph.input("x", (rows, 1024)), graph.input("w", (64, 1024, 1024))
    graph.output("y", graph.cube("product", hm.ops.GroupedMatmul(), x, w))
    plan = hm.compile(graph, [1] * 64, device="ascend-a3")
    assert summarize(plan).of_bound > 1
    assert "note: memory, where caches" in plan.report()


def test_a_rank_without_rows_does_not_hide_the_tile_sizes_of_the_others():
    graph = hm.TaskGraph("uneven", ranks=2)
    x, w = graph.input("x", (graph.rows("rows"), 64)), graph.input("w", (64, 64))
    graph.output("y", graph.cube("product", hm.ops.Matmul(), x, w))
    world = hm.compile(graph, [0, 20], world=2, tiles={"product": (20, 32)})
    assert "20 x 32" in world.report()


def test_flops_are_those_of_the_products():
    world, routing = plans(hidden=64, intermediate=32)
    by_name = {op.name: op for op in summarize(world[0]).ops}
    rows = int(routing.counts.sum())
    assert by_name["up"].flops == 2 * rows * 64 * 64
    assert by_name["down"].flops == 2 * rows * 32 * 64


def test_what_is_put_to_others_follows_from_the_counts():
    world, routing = plans(ranks=2)
    away = routing.counts[0, 2:].sum() + routing.counts[1, :2].sum()  # dispatched by 0, and back from 0 to 1
    assert summarize(world[0]).put_bytes == away * 64 * 4


def test_a_world_has_a_column_a_rank_and_a_large_one_the_extremes():
    world, _ = plans(ranks=2)
    assert "rank 0" in world.report()
    assert "rank 1" in world.report()
    graph = hm.TaskGraph("all", ranks=16)
    graph.output("y", graph.comm("put", hm.ops.Put(), graph.input("x", (graph.rows("rows"), 8))))
    text = hm.compile(graph, [3] * 16, world=16).report()
    assert "smallest" in text
    assert "rank 9" not in text


def test_an_op_without_rows_is_listed_without_tiles():
    graph = hm.TaskGraph("none")
    rows = graph.rows("rows", groups=2)
    y = graph.cube("product", hm.ops.GroupedMatmul(), graph.input("x", (rows, 8)), graph.input("w", (2, 8, 8)))
    graph.output("y", y)
    text = hm.compile(graph, [0, 0]).report()
    assert "product" in text
    assert "0 tasks" in text
