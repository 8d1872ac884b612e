"""A plan taken apart into lists, to be edited and put together again: what mutants and hand-made worlds are made with.

A `Plan` is immutable and its records point into one another; a draft holds each task with its own boxes, waits and
signals, so that an edit is one line. `Draft.plan` lays the sections out anew and checks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.plan import Plan, PlanHeader

_LISTS = ("access", "wait", "signal")
_WORDS = ("op", "number", "group", "peer", "launch", "cost_ns", "start_ns", "end_ns")


@dataclass(eq=False)
class DraftTask:
    """One task. Its lists are ints, as in the records of a plan."""

    op: int
    number: int = 0
    group: int = 0
    peer: int = 0
    launch: int = 0
    cost_ns: int = 1
    start_ns: int = 0
    end_ns: int = 0
    accesses: list[list[int]] = field(default_factory=list)  # tensor, rank, row, rows, col, cols
    waits: list[list[int]] = field(default_factory=list)  # event, threshold
    signals: list[list[int]] = field(default_factory=list)  # rank, event


@dataclass(eq=False)
class DraftQueue:
    kind: int
    core: int
    tasks: list[DraftTask] = field(default_factory=list)


@dataclass(eq=False)
class DraftLaunch:
    op: int
    dependencies: list[int] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0


class Draft:
    """The plan of one rank as lists. events, tensors, ops and peers: records as in the plan, to be written to."""

    def __init__(self, plan: Plan) -> None:
        self.header: PlanHeader = plan.header
        self.graph = plan.graph
        sections = plan.sections
        self.ops, self.tensors, self.peers, self.events = (
            sections[name].copy() for name in ("ops", "tensors", "peers", "events")
        )
        self.queues: list[DraftQueue] = []
        for kind, core, begin, count in sections["queues"].tolist():
            queue = DraftQueue(kind, core)
            for record in sections["tasks"][begin : begin + count]:
                words: Any = record[list(_WORDS)].tolist()
                task = DraftTask(*words)
                task.accesses, task.waits, task.signals = (
                    [list(row) for row in sections[into][record[f"{name}_begin"] :][: record[f"{name}_count"]].tolist()]
                    for name, into in zip(_LISTS, ("accesses", "waits", "signals"), strict=True)
                )
                queue.tasks.append(task)
            self.queues.append(queue)
        self.launches = [
            DraftLaunch(op, sections["dependencies"][begin : begin + count].tolist(), start, end)
            for op, _, begin, count, start, end in sections["launches"].tolist()
        ]

    @property
    def rank(self) -> int:
        return self.header.rank

    def tasks(self) -> list[DraftTask]:
        """In queue order, as the plan numbers them."""
        return [task for queue in self.queues for task in queue.tasks]

    def clear(self) -> None:
        """Take out all tasks, events and launches but one; cores, tensors and ops stay."""
        for queue in self.queues:
            queue.tasks.clear()
        self.events = np.zeros(0, R.EVENT)
        self.launches = [DraftLaunch(R.NONE)]

    def add_event(self, threshold: int, op: int = 0, tensor: int = 0, *, signaller: int = -1, slot: int = -1) -> int:
        """Append an event and return its number: of this rank's own, or of another rank's with a word of the heap.

        Those of this rank's own have to be added first. op: R.NONE for a credit.
        """
        mine = slot < 0
        record = (threshold, self.rank if mine else signaller, R.NONE if mine else slot, op, 0, tensor, 0, 0, 0, 0)
        self.events = np.append(self.events, np.array([record], R.EVENT))
        return len(self.events) - 1

    def plan(self) -> Plan:
        """The plan of what is here now."""
        tasks: list[tuple[int, ...]] = []
        lists: dict[str, list[tuple[int, ...]]] = {name: [] for name in _LISTS}
        queues: list[tuple[int, ...]] = []
        for queue in self.queues:
            queues.append((queue.kind, queue.core, len(tasks), len(queue.tasks)))
            for task in queue.tasks:
                begins_and_counts: list[int] = []
                for name, rows in zip(_LISTS, (task.accesses, task.waits, task.signals), strict=True):
                    begins_and_counts += [len(lists[name]), len(rows)]
                    lists[name].extend(map(tuple, rows))
                words = (task.op, task.number, task.group, task.peer, task.launch)
                tasks.append((*words, *begins_and_counts, task.cost_ns, task.start_ns, task.end_ns))
        counts = np.bincount([task.launch for task in self.tasks()], minlength=len(self.launches)).tolist()
        launches: list[tuple[int, ...]] = []
        dependencies: list[int] = []
        for launch, count in zip(self.launches, counts, strict=True):
            place = (len(dependencies), len(launch.dependencies))
            launches.append((launch.op, count, *place, launch.start_ns, launch.end_ns))
            dependencies.extend(launch.dependencies)
        made: dict[str, Any] = {
            "ops": self.ops,
            "tensors": self.tensors,
            "tasks": tasks,
            "accesses": lists["access"],
            "waits": lists["wait"],
            "signals": lists["signal"],
            "events": self.events,
            "queues": queues,
            "launches": launches,
            "dependencies": dependencies,
            "peers": self.peers,
        }
        return Plan(self.header, {name: np.array(made[name], dtype) for name, dtype in R.SECTIONS.items()}, self.graph)


def drafts(plans: Sequence[Plan]) -> list[Draft]:
    """A draft of each plan of a world."""
    return [Draft(plan) for plan in plans]
