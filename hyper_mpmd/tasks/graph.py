"""TaskGraph: the work as typed tasks on named tensors. No sizes of a particular step are in it: those come as loads.

Whatever is wrong is refused on the line that writes it, with the names and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializeAsAny

from hyper_mpmd.errors import (
    CoreKindError,
    DTypeError,
    LoadsError,
    NameTakenError,
    OpRuleError,
    OverwrittenTensorError,
    PullSourceError,
    RowSpaceError,
    ShapeError,
    UnknownTensorError,
    WorldSizeError,
)
from hyper_mpmd.tasks.check import check_dimensions
from hyper_mpmd.tasks.op import CoreKind, Op, TensorType
from hyper_mpmd.tasks.rule import Access
from hyper_mpmd.tasks.team import Team, check_team
from hyper_mpmd.tasks.tensor import ITEM_BYTES, DType, Route, RouteKind, Routing, RowSpace, Tensor

# Names that `Plan.run` and its kin take beside the inputs, which come by keyword as well.
RUN_OPTIONS = ("self", "plan", "engine", "workers", "timeout")


class Node(BaseModel):
    """One task of the graph: an op on named tensors. `name` is the name people see in reports, traces and errors."""

    model_config = ConfigDict(frozen=True)

    name: str
    core: CoreKind
    op: SerializeAsAny[Op]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class TaskGraph:
    """A graph of typed tasks.

    name: for reports and files. ranks: how many ranks the graph is written for; communication tasks need more than one
    to be of use, and run on one as plain copies.
    """

    def __init__(self, name: str, *, ranks: int = 1) -> None:
        _check_name("graph", name)
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise WorldSizeError(f"graph {name!r}: ranks is {ranks!r}; it must be an int of at least 1")
        self.name = name
        self.ranks = ranks
        self._spaces: dict[str, RowSpace] = {}
        self._tensors: dict[str, Tensor] = {}
        self._nodes: dict[str, Node] = {}
        self._inputs: list[str] = []
        self._outputs: dict[str, str] = {}
        self._overwritten: dict[str, str] = {}  # tensor -> the node that overwrote it
        self._sealed: Any = None  # what lowering packed of this graph; dropped at every change

    # ---- building ------------------------------------------------------------------------------------------------

    def rows(self, name: str, *, groups: int = 1) -> RowSpace:
        """Declare a row space: rows in `groups` groups (experts, say); how many in each comes at compile, as loads."""
        _check_name("row space", name)
        if name in self._spaces:
            raise NameTakenError(f"graph {self.name!r} already has a row space {name!r}")
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise LoadsError(f"row space {name!r}: groups is {groups!r}; it must be an int of at least 1")
        return self._add_space(RowSpace(name=name, groups=groups))

    def routed_rows(self, rows: RowSpace, kind: RouteKind, shift: int = 0, team: Team | None = None) -> RowSpace:
        """The row space that rows of `rows` reach by a route (see `Route`), so that an input can live in it: what an
        earlier graph received. The same one as communication along that route makes."""
        if self._spaces.get(rows.name) is not rows:
            raise RowSpaceError(f"row space {rows.name!r} belongs to another graph")
        return self._routed_space(f"routed_rows({rows.name!r}, {kind!r})", Routing(kind, shift, team), rows)

    def input(self, name: str, shape: Sequence[RowSpace | int], dtype: DType = "float32") -> Tensor:
        """Declare a tensor that `run` is given: 1 to 3 dimensions, the first may be a row space."""
        self._check_free(name)
        if name in RUN_OPTIONS:
            raise NameTakenError(f"input {name!r}: run(..., {name}=...) has another meaning; rename the input")
        tensor = Tensor(name=name, shape=self._check_shape(name, shape), dtype=_check_dtype(name, dtype))
        self._inputs.append(name)
        return self._add_tensor(tensor)

    def cube(self, name: str, op: Op, *inputs: Tensor) -> Any:
        """Add work for the cube cores (AIC): matrix products. Returns the output tensor or tensors."""
        return self._add(name, "cube", op, inputs)

    def vector(self, name: str, op: Op, *inputs: Tensor) -> Any:
        """Add work for the vector cores (AIV): element-wise work and copies. Returns the output tensor or tensors."""
        return self._add(name, "vector", op, inputs)

    def comm(self, name: str, op: Op, *inputs: Tensor) -> Any:
        """Add one-sided communication: rows put into other ranks' tensors. Returns the received tensor or tensors."""
        return self._add(name, "comm", op, inputs)

    def output(self, name: str, tensor: Tensor) -> None:
        """Make a computed tensor part of what `run` returns, under `name`."""
        _check_name("output", name)
        if name in self._outputs:
            raise NameTakenError(f"graph {self.name!r} already has an output {name!r}")
        self._check_tensor(f"output {name!r}", tensor)
        if tensor.name in self._inputs:
            raise UnknownTensorError(f"output {name!r}: {tensor.name!r} is an input; an output is made by a task")
        self._outputs[name] = tensor.name
        self._sealed = None

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def spaces(self) -> dict[str, RowSpace]:
        return dict(self._spaces)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name: the inputs, then what the tasks make; the order in which they are numbered in plans and files."""
        made = (name for node in self._nodes.values() for name in node.outputs)
        return {name: self._tensors[name] for name in (*self._inputs, *made)}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self._inputs)

    @property
    def outputs(self) -> dict[str, str]:
        """Output name -> tensor name."""
        return dict(self._outputs)

    @property
    def free_spaces(self) -> tuple[RowSpace, ...]:
        """The row spaces whose loads must be given."""
        return tuple(space for space in self._spaces.values() if space.route is None)

    def __repr__(self) -> str:
        return f"TaskGraph({self.name!r}, ranks={self.ranks}, tasks={len(self._nodes)}, tensors={len(self._tensors)})"

    def to_json(self) -> str:
        """The graph as JSON; `TaskGraph.from_json` reads it back to an equal graph."""
        from hyper_mpmd.tasks.graph_json import dump

        return json.dumps(dump(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TaskGraph:
        """Read a graph, with the same checks as when it was written by hand."""
        from hyper_mpmd.tasks.graph_json import load

        return load(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskGraph) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # graphs are mutable

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: all but what lowering packed, which is made again when it is needed."""
        return {**self.__dict__, "_sealed": None}

    # ---- inside --------------------------------------------------------------------------------------------------

    def _add(self, name: str, core: CoreKind, op: Op, inputs: Sequence[Tensor]) -> Any:
        self._check_free(name)
        if not isinstance(op, Op):
            hint = f"; write {op.__name__}()" if isinstance(op, type) and issubclass(op, Op) else ""
            raise CoreKindError(f"task {name!r}: {op!r} is not an op{hint}")
        if op.core != core:
            raise CoreKindError(
                f"task {name!r}: {type(op).__name__} is a {op.core} op, added as {core}; use g.{op.core}(...)"
            )
        if len(inputs) != len(op.rule.inputs):
            raise ShapeError(
                f"task {name!r}: {type(op).__name__} takes {len(op.rule.inputs)} inputs, got {len(inputs)}"
            )
        inputs = [self._check_tensor(f"task {name!r}, input {index}", tensor) for index, tensor in enumerate(inputs)]
        routing = op.routing()
        _check_routing(name, op, routing is not None)
        types = op.shapes(inputs) if routing is None else self._routed_types(name, op, inputs)
        if routing is not None and Routing(*routing).mode == "pull":
            self._check_pulled(name, inputs[0])
        if len(types) != len(op.rule.outputs):
            raise OpRuleError(
                f"task {name!r}: {type(op).__name__} makes {len(types)} shapes for {len(op.rule.outputs)} outputs"
            )
        names = [name] if len(types) == 1 else [f"{name}.{index}" for index in range(len(types))]
        for output in names if len(names) > 1 else ():
            self._check_free(output)
        outputs = [
            Tensor(name=output, shape=self._check_shape(output, type_.shape), dtype=_check_dtype(output, type_.dtype))
            for output, type_ in zip(names, types, strict=True)
        ]
        check_dimensions(self, name, op, inputs, outputs)
        self._check_overwrites(name, op, inputs, outputs)
        self._overwritten.update({inputs[source].name: name for source in op.inplace.values()})
        for tensor in outputs:
            self._add_tensor(tensor)
        self._nodes[name] = Node(
            name=name, core=core, op=op, inputs=tuple(t.name for t in inputs), outputs=tuple(t.name for t in outputs)
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _routed_types(self, name: str, op: Op, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        """The received tensors of a communication op, their row spaces derived from the senders'."""
        routing = op.routing()
        assert routing is not None
        types = []
        for tensor in inputs:
            if tensor.space is None:
                raise RowSpaceError(f"task {name!r}: {tensor.describe()} has no row space; rows are what travels")
            parent = self._spaces[tensor.space]
            types.append(
                TensorType((self._routed_space(name, Routing(*routing), parent).name, *tensor.shape[1:]), tensor.dtype)
            )
        return tuple(types)

    def _routed_space(self, task: str, routing: Routing, parent: RowSpace) -> RowSpace:
        kind = routing.kind
        team = check_team(f"task {task!r}", routing.team, self.ranks)
        if kind == "return":
            if parent.route is None or parent.route.kind != "scatter":
                raise RowSpaceError(
                    f"task {task!r}: rows of {parent.name!r} were not scattered, so there is no way back for them"
                )
            if routing.team is not None and team != parent.route.team:
                raise WorldSizeError(
                    f"task {task!r}: rows of {parent.name!r} return in {_describe(parent.route.team)}, where they were "
                    f"scattered, not in {_describe(team)}; leave the team out"
                )
            return self._spaces[parent.route.parent]
        ranks = self.ranks if team is None else team.ranks
        if kind == "scatter" and parent.groups % ranks:
            raise WorldSizeError(
                f"task {task!r}: the {parent.groups} groups of {parent.name!r} cannot be shared out evenly over "
                f"{ranks} ranks"
            )
        groups = {"scatter": parent.groups // ranks, "all": parent.groups * ranks, "shift": parent.groups}[kind]
        shift = routing.shift if kind == "shift" else 0
        name = f"{parent.name}.{kind}" + (str(shift) if kind == "shift" else "")
        name += "" if team is None else f".{team.ranks}by{team.stride}"
        route = Route.model_validate({"kind": kind, "parent": parent.name, "shift": shift, "team": team})
        known = self._spaces.get(name)
        if known is None:
            return self._add_space(RowSpace(name=name, groups=groups, route=route))
        if known.route != route:
            raise NameTakenError(f"task {task!r}: the row space {name!r} that it makes was declared by hand; rename it")
        return known

    def _check_pulled(self, name: str, tensor: Tensor) -> None:
        """Peers read symmetric memory, and are told by the tasks that write there."""
        if tensor.name in self._inputs:
            raise PullSourceError(
                f"task {name!r}: {tensor.name!r} is an input, which lies in the caller's memory, where no peer can "
                'pull from; let a task of its rank copy it, or take mode="push"'
            )
        maker = next(node for node in self._nodes.values() if tensor.name in node.outputs)
        if maker.op.routing() is not None:
            raise PullSourceError(
                f"task {name!r}: {tensor.name!r} comes from other ranks, through task {maker.name!r}, and is pulled "
                'only from those that made it; let a task of its rank work on it first, or take mode="push"'
            )

    def _check_overwrites(self, name: str, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for output, source in op.inplace.items():
            old, new = inputs[source], outputs[output]
            if old.name in self._inputs:
                raise OverwrittenTensorError(
                    f"task {name!r} works in place and would overwrite the graph input {old.name!r}; copy it first"
                )
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ShapeError(
                    f"task {name!r} works in place, but {old.describe()} and {new.describe()} differ in shape or dtype"
                )
            if old.name in self._outputs.values():
                raise OverwrittenTensorError(f"task {name!r} would overwrite {old.name!r}, which is an output")
            if [tensor.name for tensor in inputs].count(old.name) > 1:
                raise OverwrittenTensorError(
                    f"task {name!r} would overwrite {old.name!r}, which it also reads as another input"
                )

    def _check_tensor(self, where: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise UnknownTensorError(f"{where}: {tensor!r} is not a tensor of graph {self.name!r}")
        known = self._tensors.get(tensor.name)
        if known is None:
            raise UnknownTensorError(f"{where}: tensor {tensor.name!r} does not exist in graph {self.name!r} (yet)")
        if known is not tensor:
            raise UnknownTensorError(f"{where}: this {tensor.describe()} belongs to another graph")
        if (writer := self._overwritten.get(tensor.name)) is not None:
            raise OverwrittenTensorError(f"{where}: {tensor.name!r} was overwritten in place by task {writer!r}")
        return tensor

    def _check_shape(self, name: str, shape: Sequence[RowSpace | str | int]) -> tuple[str | int, ...]:
        if not isinstance(shape, (tuple, list)) or not 1 <= len(shape) <= 3:
            raise ShapeError(f"tensor {name!r}: shape is {shape!r}; it must be a tuple of 1 to 3 dimensions")
        dims: list[str | int] = []
        for index, dim in enumerate(shape):
            if isinstance(dim, RowSpace):
                if self._spaces.get(dim.name) is not dim:
                    raise RowSpaceError(f"tensor {name!r}: row space {dim.name!r} belongs to another graph")
                dim = dim.name
            elif isinstance(dim, str):
                if dim not in self._spaces:
                    raise RowSpaceError(f"tensor {name!r}: there is no row space {dim!r} in graph {self.name!r}")
            elif isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
                raise ShapeError(f"tensor {name!r}: dimension {index} is {dim!r}; it must be an int of at least 1")
            if isinstance(dim, str) and (index or len(shape) == 3):
                raise ShapeError(
                    f"tensor {name!r}: row space {dim!r} stands at dimension {index} of {len(shape)}; "
                    "only the first dimension of a 1-D or 2-D tensor can be one"
                )
            dims.append(dim)
        return tuple(dims)

    def _check_free(self, name: str) -> None:
        _check_name("tensor or task", name)
        if name in self._tensors or name in self._nodes:
            raise NameTakenError(f"graph {self.name!r} already has a tensor or task {name!r}")

    def _add_space(self, space: RowSpace) -> RowSpace:
        self._spaces[space.name] = space
        self._sealed = None
        return space

    def _add_tensor(self, tensor: Tensor) -> Tensor:
        self._tensors[tensor.name] = tensor
        self._sealed = None
        return tensor


def _describe(team: Team | None) -> str:
    return "all ranks" if team is None else f"teams of {team.ranks} ranks, {team.stride} apart"


def _check_routing(task: str, op: Op, routed: bool) -> None:
    """Communication ops move the whole rows of one tensor; no other op says where rows go."""
    if routed != (op.core == "comm"):
        raise OpRuleError(
            f"task {task!r}: {type(op).__name__} is a {op.core} op, but its routing() "
            f"{'says where rows go' if routed else 'does not say where rows go'}; comm ops do, and no others"
        )
    whole_rows = (Access("rows", "all"),)
    if routed and (op.rule.inputs, op.rule.outputs, op.inplace) != ((whole_rows,), (whole_rows,), {}):
        raise OpRuleError(
            f"task {task!r}: {type(op).__name__} must read and write one tensor each, by {whole_rows[0]}, not in place"
        )


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name or any(c.isspace() for c in name):
        raise NameTakenError(f"a {what} needs a name of at least one character and no spaces; got {name!r}")


def _check_dtype(name: str, dtype: str) -> DType:
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DTypeError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    return dtype  # type: ignore[return-value]
