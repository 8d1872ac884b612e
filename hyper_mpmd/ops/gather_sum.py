"""GatherSum: each token's K rows gathered and summed, the gradient of Permute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import DTypeError, ShapeError
from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class GatherSum(Op):
    """out[t] = sum over k of y[index[t, k]], in order of k, in float32, rounded once.

    Inputs: y [R, H] float32, bfloat16 or float16; index [T, K] int32, in [0, R). Output: [T, H] of y's dtype. An index
    out of range ends the launch with an error that names the task and the value.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "gather_sum"
    rule: ClassVar[TileRule] = TileRule(
        rows="in1.0",
        cols="in0.1",
        inputs=((Access("all", "cols"),), (Access("rows", "all"),)),
        outputs=((Access("rows", "cols"),),),
        cut_cols=False,
        flops_per_point=1,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        y, index = inputs
        check_one_float_dtype("GatherSum", [y])
        if len(y.shape) != 2 or len(index.shape) != 2:
            raise ShapeError(f"GatherSum takes y [R, H] and index [T, K]; got {y.describe()} and {index.describe()}")
        if index.dtype != "int32":
            raise DTypeError(f"GatherSum takes an int32 index, and {index.describe()} is not")
        return (TensorType((index.shape[0], y.shape[1]), y.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return gather_sum(*inputs)


def gather_sum(y: Any, index: Any) -> Any:
    """The sum, in plain torch: y [R, ...], index [N, K]; [N, ...] of y's dtype."""
    total = y.new_zeros((len(index), *y.shape[1:])).float()
    for k in range(index.shape[1]):
        total += y[index[:, k].long()].float()
    return total.to(y.dtype)
