"""Small ops with Python kernels, for corners of the tile rules: in place, transposed, several outputs or boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType, Tile
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class _RowByRow(Op):
    """[R, C] to [R, C], a point at a time."""

    core: ClassVar[CoreKind] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0", cols="in0.1", inputs=((Access("rows", "cols"),),), outputs=((Access("rows", "cols"),),)
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        return (TensorType(inputs[0].shape, inputs[0].dtype),)


class Copy(_RowByRow):
    """y = x, by a Python kernel. Input: [R, C] of any dtype."""

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return inputs[0].clone()

    def kernel(self, tile: Tile, *views: Any) -> None:
        views[1].copy_(views[0])


class ScaleInPlace(_RowByRow):
    """x *= factor, in the memory of x. Input: [R, C] of any dtype."""

    inplace: ClassVar[dict[int, int]] = {0: 0}
    factor: int = 2

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return inputs[0] * self.factor

    def kernel(self, tile: Tile, *views: Any) -> None:
        views[1].copy_(views[0] * self.factor)


class Transpose(Op):
    """y = x transposed. Input: [R, C], not in a row space, of any dtype."""

    core: ClassVar[CoreKind] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),),),
        outputs=((Access("cols", "rows"),),),
        flops_per_point=0,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        rows, cols = inputs[0].shape
        return (TensorType((cols, rows), inputs[0].dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return inputs[0].t().contiguous()

    def kernel(self, tile: Tile, *views: Any) -> None:
        views[1].copy_(views[0].t())


class Halves(Op):
    """The left and the right half of the columns, as two outputs. Input: [R, 2C] of any dtype."""

    core: ClassVar[CoreKind] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="out0.1",
        inputs=((Access("rows", "cols"), Access("rows", "cols", shift=1)),),
        outputs=((Access("rows", "cols"),), (Access("rows", "cols"),)),
        flops_per_point=0,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        rows, cols = inputs[0].shape
        assert isinstance(cols, int)
        return (TensorType((rows, cols // 2), inputs[0].dtype),) * 2

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        left, right = inputs[0].chunk(2, dim=1)
        return left.contiguous(), right.contiguous()

    def kernel(self, tile: Tile, *views: Any) -> None:
        views[2].copy_(views[0])
        views[3].copy_(views[1])


class Interleave(Op):
    """x beside itself: [R, C] to [R, 2C], written as two boxes a tile. Input of any dtype."""

    core: ClassVar[CoreKind] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),),),
        outputs=((Access("rows", "cols"), Access("rows", "cols", shift=1)),),
        flops_per_point=0,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        rows, cols = inputs[0].shape
        assert isinstance(cols, int)
        return (TensorType((rows, 2 * cols), inputs[0].dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return inputs[0].repeat(1, 2)

    def kernel(self, tile: Tile, *views: Any) -> None:
        views[1].copy_(views[0])
        views[2].copy_(views[0])


class GroupedOuter(Op):
    """dw[g] = x[rows of g]^T @ y[rows of g]: a gradient of GroupedMatmul's weights, zeros for a group without rows.

    Inputs: x [R, K] and y [R, N] float32 in a row space of G groups. Output: [G, K, N].
    """

    core: ClassVar[CoreKind] = "cube"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.1",
        cols="in1.1",
        reduction="in0.0",
        by_group=True,
        inputs=((Access("reduction", "rows"),), (Access("reduction", "cols"),)),
        outputs=((Access("rows", "cols", group=True),),),
        flops_per_point=2,
    )
    groups: int

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        return (TensorType((self.groups, inputs[0].shape[1], inputs[1].shape[1]), inputs[0].dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        x, y = inputs
        made = x.new_zeros((self.groups, x.shape[1], y.shape[1]))
        for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:], strict=False)):
            made[group] = x[begin:end].t() @ y[begin:end]
        return made

    def kernel(self, tile: Tile, *views: Any) -> None:
        views[2].copy_(views[0].t() @ views[1])
