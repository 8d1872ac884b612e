"""The graph moe-ffn-backward gives the gradients of torch's autograd, on one rank and on several, in any policy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.engine.compare import digest, max_rel_error
from hyper_mpmd.errors import ShapeError, UnknownTensorError, WorldSizeError
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.moe_ffn_backward import GRADIENTS, moe_ffn_backward
from hyper_mpmd.modules.moe_inputs import by_routed_row, make_backward_inputs, make_inputs
from hyper_mpmd.modules.routing import make_routing

HIDDEN, INNER, EXPERTS, TOP_K = 48, 24, 8, 2


def torch_gradients(routing, inputs, dy):
    """dx, dweights of each rank and dw1, dw2 over all experts, by autograd in float64."""
    w1 = torch.cat([own["w1"] for own in inputs]).double().requires_grad_()
    w2 = torch.cat([own["w2"] for own in inputs]).double().requires_grad_()
    xs = [own["x"].double().requires_grad_() for own in inputs]
    weights = [own["weights"].double().requires_grad_() for own in inputs]
    total = torch.zeros((), dtype=torch.float64)
    for x, scores, ids, gradient in zip(xs, weights, routing.ids, dy, strict=True):
        y = torch.zeros_like(x)
        for k in range(ids.shape[1]):
            for expert in range(routing.experts):
                picked = torch.from_numpy(ids[:, k] == expert)
                gate, up = (x[picked] @ w1[expert]).chunk(2, dim=1)
                rows = (torch.nn.functional.silu(gate) * up) @ w2[expert]
                y = y.index_add(0, picked.nonzero().flatten(), scores[picked, k, None] * rows)
        total = total + (y * gradient.double()).sum()
    total.backward()
    return xs, weights, w1, w2


@pytest.mark.parametrize("pattern", ["balanced", "zipf:1.2", "single"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 3e-3)])
def test_forward_then_backward_gives_the_gradients_of_autograd(pattern, ranks, dtype, limit):
    routing = make_routing(pattern, tokens=37, experts=EXPERTS, top_k=TOP_K, ranks=ranks)
    inputs = make_inputs(routing, HIDDEN, INNER, dtype=dtype)
    forward = hm.compile(
        moe_ffn(HIDDEN, INNER, EXPERTS, TOP_K, ranks=ranks, dtype=dtype, keep=True), routing.loads(), world=ranks
    )
    kept = forward.run(inputs, timeout=30)
    dy = [torch.randn(own["x"].shape).to(own["x"].dtype) for own in inputs]
    backward = hm.compile(
        moe_ffn_backward(HIDDEN, INNER, EXPERTS, TOP_K, ranks=ranks, dtype=dtype), routing.loads(), world=ranks
    )
    given = [
        {
            **{name: own[name] for name in ("gather", "back", "w1", "w2")},
            **{name: saved[name] for name in ("received", "gate_up")},
            "dy": gradient,
            "scores": by_routed_row(own["weights"], own["back"]),
            "places": own["back"].flatten(),
        }
        for own, saved, gradient in zip(inputs, kept, dy, strict=True)
    ]
    made = backward.run(given, timeout=30)
    xs, weights, w1, w2 = torch_gradients(routing, inputs, dy)
    own = EXPERTS // ranks
    have, want = [], []
    for rank, gradients in enumerate(made):
        mine = slice(rank * own, (rank + 1) * own)
        have.append(gradients)
        want.append({"dx": xs[rank].grad, "dweights": weights[rank].grad, "dw1": w1.grad[mine], "dw2": w2.grad[mine]})
        empty = torch.from_numpy(routing.counts.sum(axis=0)[mine] == 0)
        assert gradients["dw1"][empty].count_nonzero() == gradients["dw2"][empty].count_nonzero() == 0
    for name in want[0]:
        whole = [{name: torch.cat([rank[name].double().flatten() for rank in side])} for side in (have, want)]
        assert max_rel_error([whole[0]], [whole[1]]) <= limit, name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_policies_give_the_same_bits_and_those_of_the_reference_up_to_rounding(ranks):
    routing = make_routing("zipf:1.2", tokens=50, experts=EXPERTS, top_k=TOP_K, ranks=ranks)
    inputs = make_backward_inputs(routing, HIDDEN, INNER)
    outputs = []
    for policy in ("O0", "O1"):
        world = hm.compile(
            moe_ffn_backward(HIDDEN, INNER, EXPERTS, TOP_K, ranks=ranks), routing.loads(), world=ranks, policy=policy
        )
        outputs += [world.run(inputs, workers=workers, timeout=30) for workers in (1, 2)]
    assert len({digest(made) for made in outputs}) == 1
    assert max_rel_error(outputs[0], world.run(inputs, engine="reference")) <= 1e-5


@settings(max_examples=40, deadline=None)
@given(
    wanted=st.sets(st.sampled_from(GRADIENTS), min_size=1),
    ranks=st.sampled_from([1, 2]),
    hidden=st.integers(1, 40),
    inner=st.integers(1, 40),
    tokens=st.integers(0, 20),
    pattern=st.sampled_from(["balanced", "zipf:2", "single"]),
)
def test_any_wanted_gradients_are_those_of_all_of_them(wanted, ranks, hidden, inner, tokens, pattern):
    routing = make_routing(pattern, tokens=tokens, experts=4, top_k=3, ranks=ranks)
    inputs = make_backward_inputs(routing, hidden, inner)
    every = hm.compile(moe_ffn_backward(hidden, inner, 4, 3, ranks=ranks), routing.loads(), world=ranks)
    graph = moe_ffn_backward(hidden, inner, 4, 3, ranks=ranks, wanted=wanted)
    some = hm.compile(graph, routing.loads(), world=ranks)
    assert hm.TaskGraph.from_json(graph.to_json()) == graph
    needed = [{name: own[name] for name in graph.inputs} for own in inputs]
    for have, want in zip(some.run(needed, timeout=30), every.run(inputs, timeout=30), strict=True):
        assert set(have) == wanted
        assert all(torch.equal(have[name], want[name]) for name in wanted)


def test_sizes_and_gradients_that_cannot_be_are_refused():
    with pytest.raises(ShapeError, match="moe-ffn-backward: hidden is 0"):
        moe_ffn_backward(0, INNER, EXPERTS, TOP_K)
    with pytest.raises(WorldSizeError, match="8 experts cannot be shared out evenly over 3 ranks"):
        moe_ffn_backward(HIDDEN, INNER, EXPERTS, TOP_K, ranks=3)
    for wanted in ((), ("dz",)):
        with pytest.raises(UnknownTensorError, match="must be some of dx, dweights, dw1, dw2"):
            moe_ffn_backward(HIDDEN, INNER, EXPERTS, TOP_K, wanted=wanted)
