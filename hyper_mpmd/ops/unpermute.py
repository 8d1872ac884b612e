"""Unpermute: gather each token's K expert rows back, weight them and sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import DTypeError, ShapeError
from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class Unpermute(Op):
    """out[t] = sum over k of weights[t, k] * y[index[t, k]], in order of k, in float32, rounded once.

    Inputs: y [R, H] float32, bfloat16 or float16; index [T, K] int32, the rows of token t in y, in [0, R); weights [T,
    K] float32. Output: [T, H] of y's dtype. An index out of range ends the launch with an error that names the task and
    the value.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "unpermute"
    rule: ClassVar[TileRule] = TileRule(
        rows="in1.0",
        cols="in0.1",
        inputs=((Access("all", "cols"),), (Access("rows", "all"),), (Access("rows", "all"),)),
        outputs=((Access("rows", "cols"),),),
        cut_cols=False,
        flops_per_point=2,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        y, index, weights = inputs
        check_one_float_dtype("Unpermute", [y])
        if len(y.shape) != 2 or len(index.shape) != 2 or index.shape != weights.shape:
            raise ShapeError(
                "Unpermute takes y [R, H], index [T, K] and weights [T, K]; got "
                f"{y.describe()}, {index.describe()} and {weights.describe()}"
            )
        if index.dtype != "int32" or weights.dtype != "float32":
            raise DTypeError(
                f"Unpermute takes an int32 index and float32 weights; got {index.describe()} and {weights.describe()}"
            )
        return (TensorType((index.shape[0], y.shape[1]), y.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        y, index, weights = inputs
        total = y.new_zeros((index.shape[0], y.shape[1])).float()
        for k in range(index.shape[1]):
            total += weights[:, k, None] * y[index[:, k].long()].float()
        return total.to(y.dtype)
