"""Random graphs, worlds and loads: the engine computes what plain torch computes, and policies agree bit for bit."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.engine.compare import max_rel_error
from hyper_mpmd.testing.graphs import graphs, inputs_for, loads_of, tiles_of


@given(data=st.data(), ranks=st.integers(1, 4), workers=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_engine_equals_reference_and_policies_agree(data, ranks, workers):
    graph = data.draw(graphs(ranks=ranks))
    loads, tiles = data.draw(loads_of(graph)), data.draw(tiles_of(graph))
    inputs = inputs_for(graph, loads, seed=data.draw(st.integers(0, 9)))
    assume(inputs is not None)
    worlds = {policy: hm.compile(graph, loads, policy=policy, world=ranks, tiles=tiles) for policy in ("O0", "O1")}
    wanted = worlds["O0"].run(inputs, engine="reference")
    first, second = (world.run(inputs, workers=workers, timeout=30) for world in worlds.values())
    assert max_rel_error(first, wanted) <= 1e-5
    for own, other in zip(first, second, strict=True):
        for name, tensor in own.items():
            assert tensor.shape == other[name].shape
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_an_input_may_be_declared_after_a_task(policy):
    """Plans number tensors; the graph that they carry must number them alike."""
    g = hm.TaskGraph("late")
    x, v = g.input("x", (g.rows("r"), 64)), g.input("v", (64, 96))
    h = g.cube("h", hm.ops.Matmul(), x, v)
    g.output("y", g.cube("y", hm.ops.Matmul(), h, g.input("w", (96, 32))))
    plan = hm.compile(g, 40, policy=policy)
    assert list(plan.graph.tensors) == list(g.tensors)
    inputs = {"x": torch.randn(40, 64), "v": torch.randn(64, 96) / 8, "w": torch.randn(96, 32) / 10}
    torch.testing.assert_close(plan.run(**inputs)["y"], inputs["x"] @ inputs["v"] @ inputs["w"])
