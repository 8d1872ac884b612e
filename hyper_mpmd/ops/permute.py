"""Permute: gather rows into expert order, the one-rank form of dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import DTypeError, ShapeError
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class Permute(Op):
    """y[i] = x[index[i]].

    Inputs: x [T, H] of any dtype; index [R] int32, the source row of each row of the output, in [0, T). Output: [R, H],
    in the row space of index. An index out of range ends the launch with an error that names the task and the value.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "permute"
    rule: ClassVar[TileRule] = TileRule(
        rows="in1.0",
        cols="in0.1",
        inputs=((Access("all", "cols"),), (Access("rows", "all"),)),
        outputs=((Access("rows", "cols"),),),
        cut_cols=False,
        flops_per_point=0,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        x, index = inputs
        if len(x.shape) != 2 or len(index.shape) != 1:
            raise ShapeError(f"Permute takes x [T, H] and index [R]; got {x.describe()} and {index.describe()}")
        if index.dtype != "int32":
            raise DTypeError(f"Permute takes an int32 index, and {index.describe()} is not")
        return (TensorType((index.shape[0], x.shape[1]), x.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        x, index = inputs
        return x[index.long()]
