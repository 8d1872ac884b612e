"""moe-ffn and moe-ffn-backward with each expert cut over ranks: the results of whole experts, and bits that repeat."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.engine.compare import digest, max_rel_error
from hyper_mpmd.errors import ShapeError, WorldSizeError
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.moe_ffn_backward import GRADIENTS, moe_ffn_backward
from hyper_mpmd.modules.moe_inputs import make_backward_inputs, make_inputs
from hyper_mpmd.modules.routing import make_routing
from hyper_mpmd.modules.tensor_parallel import shard_down, shard_gate_up, share_rows, token_parts

HIDDEN, INNER, EXPERTS, TOP_K = 48, 24, 8, 2
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


def plain_layer(routing, inputs):
    """The output of each expert-parallel rank's tokens, in float64, from the shards put together by hand."""
    tp, per_team = routing.tp, inputs[:: routing.tp]
    half = inputs[0]["w1"].shape[-1] // 2
    gate = torch.cat([torch.cat([own["w1"][..., :half] for own in inputs[e : e + tp]], -1) for e in starts(routing)])
    up = torch.cat([torch.cat([own["w1"][..., half:] for own in inputs[e : e + tp]], -1) for e in starts(routing)])
    down = torch.cat([torch.cat([own["w2"] for own in inputs[e : e + tp]], 1) for e in starts(routing)])
    made = []
    for own, ids in zip(per_team, routing.ids, strict=True):
        x, y = own["x"].double(), torch.zeros(own["x"].shape, dtype=torch.float64)
        for k in range(ids.shape[1]):
            for expert in range(routing.experts):
                mask = torch.from_numpy(ids[:, k] == expert)
                act = torch.nn.functional.silu(x[mask] @ gate[expert].double()) * (x[mask] @ up[expert].double())
                y[mask] += own["weights"][mask, k, None].double() * (act @ down[expert].double())
        made.append(y)
    return made


def starts(routing):
    return range(0, len(routing.ids) * routing.tp, routing.tp)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("pattern", ["balanced", "zipf:1.2", "single"])
def test_shards_together_give_the_whole_layer(pattern, ep, tp, dtype):
    routing = make_routing(pattern, tokens=37, experts=EXPERTS, top_k=TOP_K, ranks=ep, tp=tp)
    inputs = make_inputs(routing, HIDDEN, INNER, dtype=dtype)
    graph = moe_ffn(HIDDEN, INNER, EXPERTS, TOP_K, ranks=ep * tp, tp=tp, dtype=dtype)
    outputs = hm.compile(graph, routing.loads(), world=ep * tp).run(inputs, timeout=30, workers=1)
    for number, wanted in enumerate(plain_layer(routing, inputs)):
        team = outputs[number * tp : (number + 1) * tp]
        assert wanted.abs().max() > 0.5
        assert max_rel_error([{"y": team[0]["y"]}], [{"y": wanted}]) <= LIMITS[dtype]
        assert all(torch.equal(own["y"], team[0]["y"]) for own in team)


def whole_gradients(made, ep, tp):
    """What one rank a team would give: dw1 and dw2 put together from shards, the rest as it is on all of the team."""
    whole = []
    for number in range(ep):
        team = made[number * tp : (number + 1) * tp]
        for name in ("dx", "dweights"):
            assert all(torch.equal(own[name], team[0][name]) for own in team)
        gate, up = zip(*(own["dw1"].chunk(2, dim=-1) for own in team), strict=True)
        dw1, dw2 = torch.cat([*gate, *up], dim=-1), torch.cat([own["dw2"] for own in team], dim=1)
        whole.append({"dx": team[0]["dx"], "dweights": team[0]["dweights"], "dw1": dw1, "dw2": dw2})
    return whole


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2), (1, 3)])
@pytest.mark.parametrize("pattern", ["zipf:1.2", "single"])
def test_gradients_are_those_of_experts_that_nobody_cut(pattern, ep, tp, dtype):
    routings = [
        make_routing(pattern, tokens=37, experts=EXPERTS, top_k=TOP_K, ranks=ep, tp=shards) for shards in (1, tp)
    ]
    results = []
    for routing in routings:
        graph = moe_ffn_backward(HIDDEN, INNER, EXPERTS, TOP_K, ranks=ep * routing.tp, tp=routing.tp, dtype=dtype)
        inputs = make_backward_inputs(routing, HIDDEN, INNER, dtype=dtype)
        results.append(hm.compile(graph, routing.loads(), world=graph.ranks).run(inputs, timeout=30, workers=1))
    assert max_rel_error(whole_gradients(results[1], ep, tp), results[0]) <= LIMITS[dtype]


@pytest.mark.parametrize("build", [moe_ffn, moe_ffn_backward])
def test_policies_and_workers_give_the_same_bits(build):
    routing = make_routing("zipf:1.2", tokens=50, experts=EXPERTS, top_k=TOP_K, ranks=2, tp=2)
    make = make_inputs if build is moe_ffn else make_backward_inputs
    inputs = make(routing, HIDDEN, INNER)
    graph = build(HIDDEN, INNER, EXPERTS, TOP_K, ranks=4, tp=2)
    digests = set()
    for policy in ("O0", "O1"):
        world = hm.compile(graph, routing.loads(), world=4, policy=policy)
        for workers in (1, 2):
            digests.add(digest(world.run(inputs, workers=workers, timeout=30)))
    assert len(digests) == 1


@settings(max_examples=25, deadline=None)
@given(
    wanted=st.sets(st.sampled_from(GRADIENTS), min_size=1),
    ep=st.sampled_from([1, 2]),
    tp=st.sampled_from([2, 3]),
    tokens=st.integers(0, 12),
    pattern=st.sampled_from(["balanced", "zipf:2", "single"]),
)
def test_any_wanted_gradients_with_any_tokens_equal_the_reference(wanted, ep, tp, tokens, pattern):
    routing = make_routing(pattern, tokens=tokens, experts=4, top_k=3, ranks=ep, tp=tp)
    graph = moe_ffn_backward(16, 6, 4, 3, ranks=ep * tp, tp=tp, wanted=wanted)
    assert hm.TaskGraph.from_json(graph.to_json()) == graph
    inputs = [{name: own[name] for name in graph.inputs} for own in make_backward_inputs(routing, 16, 6)]
    world = hm.compile(graph, routing.loads(), world=ep * tp)
    have, want = world.run(inputs, timeout=30, workers=1), world.run(inputs, engine="reference")
    assert set(have[0]) == wanted
    assert max_rel_error(have, want) <= 1e-5


def test_ranks_of_other_token_counts_stand_side_by_side():
    # One team without tokens, one with an odd number: teams need not agree, only ranks of one team.
    routing = make_routing("balanced", tokens=7, experts=4, top_k=2, ranks=2, tp=2)
    routing = type(routing)((routing.ids[0], routing.ids[1][:0]), 4, 2)
    inputs = make_inputs(routing, HIDDEN, INNER)
    outputs = hm.compile(moe_ffn(HIDDEN, INNER, 4, 2, ranks=4, tp=2), routing.loads(), world=4).run(inputs, workers=1)
    wanted = plain_layer(routing, inputs)
    assert [len(own["y"]) for own in outputs] == [7, 7, 0, 0]
    assert max_rel_error(outputs[:1], [{"y": wanted[0]}]) <= 1e-5


def test_parts_and_shards_cover_everything_once():
    for tokens in (0, 1, 5, 8):
        for tp in (1, 2, 3):
            parts = token_parts(tokens, tp)
            assert sum(parts) == tokens
            assert max(parts) - min(parts) <= 1
            for place, rows in enumerate(parts):
                assert sorted(share_rows(tokens, tp, place).flatten()) == list(range(rows * tp))
    w = torch.arange(2 * 3 * 12.0).view(2, 3, 12)
    gate, up = zip(*(shard_gate_up(w, 3, place).chunk(2, dim=-1) for place in range(3)), strict=True)
    assert torch.equal(torch.cat([*gate, *up], dim=-1), w)
    assert torch.equal(torch.cat([shard_down(w, 3, place) for place in range(3)], dim=1), w)


@pytest.mark.parametrize("build", [moe_ffn, moe_ffn_backward])
@pytest.mark.parametrize(
    ("sizes", "ranks", "tp", "kind", "words"),
    [
        ((16, 6, 4, 2), 4, 4, ShapeError, "intermediate is 6, which tp=4"),
        ((16, 6, 4, 2), 4, 3, WorldSizeError, "4 ranks do not make teams of tp=3"),
        ((16, 6, 3, 2), 4, 2, WorldSizeError, "3 experts cannot be shared out evenly over 2 ranks"),
        ((16, 6, 4, 2), 4, 0, WorldSizeError, "tp is 0"),
        ((16, 6, 4, 2), 4, True, WorldSizeError, "tp is True"),
    ],
)
def test_shards_that_cannot_be_are_refused(build, sizes, ranks, tp, kind, words):
    with pytest.raises(kind, match=words):
        build(*sizes, ranks=ranks, tp=tp)
