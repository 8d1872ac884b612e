"""The built-in graph `moe-ffn`: a Mixture-of-Experts feed-forward over one rank or many, from routing to outputs."""

from __future__ import annotations

from hyper_mpmd import ops
from hyper_mpmd.errors import ShapeError, WorldSizeError
from hyper_mpmd.scheduler.records import MAX_RANKS
from hyper_mpmd.tasks import DType, TaskGraph


def moe_ffn(
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    *,
    ranks: int = 1,
    dtype: DType = "float32",
    keep: bool = False,
) -> TaskGraph:
    """permute, [dispatch], up, act, down, [combine], unpermute; dispatch and combine on more than one rank.

    H = hidden, I = intermediate, E = experts over all ranks, K = top_k. Row spaces: "batch" (the T tokens of a rank)
    and "routed" (their T * K copies, E groups). Inputs of each rank: x [batch, H]; gather [routed] int32, the token of
    each routed row; back [batch, K] int32, the routed rows of each token; weights [batch, K] float32;
    w1 [E / ranks, H, 2I], gate half first; w2 [E / ranks, I, H]. Output: y [batch, H]. dtype: of x, w1, w2 and y.
    keep: also output what `moe_ffn_backward` takes: received, the rows that reached this rank's experts, [rows, H], and
    gate_up, their first product, [rows, 2I].

    Errors: ShapeError for a size below 1 or more choices than experts, WorldSizeError where ranks are past the
    limit or do not divide E.
    """
    check_sizes("moe-ffn", hidden, intermediate, experts, top_k, ranks)
    g = TaskGraph("moe-ffn", ranks=ranks)
    batch = g.rows("batch")
    routed = g.rows("routed", groups=experts)
    x = g.input("x", (batch, hidden), dtype)
    gather = g.input("gather", (routed,), "int32")
    back = g.input("back", (batch, top_k), "int32")
    weights = g.input("weights", (batch, top_k))
    w1 = g.input("w1", (experts // ranks, hidden, 2 * intermediate), dtype)
    w2 = g.input("w2", (experts // ranks, intermediate, hidden), dtype)

    rows = g.vector("permute", ops.Permute(), x, gather)
    if ranks > 1:
        rows = g.comm("dispatch", ops.Dispatch(), rows)
    received = rows
    gate_up = rows = g.cube("up", ops.GroupedMatmul(), rows, w1)
    rows = g.vector("act", ops.SwiGLU(), rows)
    rows = g.cube("down", ops.GroupedMatmul(), rows, w2)
    if ranks > 1:
        rows = g.comm("combine", ops.Combine(), rows)
    g.output("y", g.vector("unpermute", ops.Unpermute(), rows, back, weights))
    if keep:
        g.output("received", received)
        g.output("gate_up", gate_up)
    return g


def check_sizes(graph: str, hidden: int, intermediate: int, experts: int, top_k: int, ranks: int) -> None:
    """Refuse sizes that no layer can have; errors as `moe_ffn`."""
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ShapeError(f"{graph}: {name} is {size!r}; it must be an int of at least 1")
    if top_k > experts:
        raise ShapeError(f"{graph}: top_k is {top_k}, but a token can pick each of {experts} experts only once")
    if not 1 <= ranks <= MAX_RANKS:
        raise WorldSizeError(f"{graph}: {ranks} ranks; it must be from 1 to {MAX_RANKS}")
    if experts % ranks:
        raise WorldSizeError(f"{graph}: {experts} experts cannot be shared out evenly over {ranks} ranks")
