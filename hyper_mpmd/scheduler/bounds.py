"""Lower bounds on the time of a plan or a world, by the device's own figures: what no order of the tasks can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import CycleError
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.world import World
from hyper_mpmd.tasks.tensor import ITEM_BYTES

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bounds:
    """Nanoseconds, each on the rank where it is most.

    path: the longest path through tasks and events (over all ranks of a world; under O0 through whole launches).
    work_aic, work_aiv, work_core: the tasks' time / the cores of their kind (work_core where a core is both).
    memory: bytes / the rate of the main memory: inputs read once, outputs written once, the workspace written and read.
    Boxes count as declared, and each byte once however many tiles touch it; caches that hold the whole workspace can
    beat this one.
    link: bytes put to other ranks or pulled from them / the rate of all links of a rank together.
    """

    path: int
    work_aic: int
    work_aiv: int
    work_core: int
    memory: int
    link: int

    @property
    def largest(self) -> tuple[str, int]:
        """The name of the largest bound, and its nanoseconds."""
        return largest_of(self)


def largest_of(bounds: Any) -> tuple[str, int]:
    """The name and the value of the largest field, the first of equals, of a dataclass of nanoseconds."""
    values = {field.name: int(getattr(bounds, field.name)) for field in fields(bounds)}
    name = max(values, key=lambda key: values[key])
    return name, values[name]


def bounds(plan: Plan | World) -> Bounds:
    """The bounds of a plan by itself, or of all plans of a world together."""
    plans = [plan] if isinstance(plan, Plan) else list(plan.plans)
    each = [_of_rank(one) for one in plans]
    return Bounds(path=longest_path(plans), **{name: max(rank[name] for rank in each) for name in each[0]})


def _of_rank(plan: Plan) -> dict[str, int]:
    work = _work(plan)
    return {
        "work_aic": work[R.AIC],
        "work_aiv": work[R.AIV],
        "work_core": work[R.BOTH],
        "memory": memory_bytes(plan) * 1000 // plan.device.memory_bytes_per_us,
        "link": link_bytes(plan) * 1000 // plan.device.link_total_bytes_per_us,
    }


def _durations(plan: Plan) -> Ints:
    durations: Ints = plan.tasks["end_ns"] - plan.tasks["start_ns"]
    return durations


def _work(plan: Plan) -> dict[int, int]:
    """Nanoseconds of work a core, by core kind, rounded up."""
    kinds = plan.sections["queues"]["kind"]
    of_task, durations = kinds[plan.queue_of], _durations(plan)
    return {
        kind: -(-int(durations[of_task == kind].sum()) // max(1, int(np.count_nonzero(kinds == kind))))
        for kind in (R.AIC, R.AIV, R.BOTH)
    }


def link_bytes(plan: Plan) -> int:
    """Bytes that this rank's tasks write into other ranks' memory or read from it."""
    return sum(put_and_pulled_bytes(plan))


def put_and_pulled_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes that this rank's tasks write into other ranks' memory, and those that they read from it."""
    sizes, owner, written = touched(plan)
    away = owner != plan.rank
    return int(sizes[away & written].sum()), int(sizes[away & ~written].sum())


def touched(plan: Plan) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Of each box that a task touches, task by task: its bytes, the rank that it lies on, whether it is written."""
    tasks = plan.tasks
    counts = tasks["access_count"].astype(np.int64)
    place = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of each box within its task
    boxes = plan.sections["accesses"][np.repeat(tasks["access_begin"].astype(np.int64), counts) + place]
    written = place >= np.repeat(plan.sections["ops"]["read_count"][tasks["op"]], counts)
    return box_bytes(plan, boxes), boxes["rank"].astype(np.int64), written


def memory_bytes(plan: Plan) -> int:
    """Bytes that the main memory of this rank moves at least; see `Bounds.memory`."""
    tensors, accesses, tasks = (plan.sections[name] for name in ("tensors", "accesses", "tasks"))
    read, written = np.zeros(len(tensors), np.int64), np.zeros(len(tensors), np.int64)
    for op in plan.ops_with_tasks():
        mine = tasks[tasks["op"] == op]
        for operand in range(int(mine["access_count"][0])):
            boxes = accesses[mine["access_begin"] + operand]
            side = read if operand < int(plan.sections["ops"]["read_count"][op]) else written
            storage = int(tensors["storage"][boxes["tensor"][0]])
            side[storage] = max(side[storage], distinct_bytes(plan, boxes[boxes["rank"] == plan.rank]))
    role = tensors["role"]
    # Other ranks' puts and pulls are not in this plan: what is read of a symmetric tensor was written once.
    moved = np.select(
        [role == R.ROLES["input"], role == R.ROLES["output"], role == R.ROLES["symmetric"]],
        [read, written, read + np.maximum(read, written)],
        read + written,
    )
    return int(moved.sum())


def box_bytes(plan: Plan, boxes: R.Records) -> Ints:
    """Bytes of each box."""
    item_bytes = np.array([ITEM_BYTES[name] for name in R.DTYPES], np.int64)
    tensors = plan.sections["tensors"]["dtype"][boxes["tensor"]]
    sizes: Ints = boxes["rows"].astype(np.int64) * boxes["cols"].astype(np.int64) * item_bytes[tensors]
    return sizes


def distinct_bytes(plan: Plan, boxes: R.Records) -> int:
    """Bytes of the boxes of one operand of one op: tiles cut it in a grid, so boxes are either the same or apart."""
    sizes = box_bytes(plan, boxes)
    places = (boxes["row"].astype(np.uint64) << np.uint64(32)) | boxes["col"]
    places, sizes = places[sizes > 0], sizes[sizes > 0]
    _, first = np.unique(places, return_index=True)
    return int(sizes[first].sum())


# ---- the longest path ------------------------------------------------------------------------------------------------


class _Graph(NamedTuple):
    """Nodes with nanoseconds each; edges with nanoseconds each."""

    weights: Ints
    sources: Ints
    targets: Ints
    latencies: Ints


def longest_path(plans: Sequence[Plan]) -> int:
    """Nanoseconds of the longest chain of tasks in which each waits for the one before, latencies included."""
    graph = _graph(plans)
    try:
        from hyper_mpmd._native import planner
    except ImportError:
        return _longest_path(graph)
    return int(planner.longest_path(*graph))


def _graph(plans: Sequence[Plan]) -> _Graph:
    """Nodes: the tasks of all plans, then their events, then the starts and the ends of their launches."""
    weights: list[Ints] = []
    edges: list[tuple[Ints, Ints, int]] = []
    first_event: dict[int, int] = {}  # rank -> node of its first event
    base = 0
    for plan in plans:
        sections, count = plan.sections, len(plan.tasks)
        events, launches = base + count, base + count + len(sections["events"])
        first_event[plan.rank] = events
        ends = launches + len(sections["launches"])
        tasks = base + np.arange(count)
        waiting = np.repeat(tasks, plan.tasks["wait_count"])
        local = sections["events"]["slot"] == R.NONE
        for here, latency in ((True, plan.device.event_ns), (False, plan.device.remote_ns)):
            chosen = (local[sections["waits"]["event"]] == here) & (sections["waits"]["threshold"] > 0)
            edges.append((events + sections["waits"]["event"][chosen].astype(np.int64), waiting[chosen], latency))
        edges.append((launches + plan.tasks["launch"].astype(np.int64), tasks, 0))
        edges.append((tasks, ends + plan.tasks["launch"].astype(np.int64), 0))
        waiters = np.repeat(np.arange(len(sections["launches"])), sections["launches"]["dependency_count"])
        edges.append((ends + sections["dependencies"].astype(np.int64), launches + waiters, 0))
        base = ends + len(sections["launches"])
        weights.extend((_durations(plan), np.zeros(base - events, np.int64)))
    base = 0
    for plan in plans:
        signals = plan.sections["signals"]
        signalling = base + np.repeat(np.arange(len(plan.tasks)), plan.tasks["signal_count"])
        for peer in plans:
            chosen = signals["rank"] == peer.rank
            wanted = signals["event"][chosen].astype(np.int64)
            if peer is not plan:
                slots = peer.sections["events"]["slot"]
                order = np.argsort(slots, kind="stable")
                wanted = order[np.searchsorted(slots[order], wanted)]
            edges.append((signalling[chosen], first_event[peer.rank] + wanted, 0))
        base += len(plan.tasks) + len(plan.sections["events"]) + 2 * len(plan.sections["launches"])
    return _Graph(
        np.concatenate(weights),
        np.concatenate([edge[0] for edge in edges]),
        np.concatenate([edge[1] for edge in edges]),
        np.repeat(np.array([edge[2] for edge in edges], np.int64), [len(edge[0]) for edge in edges]),
    )


def _longest_path(graph: _Graph) -> int:
    """The twin of the native one: nodes in topological order, each as late as the edges to it say."""
    order = np.argsort(graph.sources, kind="stable")
    begins = np.searchsorted(graph.sources[order], np.arange(len(graph.weights) + 1)).tolist()
    targets, latencies = graph.targets[order].tolist(), graph.latencies[order].tolist()
    weights = graph.weights.tolist()
    missing = np.bincount(graph.targets, minlength=len(weights)).tolist()
    start = [0] * len(weights)
    ready = [node for node, count in enumerate(missing) if not count]
    longest = visited = 0
    while ready:
        node = ready.pop()
        visited += 1
        end = start[node] + weights[node]
        longest = max(longest, end)
        for edge in range(begins[node], begins[node + 1]):
            target = targets[edge]
            start[target] = max(start[target], end + latencies[edge])
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    if visited < len(weights):
        raise CycleError(f"{len(weights) - visited} tasks and events wait for one another in a circle")
    return longest
