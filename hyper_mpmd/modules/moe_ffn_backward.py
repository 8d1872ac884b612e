"""The built-in graph `moe-ffn-backward`: the gradients of `moe-ffn`, weight gradients beside communication.

The router's weight of a row is applied at the very end of the forward pass. Its gradient is the product of the row that
came back and the row of dy; seen from the expert, that is the product of the activation and dy @ w2.T. So the weights
travel to the experts with the rows of dy, one scalar a row comes back, and no output of the experts is kept.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from hyper_mpmd import ops
from hyper_mpmd.errors import UnknownTensorError
from hyper_mpmd.modules.moe_ffn import check_sizes
from hyper_mpmd.modules.tensor_parallel import add_parts, add_sum
from hyper_mpmd.tasks import DispatchMode, DType, TaskGraph, Team

Gradient = Literal["dx", "dweights", "dw1", "dw2"]
GRADIENTS: tuple[Gradient, ...] = get_args(Gradient)


def moe_ffn_backward(
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    *,
    ranks: int = 1,
    tp: int = 1,
    dtype: DType = "float32",
    dispatch_mode: DispatchMode = "push",
    wanted: Collection[Gradient] = GRADIENTS,
    swiglu_limit: float | None = None,
) -> TaskGraph:
    """dispatch(dy) -> {act_grad, w2_grad}; act_grad -> swiglu_grad -> {gate_grad, w1_grad}; gate_grad -> combine -> dx.

    Sizes, ranks, row spaces, swiglu_limit, dispatch_mode (of the rows; the router's weights, one scalar a row, are
    pushed) and errors as `moe_ffn`. Inputs of each rank, those that the wanted gradients need:
    dy [batch, H]; gather [routed] and back [batch, K] int32, as for `moe_ffn`; scores [routed] float32, the router's
    weight of each routed row; places [routed] int32, back as one row, with tp > 1 [routed, tp], see `score_places`;
    received [rows, H] and gate_up [rows, 2I / tp], which `moe_ffn(keep=True)` gives; w1, w2; with tp > 1 shares, as for
    `moe_ffn`. Outputs: dx [T, H]; dweights [routed] float32, the gradients of the router's weights, by token; both
    sums over a team and the same on all of it; dw1, dw2, as w1 and w2, zero for experts without rows. wanted: which of
    them. On more than one rank all ranks want the same.
    """
    ep = check_sizes("moe-ffn-backward", hidden, intermediate, experts, top_k, ranks, tp)
    if not wanted or not set(wanted) <= set(GRADIENTS):
        raise UnknownTensorError(f"moe-ffn-backward: wanted is {wanted!r}; it must be some of {', '.join(GRADIENTS)}")
    here, inner = experts // ep, intermediate // tp
    g = TaskGraph("moe-ffn-backward", ranks=ranks)
    batch = g.rows("batch", groups=tp)
    routed = g.rows("routed", groups=experts)
    add_parts(g, tp)
    owners = Team(ep, tp)
    space = routed if ep == 1 else g.routed_rows(routed, "scatter", team=owners)
    dy = g.input("dy", (batch, hidden), dtype)
    gather = g.input("gather", (routed,), "int32")
    scores = g.input("scores", (routed,))
    gate_up = g.input("gate_up", (space, 2 * inner), dtype)

    rows = g.vector("permute", ops.Permute(), dy, gather)
    if ep > 1:
        rows = g.comm("dispatch", ops.Dispatch(team=owners, mode=dispatch_mode), rows)
        scores = g.comm("dispatch_scores", ops.Dispatch(team=owners), scores)
    if "dw2" in wanted:
        act = g.vector("weighted_act", ops.WeightedSwiGLU(limit=swiglu_limit), gate_up, scores)
        g.output("dw2", g.cube("w2_grad", ops.GroupedMatmulDW(groups=here), act, rows))
    if set(wanted) == {"dw2"}:
        return g
    w2 = g.input("w2", (here, inner, hidden), dtype)
    d_act = g.cube("act_grad", ops.GroupedMatmulT(), rows, w2)
    d_gate_up, d_scores = g.vector("swiglu_grad", ops.SwiGLUGrad(limit=swiglu_limit), gate_up, d_act, scores)
    if "dx" in wanted:
        w1 = g.input("w1", (here, hidden, 2 * inner), dtype)
        back = g.input("back", (batch, top_k), "int32")
        rows = g.cube("gate_grad", ops.GroupedMatmulT(), d_gate_up, w1)
        if ep > 1:
            rows = g.comm("combine", ops.Combine(), rows)
        dx = g.vector("sum", ops.GatherSum(), rows, back)
        g.output("dx", add_sum(g, dx, tp))
    if "dw1" in wanted:
        received = g.input("received", (space, hidden), dtype)
        g.output("dw1", g.cube("w1_grad", ops.GroupedMatmulDW(groups=here), received, d_gate_up))
    if "dweights" in wanted:
        if ep > 1:
            d_scores = g.comm("combine_scores", ops.Combine(), d_scores)
        if tp == 1:
            places = g.input("places", (routed,), "int32")
            dweights = g.vector("by_token", ops.PermuteScalars(), d_scores, places)
        else:  # scalars: few enough to be put to everybody, and summed where they change their order anyway
            terms = g.comm("gather_scores", ops.Put(to="all", team=Team(tp)), d_scores)
            places = g.input("places", (routed, tp), "int32")
            dweights = g.vector("by_token", ops.GatherSumScalars(), terms, places)
        g.output("dweights", dweights)
    return g
