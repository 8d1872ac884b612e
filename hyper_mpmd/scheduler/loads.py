"""Loads: how many rows arrive in each group of each free row space, on each rank; checked before any planning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import LoadsError
from hyper_mpmd.scheduler.records import MAX_INDEX

if TYPE_CHECKING:
    from hyper_mpmd.tasks.graph import TaskGraph
    from hyper_mpmd.tasks.tensor import RowSpace

Loads = dict[str, NDArray[np.int64]]


def check_loads(graph: TaskGraph, loads: Mapping[str, Any] | Any | None) -> Loads:
    """Loads as int64 [ranks, groups] for each free row space.

    loads: {row space: counts}, counts being [ranks, groups]; [groups] on one rank, [ranks] for a space of one group and
    a plain int for both. A graph with one free row space takes the counts alone.
    """
    free = graph.free_spaces
    if loads is None:
        loads = {}
    if not isinstance(loads, Mapping):
        if len(free) != 1:
            names = ", ".join(repr(space.name) for space in free) or "none"
            raise LoadsError(f"graph {graph.name!r} has {len(free)} free row spaces ({names}); give loads as a dict")
        loads = {free[0].name: loads}
    known = {space.name for space in free}
    for name in loads:
        if name not in known:
            raise LoadsError(
                f"loads for {name!r}, but the free row spaces of graph {graph.name!r} are {sorted(known) or 'none'}"
            )
    for space in free:
        if space.name not in loads:
            raise LoadsError(f"no loads for row space {space.name!r}; it needs {_wanted(graph, space)}")
    return {space.name: _counts(graph, space, loads[space.name]) for space in free}


def _wanted(graph: TaskGraph, space: RowSpace) -> str:
    shape = f"{space.groups} counts, one a group"
    return shape if graph.ranks == 1 else f"{graph.ranks} x {shape}"


def _counts(graph: TaskGraph, space: RowSpace, given: Any) -> NDArray[np.int64]:
    try:
        counts = np.asarray(given)
    except (TypeError, ValueError):
        raise LoadsError(f"loads of {space.name!r} are not an array of counts: {given!r}") from None
    if counts.dtype == bool or counts.dtype.kind not in "iu":
        if counts.size:
            raise LoadsError(f"loads of {space.name!r} must be whole numbers; got dtype {counts.dtype}")
        counts = counts.astype(np.int64)
    shape = (graph.ranks, space.groups)
    if counts.size != graph.ranks * space.groups or counts.shape not in (shape, *_short_forms(shape)):
        raise LoadsError(f"loads of {space.name!r} have shape {list(counts.shape)}; it needs {_wanted(graph, space)}")
    counts = counts.reshape(shape)
    if (counts < 0).any():
        rank, group = (int(i) for i in np.argwhere(counts < 0)[0])
        raise LoadsError(f"loads of {space.name!r}: group {group} of rank {rank} has {counts[rank, group]} rows")
    total = int(counts.sum(dtype=object))
    if total > MAX_INDEX:
        raise LoadsError(f"loads of {space.name!r} add up to {total} rows; the limit is {MAX_INDEX}")
    return np.ascontiguousarray(counts, np.int64)


def _short_forms(shape: tuple[int, int]) -> list[tuple[int, ...]]:
    ranks, groups = shape
    forms: list[tuple[int, ...]] = []
    if ranks == 1:
        forms.append((groups,))
    if groups == 1:
        forms.append((ranks,))
    if ranks == groups == 1:
        forms.append(())
    return forms
