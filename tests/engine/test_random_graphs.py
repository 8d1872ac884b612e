"""Random graphs, worlds and loads: the engine computes what plain torch computes, and policies agree bit for bit."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.engine.compare import max_rel_error
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.moe_ffn_backward import moe_ffn_backward
from hyper_mpmd.modules.routing import make_routing
from hyper_mpmd.scheduler.policies import PARTS, POLICIES
from hyper_mpmd.testing.graphs import graphs, inputs_for, loads_of, tiles_of


@given(data=st.data(), ranks=st.integers(1, 4), workers=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_engine_equals_reference_and_policies_agree(data, ranks, workers):
    graph = data.draw(graphs(ranks=ranks))
    loads, tiles = data.draw(loads_of(graph)), data.draw(tiles_of(graph))
    inputs = inputs_for(graph, loads, seed=data.draw(st.integers(0, 9)))
    assume(inputs is not None)
    worlds = {policy: hm.compile(graph, loads, policy=policy, world=ranks, tiles=tiles) for policy in ("O0", "O1")}
    # The published design cuts tiles of its own; everything else is the same plan otherwise ordered.
    worlds["published"] = hm.compile(graph, loads, policy="published", world=ranks)
    wanted = worlds["O0"].run(inputs, engine="reference")
    first, second, third = (world.run(inputs, workers=workers, timeout=30) for world in worlds.values())
    assert max_rel_error(first, wanted) <= 1e-5
    assert max_rel_error(third, wanted) <= 1e-5
    for own, other in zip(first, second, strict=True):
        for name, tensor in own.items():
            assert tensor.shape == other[name].shape
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("direction", [moe_ffn, moe_ffn_backward])
@pytest.mark.parametrize("pattern", ["balanced", "zipf:1.2", "single"])
def test_policies_give_the_layer_the_same_results(direction, pattern):
    """Every policy, and each without each of its parts: results are those of O0, bit for bit where tiles are alike."""
    graph = direction(64, 32, 8, 2, ranks=4)
    loads = make_routing(pattern, tokens=60, experts=8, top_k=2, ranks=4).loads()
    inputs = inputs_for(graph, loads, seed=3)
    wanted = hm.compile(graph, loads, policy="O0", world=4).run(inputs, engine="reference")
    tiles = {node.name: (16, 32) for node in graph.nodes}
    alike = []
    for policy in (*POLICIES, *(f"O1-no-{part}" for part in PARTS)):
        world = hm.compile(graph, loads, policy=policy, world=4, tiles=tiles)
        alike.append(world.run(inputs, workers=2, timeout=30))
        assert max_rel_error(alike[-1], wanted) <= 1e-5, policy
        assert all(torch.equal(a[n], b[n]) for a, b in zip(alike[0], alike[-1], strict=True) for n in a), policy
    own_tiles = hm.compile(graph, loads, policy="published", world=4)
    assert max_rel_error(own_tiles.run(inputs, workers=2, timeout=30), wanted) <= 1e-5


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
