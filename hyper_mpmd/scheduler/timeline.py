"""Timelines: what each core does when, predicted by the schedule, simulated, or measured by the engine. One model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hyper_mpmd.scheduler.plan import Plan

SPAN = np.dtype(
    [
        ("rank", "<u4"),
        ("core", "<u4"),  # index into Timeline.cores
        ("op", "<u4"),  # index into Timeline.ops
        ("task", "<u4"),  # index into the plan's tasks
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("wait_ns", "<i8"),  # how long the core stood before it for want of what the task needs; 0 where not known
    ]
)
# The engine's record of one task, native/include/hyper_mpmd/engine.h: clock readings, nanoseconds.
TRACE = np.dtype(
    [("blocked_ns", "<i8"), ("start_ns", "<i8"), ("end_ns", "<i8"), ("worker", "<u4"), ("reserved", "<u4")]
)


@dataclass(frozen=True)
class Timeline:
    """Spans of all cores, times in nanoseconds from the first one's start."""

    kind: Literal["predicted", "simulated", "measured"]
    cores: tuple[str, ...]  # "AIC 3", with "r1 " before it in a world
    ops: tuple[str, ...]
    spans: NDArray[np.void]  # SPAN

    @property
    def makespan_ns(self) -> int:
        return int(self.spans["end_ns"].max(initial=0))

    def busy_ns(self) -> NDArray[np.int64]:
        """Nanoseconds that each core spent in tasks."""
        busy = np.zeros(len(self.cores), np.int64)
        np.add.at(busy, self.spans["core"], self.spans["end_ns"] - self.spans["start_ns"])
        return busy


def predicted(plans: Sequence[Plan]) -> Timeline:
    """The timeline that the schedules of these plans (one a rank) foresee."""
    return _timeline("predicted", plans, [plan.tasks for plan in plans])


def measured(plans: Sequence[Plan], traces: Sequence[NDArray[np.void]]) -> Timeline:
    """The timeline of a run, from the engine's records (TRACE), one array a rank."""
    return _timeline("measured", plans, traces)


def simulated(plans: Sequence[Plan], records: Sequence[NDArray[np.void]]) -> Timeline:
    """The timeline of a simulation, from its records (`simulate.SIMULATED`), one array a rank."""
    return _timeline("simulated", plans, records)


def _timeline(
    kind: Literal["predicted", "simulated", "measured"], plans: Sequence[Plan], times: Sequence[NDArray[np.void]]
) -> Timeline:
    cores: list[str] = []
    parts = []
    for plan, time in zip(plans, times, strict=True):
        spans = np.zeros(len(plan.tasks), SPAN)
        spans["rank"], spans["op"], spans["task"] = plan.rank, plan.tasks["op"], np.arange(len(plan.tasks))
        spans["core"] = plan.queue_of + len(cores)
        spans["start_ns"], spans["end_ns"] = time["start_ns"], time["end_ns"]
        if kind != "predicted":
            spans["wait_ns"] = time["start_ns"] - time["blocked_ns"]
        prefix = f"r{plan.rank} " if len(plans) > 1 else ""
        cores.extend(prefix + plan.core_name(queue) for queue in range(len(plan.sections["queues"])))
        parts.append(spans)
    spans = np.concatenate(parts)
    if kind == "measured" and len(spans):
        first = spans["start_ns"].min()
        spans["start_ns"] -= first
        spans["end_ns"] -= first
    return Timeline(kind, tuple(cores), plans[0].op_names, spans)
