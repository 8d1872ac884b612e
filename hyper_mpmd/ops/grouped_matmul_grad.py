"""The two gradients of GroupedMatmul: of its rows (weights transposed) and of its weights (rows transposed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import ShapeError
from hyper_mpmd.ops.grouped_matmul import check_one_float_dtype
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import Tensor


class GroupedMatmulT(Op):
    """dx[rows of g] = dy[rows of g] @ w[g].T, the gradient of GroupedMatmul's x.

    Inputs: dy [R, N] in a row space of G groups; w [G, K, N], read in place; one dtype, float32, bfloat16 or float16.
    Output: [R, K] of that dtype. Products are summed in float32 and rounded once.
    """

    core: ClassVar[CoreKind] = "cube"
    native: ClassVar[str | None] = "gemm_wt"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in1.1",
        reduction="in0.1",
        by_group=True,
        inputs=((Access("rows", "reduction"),), (Access("cols", "reduction", group=True),)),
        outputs=((Access("rows", "cols"),),),
        flops_per_point=2,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        dy, w = inputs
        check_one_float_dtype("GroupedMatmulT", inputs)
        if len(w.shape) != 3:
            raise ShapeError(f"GroupedMatmulT takes w [G, K, N], and {w.describe()} is not that")
        return (TensorType((dy.shape[0], w.shape[1]), dy.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        dy, w = inputs
        dx = dy.new_empty((dy.shape[0], w.shape[1]))
        for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:], strict=False)):
            dx[begin:end] = (dy[begin:end].float() @ w[group].float().T).to(dy.dtype)
        return dx


class GroupedMatmulDW(Op):
    """dw[g] = x[rows of g].T @ dy[rows of g], the gradient of GroupedMatmul's w; zero for a group without rows.

    Inputs: x [R, K] and dy [R, N] in one row space of G groups; one dtype, float32, bfloat16 or float16. Output: [G, K,
    N] of that dtype. The sum over a group's rows runs in one fixed order, in float32, and is rounded once.
    """

    core: ClassVar[CoreKind] = "cube"
    native: ClassVar[str | None] = "gemm_xt"
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
        x, dy = inputs
        check_one_float_dtype("GroupedMatmulDW", inputs)
        if len(x.shape) != 2 or len(dy.shape) != 2:
            raise ShapeError(f"GroupedMatmulDW takes x [R, K], dy [R, N]; got {x.describe()} and {dy.describe()}")
        return (TensorType((self.groups, x.shape[1], dy.shape[1]), x.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        x, dy = inputs
        dw = x.new_empty((self.groups, x.shape[1], dy.shape[1]))
        for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:], strict=False)):
            dw[group] = (x[begin:end].float().T @ dy[begin:end].float()).to(x.dtype)
        return dw
