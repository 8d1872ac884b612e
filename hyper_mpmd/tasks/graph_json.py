"""Graphs as JSON: written from the graph, read back through the same builder calls, so that the same checks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hyper_mpmd.errors import CycleError, GraphFormatError, OpParameterError, UnknownTensorError
from hyper_mpmd.tasks.op import CoreKind, lookup_op
from hyper_mpmd.tasks.tensor import RowSpace, Tensor

if TYPE_CHECKING:
    from hyper_mpmd.tasks.graph import TaskGraph

FORMAT: Literal["hyper_mpmd.graph/1"] = "hyper_mpmd.graph/1"


class NodeRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    core: CoreKind
    op: dict[str, Any]  # {"name": class name, parameters...}
    inputs: list[str]
    outputs: list[str]


class GraphRecord(BaseModel):
    """The JSON form of a graph."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["hyper_mpmd.graph/1"]
    name: str
    ranks: int
    spaces: list[RowSpace]
    inputs: list[Tensor]
    tasks: list[NodeRecord]
    outputs: dict[str, str]


def dump(graph: TaskGraph) -> dict[str, Any]:
    """The graph as plain JSON values."""
    record = GraphRecord(
        format=FORMAT,
        name=graph.name,
        ranks=graph.ranks,
        spaces=list(graph.spaces.values()),
        inputs=[graph.tensors[name] for name in graph.inputs],
        tasks=[
            NodeRecord(
                name=node.name,
                core=node.core,
                op={"name": type(node.op).__name__, **node.op.model_dump(mode="json")},
                inputs=list(node.inputs),
                outputs=list(node.outputs),
            )
            for node in graph.nodes
        ],
        outputs=graph.outputs,
    )
    return record.model_dump(mode="json")


def load(text: str | bytes) -> TaskGraph:
    """Read a graph from JSON text."""
    from hyper_mpmd.tasks.graph import TaskGraph

    try:
        record = GraphRecord.model_validate_json(text)
    except ValidationError as error:
        raise GraphFormatError(f"not a graph file: {_first(error)}") from None
    graph = TaskGraph(record.name, ranks=record.ranks)
    spaces: dict[str, RowSpace] = {}
    for space in record.spaces:
        spaces[space.name] = _space(graph, space, spaces)
    tensors: dict[str, Tensor] = {}
    for tensor in record.inputs:
        shape = [spaces.get(dim, dim) if isinstance(dim, str) else dim for dim in tensor.shape]
        tensors[tensor.name] = graph.input(tensor.name, shape, tensor.dtype)  # type: ignore[arg-type]
    for node in _in_order(record.tasks, set(tensors)):
        parameters = dict(node.op)
        op_class = lookup_op(str(parameters.pop("name", None)))
        try:
            op = op_class(**parameters)
        except OpParameterError as error:
            raise GraphFormatError(f"task {node.name!r}: {error}") from None
        made = graph._add(node.name, node.core, op, [tensors[name] for name in node.inputs])
        made = made if isinstance(made, tuple) else (made,)
        if [tensor.name for tensor in made] != node.outputs:
            raise GraphFormatError(
                f"task {node.name!r} makes {', '.join(t.name for t in made)}, the file says {', '.join(node.outputs)}"
            )
        tensors.update({tensor.name: tensor for tensor in made})
    for name, source in record.outputs.items():
        if source not in tensors:
            raise UnknownTensorError(f"output {name!r}: tensor {source!r} does not exist")
        graph.output(name, tensors[source])
    return graph


def _space(graph: TaskGraph, space: RowSpace, known: dict[str, RowSpace]) -> RowSpace:
    """Declare a row space as the file does; what a route makes must be what the file says it is."""
    if space.route is None:
        return graph.rows(space.name, groups=space.groups)
    if space.route.parent not in known:
        raise GraphFormatError(f"row space {space.name!r} follows from {space.route.parent!r}, which is not before it")
    made = graph.routed_rows(known[space.route.parent], space.route.kind, space.route.shift, space.route.team)
    if made != space:
        raise GraphFormatError(f"row space {space.name!r}: its route makes {made!r}, the file says {space!r}")
    return made


def _in_order(nodes: list[NodeRecord], known: set[str]) -> list[NodeRecord]:
    """The tasks in an order in which each tensor exists before it is used (the file's own order where that is one)."""
    makers = {output: node for node in nodes for output in node.outputs}
    for node in nodes:
        for name in node.inputs:
            if name not in known and name not in makers:
                raise UnknownTensorError(f"task {node.name!r} uses tensor {name!r}, which nothing makes")
    ordered: list[NodeRecord] = []
    waiting = list(nodes)
    made = set(known)
    while waiting:
        still = []
        for node in waiting:
            if made.issuperset(node.inputs):
                ordered.append(node)
                made.update(node.outputs)
            else:
                still.append(node)
        if len(still) == len(waiting):
            raise CycleError(f"tasks wait for one another: {_circle(still, makers, made)}")
        waiting = still
    return ordered


def _circle(nodes: list[NodeRecord], makers: dict[str, NodeRecord], made: set[str]) -> str:
    path: list[str] = []
    node = nodes[0]
    while node.name not in path:
        path.append(node.name)
        node = makers[next(name for name in node.inputs if name not in made)]
    return " waits for ".join([*path[path.index(node.name) :], node.name])


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
