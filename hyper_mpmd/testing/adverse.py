"""Launches made harder, to show that a schedule does not depend on luck; and faults, to show that they are found.

All of these hold for every native launch of this process inside the `with` block, and one at a time: they do not nest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hyper_mpmd import _native
from hyper_mpmd.errors import EngineError
from hyper_mpmd.scheduler.plan import Plan


@contextmanager
def adverse(seed: int, *, incoherent: bool = True) -> Iterator[None]:
    """Hold worker threads, and the thread that dispatches launches, up at random at every step.

    seed: int of 1 to 2^64 - 1; the same seed draws the same delays, but how threads interleave is up to the system.
    incoherent: give each worker a scalar cache that nothing keeps coherent, as AI cores have: TaskFailedError for a
    word that is read from it after it has changed, and for two workers that store into the same 64-byte line.
    A plan that was proven computes the same bits as ever.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 < seed < 1 << 64:
        raise EngineError(f"seed is {seed!r}; it must be an int from 1 to 2^64 - 1")
    with _set(seed=seed, incoherent=incoherent):
        yield


@contextmanager
def dropped_signal(plan: Plan, task: str, signal: int = 0) -> Iterator[None]:
    """A fault: what `task` (a name as in reports, "up.e2.t5") signals as number `signal` never arrives.

    Errors: EngineError for a task that the plan does not have, or one with fewer signals.
    """
    numbers = [number for number in range(len(plan.tasks)) if plan.task_name(number) == task]
    if not numbers:
        raise EngineError(f"rank {plan.rank}'s plan of {plan.graph.name!r} has no task {task!r}")
    count = int(plan.tasks["signal_count"][numbers[0]])
    if not 0 <= signal < count:
        raise EngineError(f"task {task!r} has {count} signals; there is no signal {signal}")
    with _set(drop_rank=plan.rank, drop_task=numbers[0], drop_signal=signal):
        yield


@contextmanager
def cached_polls(seed: int) -> Iterator[None]:
    """A fault: workers poll counters through their scalar cache, as an AI core's plain load would."""
    with _set(seed=seed, incoherent=True, poll_cached=True):
        yield


def signalling_tasks(plan: Plan, *, remote: bool = False) -> list[str]:
    """Names of the tasks that signal; remote: whose first signal goes to another rank."""
    tasks, signals = plan.tasks, plan.sections["signals"]
    numbers = np.flatnonzero(tasks["signal_count"] > 0)
    if remote:
        numbers = numbers[signals["rank"][tasks["signal_begin"][numbers]] != plan.rank]
    return [plan.task_name(number) for number in numbers.tolist()]


@contextmanager
def _set(**what: int | bool) -> Iterator[None]:
    _native.engine.set_adversity(**what)
    try:
        yield
    finally:
        _native.engine.set_adversity()
