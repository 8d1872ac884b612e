"""SwiGLU: the gated activation between the two matrix products of an expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from hyper_mpmd.errors import ShapeError
from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor

LEAST_LIMIT, MOST_LIMIT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the normal values of float32


class Clamped(Op):
    """What all ops of a SwiGLU share.

    limit: the gate half stands for min(gate, limit) and the up half for min(max(up, -limit), limit), as in the experts
    of gpt-oss; None: neither is clamped. NaN stays NaN. A normal float32 above 0, or OpParameterError.
    """

    limit: Annotated[float, Field(ge=LEAST_LIMIT, le=MOST_LIMIT)] | None = None

    def limits(self) -> float:
        return math.inf if self.limit is None else self.limit

    def halves(self, h: Any) -> tuple[Any, Any]:
        """The gate and up halves of h [R, 2I] in its dtype, clamped."""
        gate, up = h.chunk(2, dim=-1)
        return (gate, up) if self.limit is None else (gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit))


class SwiGLU(Clamped):
    """a = silu(h[:, :I]) * h[:, I:], with silu(v) = v / (1 + exp(-v)).

    Input: h [R, 2I], gate half first, float32, bfloat16 or float16. Output: [R, I] of that dtype, computed in float32,
    rounded once. limit: see `Clamped`.
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
        gate, up = self.halves(h.float())
        return (gate * gate.sigmoid() * up).to(h.dtype)
