"""SwiGLU on the way back: the activation under the router's weights, and its gradient.

The router's weight of a row is applied after the expert's second product, which is linear, so on the expert's side it
may as well stand before it: the weight travels with the row, and its gradient is one scalar a row. No output of the
second product needs to be kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import DTypeError, ShapeError
from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.ops.swiglu import Clamped
from hyper_mpmd.tasks.op import CoreKind, Layout, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class WeightedSwiGLU(Clamped):
    """a[r] = weights[r] * silu(h[r, :I]) * h[r, I:].

    Inputs: h [R, 2I], gate half first, float32, bfloat16 or float16; weights [R] float32. Output: [R, I] of h's dtype,
    computed in float32, rounded once. limit: see `Clamped`.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "weighted_swiglu"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="out0.1",
        inputs=((Access("rows", "cols"), Access("rows", "cols", shift=1)), (Access("rows", "all"),)),
        outputs=((Access("rows", "cols"),),),
        flops_per_point=12,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        h, weights = inputs
        half = _half("WeightedSwiGLU", h)
        _check_scalars("WeightedSwiGLU", weights)
        return (TensorType((h.shape[0], half), h.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        h, weights = inputs
        gate, up = self.halves(h.float())
        return (weights[:, None] * (gate * gate.sigmoid() * up)).to(h.dtype)


class SwiGLUGrad(Clamped):
    """The gradients of a[r] = weights[r] * silu(h[r, :I]) * h[r, I:], given grad[r] = (gradient of a[r]) / weights[r].

    With s = 1 / (1 + exp(-g)), g = h[r, :I], u = h[r, I:] and d = weights[r] * grad[r]: the gradient of g is
    d * u * (s + g * s * (1 - s)), that of u is d * g * s, that of weights[r] the sum over I of g * s * u * grad[r].

    Inputs: h [R, 2I], gate half first, and grad [R, I], one dtype of float32, bfloat16, float16; weights [R]
    float32. Outputs: dh [R, 2I] of h's dtype; dweights [R] float32. Computed in float32, rounded once, summed in one
    fixed order. limit: see `Clamped`; dh is 0 where a value of h was clamped.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "swiglu_grad"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in1.1",
        inputs=(
            (Access("rows", "cols"), Access("rows", "cols", shift=1)),
            (Access("rows", "cols"),),
            (Access("rows", "all"),),
        ),
        outputs=((Access("rows", "cols"), Access("rows", "cols", shift=1)), (Access("rows", "all"),)),
        cut_cols=False,
        flops_per_point=20,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        h, grad, weights = inputs
        _half("SwiGLUGrad", h)
        check_one_float_dtype("SwiGLUGrad", [h, grad])
        _check_scalars("SwiGLUGrad", weights)
        return TensorType(h.shape, h.dtype), TensorType((h.shape[0],), "float32")

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        h, grad, weights = inputs
        gate, up = self.halves(h.float())
        sigmoid, down = gate.sigmoid(), grad.float()
        act, weighted = gate * sigmoid, weights[:, None] * down
        d_gate = weighted * up * (sigmoid + act * (1 - sigmoid))
        dh = h.new_empty(h.shape)
        dh[:, : up.shape[1]], dh[:, up.shape[1] :] = d_gate.to(h.dtype), (weighted * act).to(h.dtype)
        if self.limit is not None:
            raw_gate, raw_up = h.float().chunk(2, dim=-1)
            dh[:, : up.shape[1]].masked_fill_(raw_gate > self.limit, 0)
            dh[:, up.shape[1] :].masked_fill_(raw_up.abs() > self.limit, 0)
        return dh, (act * up * down).sum(dim=-1)


def _half(op: str, h: Tensor) -> int:
    """I of h [R, 2I]."""
    check_one_float_dtype(op, [h])
    cols = h.shape[-1]
    if len(h.shape) != 2 or not isinstance(cols, int) or cols % 2:
        raise ShapeError(f"{op} takes [rows, 2I], gate half first, and {h.describe()} is not that")
    return cols // 2


def _check_scalars(op: str, weights: Tensor) -> None:
    if len(weights.shape) != 1:
        raise ShapeError(f"{op} takes one weight a row, [R], and {weights.describe()} is not that")
    if weights.dtype != "float32":
        raise DTypeError(f"{op} takes float32 weights, and {weights.describe()} is not")
