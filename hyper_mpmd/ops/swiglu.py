"""SwiGLU: the gated activation between the two matrix products of an expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import ShapeError
from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class SwiGLU(Op):
    """a = silu(h[:, :I]) * h[:, I:], with silu(v) = v / (1 + exp(-v)).

    Input: h [R, 2I], gate half first, float32 or bfloat16. Output: [R, I] of that dtype, computed in float32, rounded
    once.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "swiglu"
    # About eleven operations a point: the exponential, the division, two products, an addition.
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="out0.1",
        inputs=((Access("rows", "cols"), Access("rows", "cols", shift=1)),),
        outputs=((Access("rows", "cols"),),),
        flops_per_point=11,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        (h,) = inputs
        check_one_float_dtype("SwiGLU", inputs)
        cols = h.shape[-1]
        if len(h.shape) != 2 or not isinstance(cols, int) or cols % 2:
            raise ShapeError(f"SwiGLU takes [rows, 2I], gate half first, and {h.describe()} is not that")
        return (TensorType((h.shape[0], cols // 2), h.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        (h,) = inputs
        gate, up = h.float().chunk(2, dim=-1)
        return (gate * gate.sigmoid() * up).to(h.dtype)
