"""Is an op legal? `assert_op_legal` tries anyone's op on tiles of several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_mpmd.errors import OpRuleError
from hyper_mpmd.scheduler.compile import compile as compile_graph
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.tasks.check import row_space_of
from hyper_mpmd.tasks.graph import TaskGraph
from hyper_mpmd.tasks.op import Layout, Op, Tile
from hyper_mpmd.tasks.rule import check_rule
from hyper_mpmd.tasks.tensor import Tensor
from hyper_mpmd.testing.sample_ops import Copy

DEFAULT_TILES: tuple[tuple[int, int] | None, ...] = (None, (1, 16), (5, 7), (32, 32))


def assert_op_legal(
    op: Op,
    shapes: Sequence[tuple[str | int, ...]],
    *,
    dtypes: Sequence[str] | None = None,
    loads: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[int, Any] | None = None,
    tiles: Sequence[tuple[int, int] | None] = DEFAULT_TILES,
    tolerance: float = 1e-5,
) -> None:
    """Raise OpRuleError (or the error of a wrong graph) unless the op may be cut into tiles, and its kernel too.

    shapes: of its inputs; a string is a row space, whose rows in each group `loads` gives.
    dtypes: of its inputs, float32 unless said. values: {input: torch tensor}, random normal numbers unless given.
    tiles: the tile sizes to try; None lets the cost model choose.

    Checked: the tile rule; that the tiles of each size write every point of every output exactly once and stay inside
    their tensors; and, for an op with a Python kernel, that the kernel on tiles makes what `reference` makes of whole
    tensors, to `tolerance` relative to the largest value.
    """
    check_rule(type(op).__name__, op.rule, op.inplace)
    graph, inputs = _graph_of(op, shapes, dtypes, loads or {})
    has_kernel = type(op).kernel is not Op.kernel
    for size in tiles:
        plan = compile_graph(graph, loads, policy="O1", tiles=None if size is None else {"op": size})
        _check_coverage(plan, size)
        if has_kernel:
            _check_kernel(plan, op, inputs, values or {}, size, tolerance)


def _graph_of(
    op: Op,
    shapes: Sequence[tuple[str | int, ...]],
    dtypes: Sequence[str] | None,
    loads: Mapping[str, Sequence[int]],
) -> tuple[TaskGraph, list[Tensor]]:
    """A graph of the op alone. In-place ops may not overwrite a graph's inputs, so those are copied first."""
    graph = TaskGraph("one-op")
    spaces = {name: graph.rows(name, groups=len(counts)) for name, counts in loads.items()}
    inputs = []
    for index, shape in enumerate(shapes):
        dims = [spaces[dim] if isinstance(dim, str) else dim for dim in shape]
        dtype: Any = "float32" if dtypes is None else dtypes[index]
        tensor = graph.input(f"in{index}", dims, dtype)
        if index in op.inplace.values():
            tensor = graph.vector(f"copy{index}", Copy(), tensor)
        inputs.append(tensor)
    made = {"cube": graph.cube, "vector": graph.vector, "comm": graph.comm}[op.core]("op", op, *inputs)
    for tensor in made if isinstance(made, tuple) else (made,):
        graph.output(tensor.name, tensor)
    return graph, inputs


def _check_coverage(plan: Plan, size: tuple[int, int] | None) -> None:
    """Every point of every output is written by exactly one tile, and no box leaves its tensor."""
    tensors, accesses = plan.sections["tensors"], plan.sections["accesses"]
    names = list(plan.graph.tensors)
    counts = {index: np.zeros((int(t["rows"]), int(t["cols"])), np.int64) for index, t in enumerate(tensors)}
    for number, task in enumerate(plan.tasks):
        boxes = accesses[task["access_begin"] :][: task["access_count"]]
        reads = int(plan.sections["ops"]["read_count"][task["op"]])
        for place, (tensor, _, row, rows, col, cols) in enumerate(boxes.tolist()):
            count = counts[tensor]
            if row + rows > count.shape[0] or col + cols > count.shape[1]:
                raise OpRuleError(
                    f"tiles {size}: {plan.task_name(number)} touches rows {row} to {row + rows}, columns {col} to "
                    f"{col + cols} of {names[tensor]}, which has {count.shape[0]} x {count.shape[1]}"
                )
            if place >= reads:
                count[row : row + rows, col : col + cols] += 1
    for node in plan.graph.nodes:
        for output in node.outputs:
            wrong = np.argwhere(counts[names.index(output)] != 1)
            if len(wrong):
                row, col = wrong[0].tolist()
                times = int(counts[names.index(output)][row, col])
                raise OpRuleError(f"tiles {size}: row {row}, column {col} of {output} is written {times} times")


def _check_kernel(
    plan: Plan, op: Op, inputs: list[Tensor], values: Mapping[int, Any], size: tuple[int, int] | None, tolerance: float
) -> None:
    import torch

    graph, tensors, accesses = plan.graph, plan.sections["tensors"], plan.sections["accesses"]
    names = list(graph.tensors)
    node = next(node for node in graph.nodes if node.name == "op")
    generator = torch.Generator().manual_seed(0)

    def shape_of(name: str) -> list[int]:
        rows = int(tensors["rows"][names.index(name)])
        return [rows if isinstance(dim, str) else dim for dim in graph.tensors[name].shape]

    memory: dict[str, Any] = {}
    for index, tensor in enumerate(inputs):
        dtype = getattr(torch, tensor.dtype)
        value = values.get(index)
        if value is None:
            value = torch.randn(shape_of(tensor.name), generator=generator).to(dtype)
        memory[tensor.name] = value.clone()
    space = row_space_of(op, inputs, [graph.tensors[name] for name in node.outputs])
    sizes = [0] if space is None else plan.header.loads[space][0]
    offsets = tuple(int(n) for n in (0, *np.cumsum(sizes)))
    wanted = op.reference(Layout(offsets), *(memory[tensor.name].clone() for tensor in inputs))
    for place, name in enumerate(node.outputs):
        source = op.inplace.get(place)
        dtype = getattr(torch, graph.tensors[name].dtype)
        memory[name] = torch.empty(shape_of(name), dtype=dtype) if source is None else memory[node.inputs[source]]
    for number, task in enumerate(plan.tasks):
        if graph.nodes[int(task["op"])].name == "op":
            boxes = accesses[task["access_begin"] :][: task["access_count"]]
            views = [_view(memory[names[box[0]]], box) for box in boxes.tolist()]
            op.kernel(Tile(plan.task_name(number), int(task["number"]), int(task["group"])), *views)
    for name, want in zip(node.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        have = memory[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            raise OpRuleError(
                f"tiles {size}: {name} is {have.dtype} {list(have.shape)} by shapes(), {want.dtype} {list(want.shape)} "
                "by reference()"
            )
        scale = float(want.abs().max()) if want.numel() else 0.0
        error = float((have.double() - want.double()).abs().max()) if want.numel() else 0.0
        if not error <= tolerance * max(scale, 1.0):
            raise OpRuleError(
                f"tiles {size}: the kernel's {name} is off by {error} from the reference (largest value {scale})"
            )


def _view(tensor: Any, box: tuple[int, ...]) -> Any:
    """The box of a tensor seen as a matrix."""
    _, _, row, rows, col, cols = box
    matrix = tensor.reshape(-1, 1) if tensor.dim() == 1 else tensor.reshape(-1, tensor.shape[-1])
    return matrix[row : row + rows, col : col + cols]
