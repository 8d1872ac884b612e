"""Hypothesis strategies: random graphs, worlds, loads and tile sizes, as wild as the rules allow.

They need `hypothesis`, which is not among the dependencies of the package itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyper_mpmd import ops
from hyper_mpmd.scheduler.descriptor import describe
from hyper_mpmd.scheduler.loads import check_loads
from hyper_mpmd.scheduler.twin.layout import Layout, Tables
from hyper_mpmd.tasks.graph import TaskGraph
from hyper_mpmd.tasks.team import Team
from hyper_mpmd.tasks.tensor import DispatchMode, RouteKind, Tensor
from hyper_mpmd.testing.sample_ops import GroupedOuter, Halves, Interleave, ScaleInPlace, Transpose

Loads = dict[str, list[list[int]]]
COLUMNS = (1, 2, 6, 16, 24, 40)


class _Builder:
    """Adds one random task after another to a graph."""

    def __init__(self, draw: st.DrawFn, ranks: int, python_ops: bool) -> None:
        self.draw = draw
        self.graph = TaskGraph("random", ranks=ranks)
        self.python_ops = python_ops
        self.live: list[Tensor] = []  # matrices that a task may read
        self.made: list[Tensor] = []  # those of them that a task made
        self.names = 0
        for _ in range(draw(st.integers(1, 2))):
            groups = draw(st.sampled_from([1, 2, 3, 4, 8]))
            rows = self.graph.rows(self.name("s"), groups=groups)
            self.live.append(self.new_input((rows, self.columns())))
        if draw(st.booleans()):
            self.live.append(self.new_input((draw(st.integers(1, 60)), self.columns())))

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def columns(self) -> int:
        return self.draw(st.sampled_from(COLUMNS))

    def new_input(self, shape: Any, dtype: Any = "float32") -> Tensor:
        return self.graph.input(self.name("i"), shape, dtype)

    def pick(self, fits: Callable[[Tensor], bool]) -> Tensor | None:
        found = [tensor for tensor in self.live if fits(tensor)]
        return self.draw(st.sampled_from(found)) if found else None

    def pick_any(self) -> Tensor:
        return self.draw(st.sampled_from(self.live))

    def rows_like(self, tensor: Tensor) -> Any:
        return tensor.shape[0] if tensor.space is None else self.graph.spaces[tensor.space]

    def any_rows(self) -> Any:
        """Some row space whose loads are given, or a plain number of rows."""
        return self.draw(st.sampled_from([*self.graph.free_spaces, self.draw(st.integers(1, 40))]))

    def take(self, made: Any) -> None:
        for tensor in made if isinstance(made, tuple) else (made,):
            if len(tensor.shape) == 2:
                self.live.append(tensor)
            self.made.append(tensor)

    # Each adds a task, where some tensor fits it.

    def grouped_matmul(self) -> None:
        if x := self.pick(lambda t: t.space is not None):
            assert x.space is not None
            w = self.new_input((self.graph.spaces[x.space].groups, x.shape[1], self.columns()))
            self.take(self.graph.cube(self.name("gmm"), ops.GroupedMatmul(), x, w))

    def matmul(self) -> None:
        x = self.pick_any()
        self.take(self.graph.cube(self.name("mm"), ops.Matmul(), x, self.new_input((x.shape[1], self.columns()))))

    def swiglu(self) -> None:
        if x := self.pick(_is_even):
            self.take(self.graph.vector(self.name("act"), ops.SwiGLU(), x))

    def permute(self) -> None:
        x = self.pick_any()
        index = self.new_input((self.any_rows(),), "int32")
        self.take(self.graph.vector(self.name("perm"), ops.Permute(), x, index))

    def unpermute(self) -> None:
        y, rows, k = self.pick_any(), self.any_rows(), self.draw(st.integers(1, 3))
        index, weights = self.new_input((rows, k), "int32"), self.new_input((rows, k))
        self.take(self.graph.vector(self.name("unperm"), ops.Unpermute(), y, index, weights))

    def put(self) -> None:
        team = self.draw(st.sampled_from(teams(self.graph.ranks)))
        x = self.pick(lambda t: t.space is not None)
        if x is None or x.space is None:
            return
        space = self.graph.spaces[x.space]
        kinds: list[RouteKind] = ["shift"]
        if space.groups * team.ranks <= 32:
            kinds.append("all")
        if space.groups % team.ranks == 0:
            kinds.extend(["scatter", "scatter"])
        if space.route is not None and space.route.kind == "scatter":
            kinds.extend(["return"] * 3)
        kind = self.draw(st.sampled_from(kinds))
        makers = [node.op for node in self.graph.nodes if x.name in node.outputs]
        pulls = makers and makers[0].routing() is None  # neither an input nor what a put received
        modes: list[DispatchMode] = ["push", "pull", "pull"] if pulls else ["push"]
        mode = self.draw(st.sampled_from(modes))
        op = ops.Put(to=kind, shift=self.draw(st.integers(0, 5)), team=None if kind == "return" else team, mode=mode)
        self.take(self.graph.comm(self.name("put"), op, x))

    def scale_in_place(self) -> None:
        if x := self.pick(lambda t: t in self.made):
            self.live.remove(x)
            self.made.remove(x)
            self.take(self.graph.vector(self.name("scale"), ScaleInPlace(), x))

    def transpose(self) -> None:
        if x := self.pick(lambda t: t.space is None):
            self.take(self.graph.vector(self.name("turn"), Transpose(), x))

    def halves(self) -> None:
        if x := self.pick(_is_even):
            self.take(self.graph.vector(self.name("halves"), Halves(), x))

    def interleave(self) -> None:
        x = self.pick(lambda t: isinstance(t.shape[1], int) and t.shape[1] <= 64)
        if x is not None:
            self.take(self.graph.vector(self.name("twice"), Interleave(), x))

    def grouped_outer(self) -> None:
        x = self.pick(lambda t: t.space is not None)
        if x is not None and x.space is not None:
            y = self.draw(st.sampled_from([t for t in self.live if t.space == x.space]))
            op = GroupedOuter(groups=self.graph.spaces[x.space].groups)
            self.take(self.graph.cube(self.name("outer"), op, x, y))

    def add(self) -> None:
        native = [self.grouped_matmul, self.matmul, self.swiglu, self.permute, self.unpermute, self.put, self.put]
        python = [self.scale_in_place, self.transpose, self.halves, self.interleave, self.grouped_outer]
        self.draw(st.sampled_from(native + python if self.python_ops else native))()


def teams(ranks: int) -> list[Team]:
    """All that share out so many ranks."""
    return [
        Team(count, stride)
        for count in range(1, ranks + 1)
        for stride in range(1, ranks // count + 1)
        if ranks % (count * stride) == 0
    ]


def _is_even(tensor: Tensor) -> bool:
    cols = tensor.shape[1]
    return isinstance(cols, int) and cols % 2 == 0


@st.composite
def graphs(draw: st.DrawFn, ranks: int = 1, max_tasks: int = 6, python_ops: bool = True) -> TaskGraph:
    """A graph of up to `max_tasks` tasks for that many ranks; python_ops: with ops that have a Python kernel."""
    builder = _Builder(draw, ranks, python_ops)
    for _ in range(draw(st.integers(1, max_tasks))):
        builder.add()
    if not builder.made:
        builder.matmul()
    last = builder.made[-1]
    for number, tensor in enumerate(builder.made):
        if tensor is last or draw(st.booleans()):
            builder.graph.output(f"o{number}", tensor)
    return builder.graph


def counts(ranks: int, groups: int, most: int) -> st.SearchStrategy[list[list[int]]]:
    """Counts [ranks, groups]: even, skewed, with zero groups, or none at all."""
    one = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, most))
    return st.lists(st.lists(one, min_size=groups, max_size=groups), min_size=ranks, max_size=ranks)


@st.composite
def loads_of(draw: st.DrawFn, graph: TaskGraph, most: int = 60) -> Loads:
    """Loads for the graph's free row spaces, with at most `most` rows a group."""
    return {space.name: draw(counts(graph.ranks, space.groups, most)) for space in graph.free_spaces}


@st.composite
def tiles_of(draw: st.DrawFn, graph: TaskGraph) -> dict[str, tuple[int, int]]:
    """Tile sizes for some of the tasks."""
    size = st.tuples(st.sampled_from([3, 8, 16, 20, 64]), st.sampled_from([1, 5, 16, 48]))
    return {node.name: draw(size) for node in graph.nodes if draw(st.booleans())}


def rows_on(graph: TaskGraph, loads: Any) -> list[dict[str, NDArray[np.int64]]]:
    """For each rank: {row space: rows of each group}, derived spaces included."""
    descriptor = describe(graph)
    checked = check_loads(graph, loads)
    layout = Layout(Tables.of(descriptor), {descriptor.space_names.index(n): c for n, c in checked.items()})
    return [
        {name: np.array(layout.sizes[index][rank], np.int64) for index, name in enumerate(descriptor.space_names)}
        for rank in range(graph.ranks)
    ]


def inputs_for(graph: TaskGraph, loads: Any, seed: int) -> list[dict[str, Any]] | None:
    """Random torch tensors for the graph's inputs on each rank; None where an index would have no row to point to.

    int32 inputs are taken for row indices into the first input of the task that reads them.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = []
    for sizes in rows_on(graph, loads):

        def extent(dim: str | int, sizes: dict[str, NDArray[np.int64]] = sizes) -> int:
            return int(sizes[dim].sum()) if isinstance(dim, str) else dim

        values: dict[str, Any] = {}
        for name in graph.inputs:
            tensor = graph.tensors[name]
            shape = [extent(dim) for dim in tensor.shape]
            if tensor.dtype == "int32":
                readers = [node for node in graph.nodes if name in node.inputs]
                limit = min((extent(graph.tensors[node.inputs[0]].shape[0]) for node in readers), default=1)
                if limit == 0 and all(shape):
                    return None
                values[name] = torch.randint(0, max(limit, 1), shape, generator=generator, dtype=torch.int32)
            else:
                values[name] = torch.randn(shape, generator=generator).to(getattr(torch, tensor.dtype))
        found.append(values)
    return found
