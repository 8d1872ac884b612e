"""Matmul: all rows times one weight matrix (a shared expert, a projection)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class Matmul(Op):
    """y = x @ w.

    Inputs: x [R, K], w [K, N]; one dtype, float32, bfloat16 or float16. Output: [R, N] of that dtype. Products are
    summed in float32 and rounded once.
    """

    core: ClassVar[CoreKind] = "cube"
    native: ClassVar[str | None] = "gemm"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in1.1",
        reduction="in0.1",
        inputs=((Access("rows", "reduction"),), (Access("reduction", "cols"),)),
        outputs=((Access("rows", "cols"),),),
        flops_per_point=2,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        x, w = inputs
        check_one_float_dtype("Matmul", inputs)
        return (TensorType((x.shape[0], w.shape[-1]), x.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        x, w = inputs
        return (x.float() @ w.float()).to(x.dtype)
