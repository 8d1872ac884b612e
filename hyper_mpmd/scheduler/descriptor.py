"""A graph packed into whole numbers: what lowering reads, the native one and the Python twin alike.

Packed once a graph (and again when it changes); only the loads differ from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import PlanLimitError
from hyper_mpmd.scheduler.records import AIC, AIV, DTYPES, KERNELS, MAX_INDEX, ROLES, ROUTES
from hyper_mpmd.tasks.check import axis_extent, group_count, row_space_of
from hyper_mpmd.tasks.team import Team
from hyper_mpmd.tasks.tensor import ITEM_BYTES, Route, Routing, Tensor

if TYPE_CHECKING:
    from hyper_mpmd.tasks.graph import Node, TaskGraph

Table = NDArray[np.int64]

# Columns of the tables. An extent is a pair (kind, value): absent, a plain number, or the rows of a row space.
SPACE_COLUMNS = ("groups", "route", "parent", "shift", "team", "stride")
TENSOR_COLUMNS = ("dtype", "item_bytes", "space", "rows", "cols", "block_rows", "role", "storage")
OP_COLUMNS = (
    *("kernel", "kind", "dtype", "by_group", "groups", "space"),
    *("rows_kind", "rows_value", "cols_kind", "cols_value", "reduction_kind", "reduction_value"),
    *("cut_rows", "cut_cols", "flops_per_point", "route", "shift", "team", "stride", "pull", "hop", "limit_bits"),
    *("operand_begin", "read_boxes", "boxes"),
)
OPERAND_COLUMNS = ("tensor", "rows_axis", "cols_axis", "shift", "group", "write")
ABSENT, PLAIN, SPACE = 0, 1, 2
AXES = {"all": 0, "rows": 1, "cols": 2, "reduction": 3}


@dataclass(frozen=True)
class Descriptor:
    """The tables, one row an item, and how many ranks the graph is written for. space_names etc. keep the order.

    graph_json: the graph itself, for plan headers.
    """

    ranks: int
    spaces: Table
    tensors: Table
    ops: Table
    operands: Table
    space_names: tuple[str, ...]
    tensor_names: tuple[str, ...]
    op_names: tuple[str, ...]
    graph_json: str

    @cached_property
    def native(self) -> Any:
        """The same tables as the native code holds them."""
        from hyper_mpmd._native import planner

        names = (list(self.space_names), list(self.tensor_names), list(self.op_names))
        return planner.Descriptor(self.ranks, self.spaces, self.tensors, self.ops, self.operands, *names)


def describe(graph: TaskGraph) -> Descriptor:
    """The graph's descriptor, packed at most once between two changes of the graph."""
    if not isinstance(graph._sealed, Descriptor):
        graph._sealed = _pack(graph)
    return graph._sealed


def _pack(graph: TaskGraph) -> Descriptor:
    spaces, tensors, nodes = list(graph.spaces), graph.tensors, graph.nodes
    space_index = {name: index for index, name in enumerate(spaces)}
    tensor_index = {name: index for index, name in enumerate(tensors)}
    hops = _hop_levels(graph)
    storages = _storages(graph)

    op_rows: list[list[int]] = []
    operand_rows: list[list[int]] = []
    for node in nodes:
        row, boxes = _op_row(graph, node, space_index, tensor_index, hops[node.name], len(operand_rows))
        op_rows.append(row)
        operand_rows.extend(boxes)
    roles = _roles(graph, storages)
    tensor_rows = []
    for name, tensor in tensors.items():
        rows, cols, block = _matrix(tensor)
        if max(rows, cols) > MAX_INDEX:
            raise PlanLimitError(f"{tensor.describe()}: {max(rows, cols)} rows or columns; the limit is {MAX_INDEX}")
        space = -1 if tensor.space is None else space_index[tensor.space]
        tensor_rows.append(
            [
                *(DTYPES[tensor.dtype], ITEM_BYTES[tensor.dtype], space, rows, cols, block),
                *(ROLES[roles[name]], tensor_index[storages[name]]),
            ]
        )
    space_rows = [
        [space.groups, 0, -1, 0, 1, 1]
        if space.route is None
        else [
            *(space.groups, ROUTES[space.route.kind], space_index[space.route.parent]),
            *_within(graph, space.route, space.route.shift),
        ]
        for space in graph.spaces.values()
    ]
    for row_space in graph.spaces.values():
        if row_space.groups > MAX_INDEX:
            raise PlanLimitError(
                f"row space {row_space.name!r} has {row_space.groups} groups; the limit is {MAX_INDEX}"
            )
    return Descriptor(
        ranks=graph.ranks,
        spaces=_table(space_rows, SPACE_COLUMNS),
        tensors=_table(tensor_rows, TENSOR_COLUMNS),
        ops=_table(op_rows, OP_COLUMNS),
        operands=_table(operand_rows, OPERAND_COLUMNS),
        space_names=tuple(spaces),
        tensor_names=tuple(tensors),
        op_names=tuple(node.name for node in nodes),
        graph_json=graph.to_json(),
    )


def _table(rows: list[list[int]], columns: tuple[str, ...]) -> Table:
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(columns))


def limit_bits(limit: float) -> int:
    """The limit as a float32's bits: tables hold whole numbers only."""
    return int(np.float32(limit).view(np.uint32))


def _op_row(
    graph: TaskGraph,
    node: Node,
    space_index: dict[str, int],
    tensor_index: dict[str, int],
    hop: int,
    operand_begin: int,
) -> tuple[list[int], list[list[int]]]:
    op, rule = node.op, node.op.rule
    inputs = [graph.tensors[name] for name in node.inputs]
    outputs = [graph.tensors[name] for name in node.outputs]
    routing = op.routing()

    def extent(source: str | None) -> tuple[int, int]:
        if source is None:
            return ABSENT, 1
        _, size = axis_extent(source, inputs, outputs)
        return (SPACE, space_index[size]) if isinstance(size, str) else (PLAIN, size)

    boxes = [
        [tensor_index[t.name], AXES[a.rows], AXES[a.cols], a.shift, int(a.group), write]
        for write, tensors, operands in ((0, inputs, rule.inputs), (1, outputs, rule.outputs))
        for t, accesses in zip(tensors, operands, strict=True)
        for a in accesses
    ]
    space = row_space_of(op, inputs, outputs)
    row = [
        *(KERNELS[op.native or "python"], AIC if node.core == "cube" else AIV, DTYPES[outputs[0].dtype]),
        *(int(rule.by_group), group_count(graph, node.name, op, inputs, outputs)),
        -1 if space is None else space_index[space],
        *(*extent(rule.rows), *extent(rule.cols), *extent(rule.reduction)),
        *(int(rule.cut_rows), int(rule.cut_cols), rule.flops_per_point),
        *((0, 0, 1, 1, 0) if routing is None else _route(graph, Routing(*routing), inputs[0], outputs[0])),
        *(hop, limit_bits(op.limits()), operand_begin, sum(not box[-1] for box in boxes), len(boxes)),
    ]
    return row, boxes


def _route(graph: TaskGraph, routing: Routing, sent: Tensor, received: Tensor) -> tuple[int, ...]:
    """Kind, shift, team, stride, and whether it pulls, of a communication op."""
    space = sent.space if routing.kind == "return" else received.space  # the one that a route made
    assert space is not None
    route = graph.spaces[space].route
    assert route is not None
    return ROUTES[routing.kind], *_within(graph, route, routing.shift), int(routing.mode == "pull")


def _within(graph: TaskGraph, route: Route, shift: int) -> tuple[int, int, int]:
    """The shift within a team, and the team's ranks and stride."""
    team = route.team or Team(graph.ranks)
    return shift % team.ranks, *team


def _matrix(tensor: Tensor) -> tuple[int, int, int]:
    """Rows (0 where a row space decides), columns, and rows of one group's block (0 unless 3-D)."""
    shape = tensor.shape
    rows = 0 if isinstance(shape[0], str) else shape[0]
    cols = 1 if len(shape) == 1 else shape[-1]
    assert isinstance(cols, int)
    if len(shape) < 3:
        return rows, cols, 0
    assert isinstance(shape[1], int)
    return rows * shape[1], cols, shape[1]


def _hop_levels(graph: TaskGraph) -> dict[str, int]:
    """The most cross-rank edges on a path to each op: dispatch 0, matmul 1, combine 1, unpermute 2.

    An op that overwrites a tensor comes after those that read it, so it is at least at their level. On one rank nothing
    crosses ranks. A put crosses on the way to its readers, a pull on the way to itself, and back to whoever overwrites
    what it has read.
    """
    of_tensor: dict[str, int] = {}
    of_readers: dict[str, int] = {}
    levels: dict[str, int] = {}
    for node in graph.nodes:
        level = max((of_tensor.get(name, 0) for name in node.inputs), default=0)
        for source in node.op.inplace.values():
            level = max(level, of_readers.get(node.inputs[source], 0))
        routing = node.op.routing() if graph.ranks > 1 else None
        pulls = routing is not None and Routing(*routing).mode == "pull"
        levels[node.name] = level = level + pulls
        for name in node.inputs:
            of_readers[name] = max(of_readers.get(name, 0), level + pulls)
        of_tensor.update(dict.fromkeys(node.outputs, level + (routing is not None and not pulls)))
    return levels


def _storages(graph: TaskGraph) -> dict[str, str]:
    """Tensor -> the tensor whose memory it shares, through in-place ops."""
    storage = {name: name for name in graph.tensors}
    for node in graph.nodes:
        for output, source in node.op.inplace.items():
            storage[node.outputs[output]] = storage[node.inputs[source]]
    return storage


def _roles(graph: TaskGraph, storages: dict[str, str]) -> dict[str, str]:
    """Where each tensor lives. What other ranks write or read is symmetric; else outputs are the caller's own."""
    by_storage = dict.fromkeys(storages.values(), "workspace")
    for name in graph.outputs.values():
        by_storage[storages[name]] = "output"
    for node in graph.nodes:
        if (routing := node.op.routing()) is not None:
            reached = node.inputs if Routing(*routing).mode == "pull" else node.outputs
            by_storage.update({storages[name]: "symmetric" for name in reached})
    for name in graph.inputs:
        by_storage[name] = "input"
    return {name: by_storage[storage] for name, storage in storages.items()}
