"""GatherSumScalars: scalars gathered and summed row by row, as GatherSum does with whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import DTypeError, ShapeError
from hyper_mpmd.ops.gather_sum import gather_sum
from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class GatherSumScalars(Op):
    """out[i] = sum over k of y[index[i, k]], in order of k, in float32, rounded once.

    Inputs: y [R] float32, bfloat16 or float16; index [N, K] int32, in [0, R). Output: [N] of y's dtype. An index out of
    range ends the launch with an error that names the task and the value.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "gather_sum"
    rule: ClassVar[TileRule] = TileRule(
        rows="in1.0",
        cols=None,
        inputs=((Access("all", "all"),), (Access("rows", "all"),)),
        outputs=((Access("rows", "all"),),),
        cut_cols=False,
        flops_per_point=1,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        y, index = inputs
        check_one_float_dtype("GatherSumScalars", [y])
        if len(y.shape) != 1 or len(index.shape) != 2:
            raise ShapeError(
                f"GatherSumScalars takes y [R] and index [N, K]; got {y.describe()} and {index.describe()}"
            )
        if index.dtype != "int32":
            raise DTypeError(f"GatherSumScalars takes an int32 index, and {index.describe()} is not")
        return (TensorType((index.shape[0],), y.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return gather_sum(*inputs)
