"""GroupedMatmul: each group of rows (the tokens of one expert) times its own weight matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_mpmd.errors import DTypeError
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.tensor import FLOATS, Tensor


class GroupedMatmul(Op):
    """y[rows of g] = x[rows of g] @ w[g].

    Inputs: x [R, K] in a row space of G groups; w [G, K, N]; one dtype, float32, bfloat16 or float16. Output: [R, N] of
    that dtype. Products are summed in float32 and rounded once.
    """

    core: ClassVar[CoreKind] = "cube"
    native: ClassVar[str | None] = "gemm"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in1.2",
        reduction="in0.1",
        by_group=True,
        inputs=((Access("rows", "reduction"),), (Access("reduction", "cols", group=True),)),
        outputs=((Access("rows", "cols"),),),
        flops_per_point=2,
    )

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        x, w = inputs
        check_one_float_dtype("GroupedMatmul", inputs)
        return (TensorType((x.shape[0], w.shape[-1]), x.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        x, w = inputs
        y = x.new_empty((x.shape[0], w.shape[2]))
        for group, (begin, end) in enumerate(zip(layout.offsets, layout.offsets[1:], strict=False)):
            y[begin:end] = (x[begin:end].float() @ w[group].float()).to(x.dtype)
        return y


def check_one_float_dtype(op: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that are not all float32, all bfloat16 or all float16."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise DTypeError(f"{op} takes {', '.join(FLOATS)}, and {tensor.describe()} is none of them")
        if tensor.dtype != tensors[0].dtype:
            raise DTypeError(f"{op} takes one dtype, and {tensors[0].describe()} meets {tensor.describe()}")
