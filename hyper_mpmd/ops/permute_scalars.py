"""PermuteScalars: one scalar a row gathered into another order, as Permute does with whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import DTypeError, ShapeError
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class PermuteScalars(Op):
    """y[i] = x[index[i]].

    Inputs: x [R] of any dtype; index [N] int32, in [0, R). Output: [N], in the row space of index. An index out of
    range ends the launch with an error that names the task and the value.
    """

    core: ClassVar[CoreKind] = "vector"
    native: ClassVar[str | None] = "permute"
    rule: ClassVar[TileRule] = TileRule(
        rows="in1.0",
        cols=None,
        inputs=((Access("all", "all"),), (Access("rows", "all"),)),
        outputs=((Access("rows", "all"),),),
        cut_cols=False,
        flops_per_point=0,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        x, index = inputs
        if len(x.shape) != 1 or len(index.shape) != 1:
            raise ShapeError(f"PermuteScalars takes x [R] and index [N]; got {x.describe()} and {index.describe()}")
        if index.dtype != "int32":
            raise DTypeError(f"PermuteScalars takes an int32 index, and {index.describe()} is not")
        return (TensorType((index.shape[0],), x.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        x, index = inputs
        return x[index.long()]
