"""The built-in graph `moe-ffn`: a Mixture-of-Experts feed-forward over one rank or many, from routing to outputs."""

from __future__ import annotations

from hyper_mpmd import ops
from hyper_mpmd.errors import ShapeError, WorldSizeError
from hyper_mpmd.modules.tensor_parallel import add_parts, add_sum, check_tp
from hyper_mpmd.scheduler.records import MAX_RANKS
from hyper_mpmd.tasks import DispatchMode, DType, TaskGraph, Team


def moe_ffn(
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    *,
    ranks: int = 1,
    tp: int = 1,
    dtype: DType = "float32",
    dispatch_mode: DispatchMode = "push",
    keep: bool = False,
    swiglu_limit: float | None = None,
) -> TaskGraph:
    """permute, [dispatch], up, act, down, [combine], unpermute, [reduce_scatter, reduce, all_gather].

    Dispatch and combine where experts are shared out over ranks, the last three where each expert is cut over tp ranks.
    H = hidden, I = intermediate, E = experts over all ranks, K = top_k. ranks: EP * tp, rank r being (r // tp, r % tp);
    the tp ranks of a team hold the same tokens and shards of the same experts, and get the same y. Row spaces: "batch"
    (the T tokens of a rank, in tp groups, see `token_parts`) and "routed" (their T * K copies, E groups); with tp > 1
    "part" (the rank's own group of "batch").

    Inputs of each rank: x [batch, H]; gather [routed] int32, the token of each routed row; back [batch, K] int32, the
    routed rows of each token; weights [batch, K] float32; w1 [E / EP, H, 2I / tp], gate half first; w2 [E / EP, I / tp,
    H]; with tp > 1 shares [part, tp] int32, see `share_rows`. Output: y [T, H]. dtype: of x, w1, w2 and y.
    dispatch_mode: "push": each rank writes its rows into the experts' ranks; "pull": those read them. See `ops.Put`.
    keep: also output what `moe_ffn_backward` takes: received, the rows that reached this rank's experts, [rows, H], and
    gate_up, their first product, [rows, 2I / tp]. swiglu_limit: see `ops.SwiGLU`.

    Errors: ShapeError for a size below 1, more choices than experts or an I that tp does not divide, WorldSizeError
    where ranks are past the limit, tp does not divide them or EP does not divide E.
    """
    ep = check_sizes("moe-ffn", hidden, intermediate, experts, top_k, ranks, tp)
    g = TaskGraph("moe-ffn", ranks=ranks)
    batch = g.rows("batch", groups=tp)
    routed = g.rows("routed", groups=experts)
    add_parts(g, tp)
    x = g.input("x", (batch, hidden), dtype)
    gather = g.input("gather", (routed,), "int32")
    back = g.input("back", (batch, top_k), "int32")
    weights = g.input("weights", (batch, top_k))
    w1 = g.input("w1", (experts // ep, hidden, 2 * intermediate // tp), dtype)
    w2 = g.input("w2", (experts // ep, intermediate // tp, hidden), dtype)

    rows = g.vector("permute", ops.Permute(), x, gather)
    if ep > 1:
        rows = g.comm("dispatch", ops.Dispatch(team=Team(ep, tp), mode=dispatch_mode), rows)
    received = rows
    gate_up = rows = g.cube("up", ops.GroupedMatmul(), rows, w1)
    rows = g.vector("act", ops.SwiGLU(limit=swiglu_limit), rows)
    rows = g.cube("down", ops.GroupedMatmul(), rows, w2)
    if ep > 1:
        rows = g.comm("combine", ops.Combine(), rows)
    y = g.vector("unpermute", ops.Unpermute(), rows, back, weights)
    g.output("y", add_sum(g, y, tp))
    if keep:
        g.output("received", received)
        g.output("gate_up", gate_up)
    return g


def check_sizes(graph: str, hidden: int, intermediate: int, experts: int, top_k: int, ranks: int, tp: int) -> int:
    """Refuse sizes that no layer can have; errors as `moe_ffn`. Returns EP, how many ranks share the experts out."""
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ShapeError(f"{graph}: {name} is {size!r}; it must be an int of at least 1")
    if top_k > experts:
        raise ShapeError(f"{graph}: top_k is {top_k}, but a token can pick each of {experts} experts only once")
    if not 1 <= ranks <= MAX_RANKS:
        raise WorldSizeError(f"{graph}: {ranks} ranks; it must be from 1 to {MAX_RANKS}")
    ep = check_tp(graph, intermediate, ranks, tp)
    if experts % ep:
        raise WorldSizeError(f"{graph}: {experts} experts cannot be shared out evenly over {ep} ranks")
    return ep
