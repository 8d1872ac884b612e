"""Do the tensors of a task meet? Read off the op's tile rule, so that built-in and user ops are checked alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyper_mpmd.errors import OpRuleError, RowSpaceError, ShapeError
from hyper_mpmd.tasks.op import Op
from hyper_mpmd.tasks.rule import Access, AxisName, parse_extent
from hyper_mpmd.tasks.tensor import Tensor

if TYPE_CHECKING:
    from hyper_mpmd.tasks.graph import TaskGraph

Extent = str | int


def matrix_dims(tensor: Tensor) -> tuple[Extent, Extent]:
    """Rows and columns of the tensor seen as a matrix: [R] as [R, 1], [G, K, N] as G blocks of [K, N]."""
    if len(tensor.shape) == 1:
        return tensor.shape[0], 1
    return tensor.shape[-2], tensor.shape[-1]


def axis_extent(source: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Extent]:
    """The tensor and dimension that an axis takes its extent from; a row space's name where that is one."""
    is_output, operand, dimension = parse_extent(source)
    tensor = (outputs if is_output else inputs)[operand]
    return tensor, tensor.shape[dimension]


def row_space_of(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
    """The row space that the op's tiles are cut by (of its rows or, failing that, its reduction), or None."""
    for source in (op.rule.rows, op.rule.reduction):
        if source is not None:
            _, extent = axis_extent(source, inputs, outputs)
            if isinstance(extent, str):
                return extent
    return None


def group_count(graph: TaskGraph, task: str, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """How many groups the op runs over: its row space's, else the leading dimension of what it indexes by group."""
    if not op.rule.by_group:
        return 1
    space = row_space_of(op, inputs, outputs)
    if space is not None:
        return graph.spaces[space].groups
    for tensor, accesses in _operands(op, inputs, outputs):
        if any(access.group for access in accesses) and len(tensor.shape) == 3:
            assert isinstance(tensor.shape[0], int)
            return tensor.shape[0]
    raise ShapeError(f"task {task!r}: {type(op).__name__} works by group, but nothing here has groups")


def check_dimensions(graph: TaskGraph, task: str, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Refuse tensors whose dimensions do not meet under the op's rule, naming both tensors and both numbers."""
    if op.routing() is not None:
        return  # rows travel whole, and the received tensors are derived from the sent ones
    rule = op.rule
    for axis, source in rule.extents().items():
        is_output, operand, dimension = parse_extent(source)
        tensor = (outputs if is_output else inputs)[operand]
        if dimension >= len(tensor.shape):
            raise ShapeError(
                f"task {task!r}: {tensor.describe()} has no dimension {dimension}, where {type(op).__name__} takes the "
                f"extent of its {axis} from"
            )
    extents = {axis: axis_extent(source, inputs, outputs) for axis, source in rule.extents().items()}
    if "cols" in extents and isinstance(extents["cols"][1], str):
        raise RowSpaceError(
            f"task {task!r}: {type(op).__name__} cuts columns along row space {extents['cols'][1]!r}; only the rows or "
            "the reduction of an op may run over a row space"
        )
    groups = group_count(graph, task, op, inputs, outputs)
    _check_written(task, op, extents, outputs)
    for tensor, accesses in _operands(op, inputs, outputs):
        grouped = any(access.group for access in accesses)
        if grouped != (len(tensor.shape) == 3):
            wanted = "[groups, rows, cols]" if grouped else "1-D or 2-D"
            raise ShapeError(
                f"task {task!r}: {tensor.describe()} has {len(tensor.shape)} dimensions; it must be {wanted}"
            )
        if grouped and tensor.shape[0] != groups:
            raise ShapeError(
                f"task {task!r}: {tensor.describe()} holds {tensor.shape[0]} groups, the rows come in {groups}"
            )
        rows, cols = matrix_dims(tensor)
        for access in accesses:
            _meet(task, tensor, "rows", rows, access.rows, extents, times=1)
        widest = max(accesses, key=lambda access: access.shift)
        _meet(task, tensor, "columns", cols, widest.cols, extents, times=widest.shift + 1)
    spaces = {
        tensor.space: tensor
        for tensor in (*inputs, *outputs)
        if tensor.space is not None and _cut(op, tensor, inputs, outputs)
    }
    if len(spaces) > 1:
        (first, a), (second, b) = list(spaces.items())[:2]
        raise RowSpaceError(
            f"task {task!r}: rows of {first!r} ({a.describe()}) are mixed with rows of {second!r} ({b.describe()})"
        )


def _check_written(
    task: str, op: Op, extents: dict[AxisName, tuple[Tensor, Extent]], outputs: Sequence[Tensor]
) -> None:
    """Refuse outputs that the tiles of some loads would not write exactly once."""
    rows_vary = "rows" in extents and isinstance(extents["rows"][1], str)
    for tensor, accesses in zip(outputs, op.rule.outputs, strict=True):
        if rows_vary and any(access.rows != "rows" for access in accesses):
            raise OpRuleError(
                f"task {task!r}: the rows of {type(op).__name__} run over row space {extents['rows'][1]!r}, but "
                f"{tensor.describe()} is not indexed by them: no rows, no task, and it would stay unwritten; make what "
                "is summed over the reduction axis"
            )
        if op.rule.by_group and not rows_vary and not all(access.group for access in accesses):
            raise OpRuleError(
                f"task {task!r}: {type(op).__name__} works by group, but every group would write the same rows of "
                f"{tensor.describe()}; index it by group"
            )


def _operands(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[tuple[Tensor, tuple[Access, ...]]]:
    return [*zip(inputs, op.rule.inputs, strict=True), *zip(outputs, op.rule.outputs, strict=True)]


def _cut(op: Op, tensor: Tensor, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether some axis of the op, not "all", indexes this tensor's rows."""
    return any(
        access.rows != "all"
        for operand, accesses in _operands(op, inputs, outputs)
        if operand is tensor
        for access in accesses
    )


def _meet(
    task: str,
    tensor: Tensor,
    what: str,
    have: Extent,
    axis: AxisName,
    extents: dict[AxisName, tuple[Tensor, Extent]],
    times: int,
) -> None:
    if axis == "all":
        return
    source, extent = extents[axis]
    if isinstance(have, str) and isinstance(extent, str):
        if have != extent:
            raise RowSpaceError(
                f"task {task!r}: rows of {have!r} ({tensor.describe()}) are mixed with rows of {extent!r} "
                f"({source.describe()})"
            )
        return
    if isinstance(have, str) or isinstance(extent, str):
        raise RowSpaceError(
            f"task {task!r}: {tensor.describe()} and {source.describe()} do not meet: one has rows of a row space "
            f"where the other has {have if isinstance(extent, str) else extent} of its own"
        )
    if have != extent * times:
        product = f"{times} x {extent}" if times > 1 else f"{extent}"
        raise ShapeError(
            f"task {task!r}: {tensor.describe()} has {have} {what}, but {source.describe()} asks for {product}"
        )
