"""Small graphs and ops that the engine's tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

import hyper_mpmd as hm
from hyper_mpmd.tasks import Access, CoreKind, Layout, Op, TaskGraph, Tensor, TensorType, Tile, TileRule

LOADS = [128, 0, 37, 300, 1, 64, 64, 70]

# What the kernel of Probe does, set by the test that runs it. A graph holds no functions, so it is found here.
PROBE: dict[str, Callable[[Tile], None]] = {}


class Probe(Op):
    """y = 2 x by a Python kernel, which calls PROBE["call"] first."""

    core: ClassVar[CoreKind] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),),),
        outputs=((Access("rows", "cols"),),),
    )

    def shapes(self, inputs: list[Tensor]) -> tuple[TensorType, ...]:
        return (TensorType(inputs[0].shape, inputs[0].dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return inputs[0] * 2

    def kernel(self, tile: Tile, *views: Any) -> None:
        if "call" in PROBE:
            PROBE["call"](tile)
        x, y = views
        y.copy_(x * 2)


class DoubleInPlace(Op):
    """y = 2 x in the memory of x."""

    core: ClassVar[CoreKind] = "vector"
    inplace: ClassVar[dict[int, int]] = {0: 0}
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),),),
        outputs=((Access("rows", "cols"),),),
    )

    def shapes(self, inputs: list[Tensor]) -> tuple[TensorType, ...]:
        return (TensorType(inputs[0].shape, inputs[0].dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return inputs[0] * 2

    def kernel(self, tile: Tile, *views: Any) -> None:
        x, _ = views
        x.mul_(2)


def ffn(hidden: int = 64, inner: int = 32, dtype: str = "float32") -> TaskGraph:
    """The feed-forward of the README at a size of one's choice, 8 experts."""
    g = hm.TaskGraph("ffn")
    rows = g.rows("tokens", groups=8)
    x = g.input("x", (rows, hidden), dtype)
    w1 = g.input("w1", (8, hidden, 2 * inner), dtype)
    w2 = g.input("w2", (8, inner, hidden), dtype)
    h = g.cube("up", hm.ops.GroupedMatmul(), x, w1)
    a = g.vector("act", hm.ops.SwiGLU(), h)
    g.output("y", g.cube("down", hm.ops.GroupedMatmul(), a, w2))
    return g


def ffn_inputs(hidden: int = 64, inner: int = 32, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Inputs that make outputs of size one."""
    made = torch.Generator().manual_seed(7)
    return {
        "x": torch.randn(sum(LOADS), hidden, generator=made).to(dtype),
        "w1": (torch.randn(8, hidden, 2 * inner, generator=made) / hidden**0.5).to(dtype),
        "w2": (torch.randn(8, inner, hidden, generator=made) / inner**0.5).to(dtype),
    }


def probe_graph(rows: int = 64) -> tuple[TaskGraph, dict[str, torch.Tensor]]:
    """One Probe over `rows` rows, and its input."""
    g = hm.TaskGraph("probe")
    x = g.input("x", (rows, 16))
    g.output("y", g.vector("probe", Probe(), x))
    return g, {"x": torch.arange(rows * 16, dtype=torch.float32).view(rows, 16)}


def relative_error(have: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over largest value; a zero result is 1, unless zero is wanted."""
    if want.numel() == 0 or not want.any():
        return float("inf") if have.any() else 0.0
    return float((have.float() - want.float()).abs().max() / want.float().abs().max())


def moe(ranks: int, experts: int = 8, hidden: int = 64, inner: int = 32, top_k: int = 2) -> TaskGraph:
    """permute, dispatch, up, act, down, combine, unpermute."""
    ops = hm.ops
    g = hm.TaskGraph("moe", ranks=ranks)
    batch, routed = g.rows("batch"), g.rows("routed", groups=experts)
    x = g.input("x", (batch, hidden))
    gather = g.input("gather", (routed,), "int32")
    back = g.input("back", (batch, top_k), "int32")
    weights = g.input("weights", (batch, top_k))
    w1 = g.input("w1", (experts // ranks, hidden, 2 * inner))
    w2 = g.input("w2", (experts // ranks, inner, hidden))
    rows = g.vector("permute", ops.Permute(), x, gather)
    rows = g.comm("dispatch", ops.Dispatch(), rows)
    rows = g.cube("up", ops.GroupedMatmul(), rows, w1)
    rows = g.vector("act", ops.SwiGLU(), rows)
    rows = g.cube("down", ops.GroupedMatmul(), rows, w2)
    rows = g.comm("combine", ops.Combine(), rows)
    g.output("y", g.vector("unpermute", ops.Unpermute(), rows, back, weights))
    return g


def moe_inputs(
    ids: list[torch.Tensor], experts: int = 8, hidden: int = 64, inner: int = 32, seed: int = 3
) -> tuple[list[dict[str, torch.Tensor]], list[list[int]], list[torch.Tensor]]:
    """From each rank's expert ids [T, K]: inputs, counts, and what a plain loop over tokens gives."""
    ranks = len(ids)
    made = torch.Generator().manual_seed(seed)
    w1 = torch.randn(experts, hidden, 2 * inner, generator=made) / hidden**0.5
    w2 = torch.randn(experts, inner, hidden, generator=made) / inner**0.5
    inputs, counts, expected = [], [], []
    for rank, chosen in enumerate(ids):
        tokens, top_k = chosen.shape
        order = torch.argsort(chosen.flatten(), stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(tokens * top_k)
        x = torch.randn(tokens, hidden, generator=made)
        weights = torch.rand(tokens, top_k, generator=made) + 0.5
        own = experts // ranks
        inputs.append(
            {
                "x": x,
                "gather": (order // top_k).int(),
                "back": back.view(tokens, top_k).int(),
                "weights": weights,
                "w1": w1[rank * own : (rank + 1) * own].contiguous(),
                "w2": w2[rank * own : (rank + 1) * own].contiguous(),
            }
        )
        counts.append(torch.bincount(chosen.flatten(), minlength=experts).tolist())
        y = torch.zeros(tokens, hidden)
        for token in range(tokens):
            for k in range(top_k):
                gate, up = (x[token] @ w1[chosen[token, k]]).chunk(2)
                y[token] += weights[token, k] * ((torch.nn.functional.silu(gate) * up) @ w2[chosen[token, k]])
        expected.append(y)
    return inputs, counts, expected
