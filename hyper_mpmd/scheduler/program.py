"""TileProgram: every op of a graph cut into tile tasks, with the boxes they touch and the events that order them.

Not yet on any core: `schedule` puts a program on a device. Programs can also be built by hand from arrays (benchmarks
and tests do), which is how work that no graph describes reaches the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyper_mpmd.errors import CycleError, PlanFormatError
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.records import Records


@dataclass
class TileProgram:
    """The tile tasks of one rank, in program order (every edge leads to a later task).

    tasks: records with everything but launch, start and end. costs: nanoseconds of each task. local_events: how many of
    the events are of this rank; they come first. The other sections are as in a plan.
    """

    rank: int
    ranks: int
    ops: Records
    tensors: Records
    tasks: Records
    accesses: Records
    waits: Records
    signals: Records
    events: Records
    peers: Records
    costs: NDArray[np.int64]
    local_events: int
    tiles: NDArray[np.int64]  # [ops, 2]: rows and columns chosen for each op

    @classmethod
    def from_edges(cls, costs: ArrayLike, edges: ArrayLike, kinds: ArrayLike = R.AIV) -> TileProgram:
        """A program of tasks that do nothing, for one rank.

        costs: int [tasks], predicted nanoseconds. edges: int [edges, 2], (producer, consumer) with producer < consumer.
        kinds: AIC or AIV, one for all or [tasks]. A consumer waits for one event, which all its producers signal.
        Errors: PlanFormatError for arrays that do not fit together, CycleError for an edge that leads back.
        """
        times = np.asarray(costs, np.int64)
        pairs = np.asarray(edges, np.int64).reshape(-1, 2)
        _check_edges(times, pairs)
        count = len(times)
        of_kind, op_of = np.unique(np.broadcast_to(np.asarray(kinds, np.int64), (count,)), return_inverse=True)
        if not np.isin(of_kind, (R.AIC, R.AIV)).all():
            raise PlanFormatError(f"core kinds are {R.AIC} (AIC) and {R.AIV} (AIV); got {of_kind.tolist()}")
        # Each edge once, in order of the producer, then of the consumer.
        producers, targets = np.divmod(np.unique(pairs[:, 0] * count + pairs[:, 1]), max(count, 1))
        consumers, event_of, thresholds = np.unique(targets, return_inverse=True, return_counts=True)

        ops = np.zeros(len(of_kind), R.OP)
        ops["kind"] = of_kind
        ops["limit_bits"] = np.float32(np.inf).view(np.uint32)
        tasks = np.zeros(count, R.TASK)
        tasks["op"] = op_of
        for op in range(len(of_kind)):
            tasks["number"][op_of == op] = np.arange(np.count_nonzero(op_of == op))
        tasks["cost_ns"] = np.minimum(times, R.NONE)
        tasks["wait_count"][consumers] = 1
        tasks["wait_begin"] = np.cumsum(tasks["wait_count"]) - tasks["wait_count"]
        tasks["signal_count"] = np.bincount(producers, minlength=count)
        tasks["signal_begin"] = np.cumsum(tasks["signal_count"]) - tasks["signal_count"]
        waits = np.zeros(len(consumers), R.WAIT)
        waits["event"], waits["threshold"] = np.arange(len(consumers)), thresholds
        signals = np.zeros(len(producers), R.SIGNAL)
        signals["event"] = event_of
        events = np.zeros(len(consumers), R.EVENT)
        events["threshold"] = thresholds
        events["slot"] = events["tensor"] = R.NONE
        first_producer = np.full(len(consumers), count)
        np.minimum.at(first_producer, event_of, producers)
        events["op"] = op_of[first_producer]
        return cls(
            rank=0,
            ranks=1,
            ops=ops,
            tensors=np.zeros(0, R.TENSOR),
            tasks=tasks,
            accesses=np.zeros(0, R.ACCESS),
            waits=waits,
            signals=signals,
            events=events,
            peers=np.zeros(1, R.PEER),
            costs=times,
            local_events=len(consumers),
            tiles=np.ones((len(ops), 2), np.int64),
        )


def _check_edges(costs: NDArray[np.int64], edges: NDArray[np.int64]) -> None:
    if costs.ndim != 1 or (costs < 0).any():
        raise PlanFormatError("costs must be one number a task, each at least 0")
    outside = (edges < 0) | (edges >= len(costs))
    if outside.any():
        row = int(outside.any(axis=1).argmax())
        raise PlanFormatError(f"edge {row} is {tuple(edges[row].tolist())}, but there are only {len(costs)} tasks")
    back = edges[:, 0] >= edges[:, 1]
    if back.any():
        row = int(back.argmax())
        raise CycleError(f"edge {row} is {tuple(edges[row].tolist())}; an edge leads from a task to a later one")
