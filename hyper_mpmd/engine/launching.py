"""One call of the native engine, and the error of a launch that did not end well, in the names that people gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd import _native
from hyper_mpmd.engine.hang import DIRECTORY, hang_report, hang_text, write_hang
from hyper_mpmd.engine.python_kernels import PythonKernels
from hyper_mpmd.errors import (
    EngineError,
    EngineHungError,
    HyperMpmdError,
    LaunchTimeout,
    NestedRunError,
    TaskFailedError,
)
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import CORE, Records

# native/include/hyper_mpmd/engine.h, LaunchStatus
(DONE, TASK_FAILED, TIMED_OUT, INTERRUPTED, NESTED, CLOSED, NO_THREADS, GROUP_ENDED, WRONG_PROGRAM, NOT_ENTERED,
 NO_MEMORY, HUNG) = range(12)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    rank, task: what the status speaks of. cores: of every core, if the deadline passed. stuck: cores inside a task body
    that did not end. seconds: of the launch. raised: by the handler of a signal. in_the_way: kernels of the launch that
    this one was refused for.
    """

    status: int
    rank: int
    task: int
    reason: str
    cores: Records
    stuck: Records
    seconds: float
    raised: BaseException | None
    in_the_way: PythonKernels | None


def launch(
    kernels: PythonKernels,
    workspaces: Sequence[Any],
    group: Any,
    memory: list[list[int]],
    copies: list[list[tuple[int, int]]],
    traces: Sequence[NDArray[np.void]],
    workers: int | None,
    timeout: float | None,
) -> Outcome:
    """Run the plans of `kernels`, whose memory the engine keeps as long as a task body may use it."""
    status, rank, task, reason, cores, stuck, *rest = _native.engine.launch(
        list(kernels.prepared),
        workspaces,
        group,
        memory,
        copies,
        [trace.ctypes.data for trace in traces],
        workers or 0,
        timeout or 0.0,
        kernels,
        (kernels, workspaces, group, traces),
    )
    seconds, raised, kept = rest
    found = np.frombuffer(cores, CORE), np.frombuffer(stuck, CORE)
    return Outcome(status, rank, task, reason, *found, seconds, raised, None if kept is None else kept[0])


def launch_error(kernels: PythonKernels, outcome: Outcome) -> HyperMpmdError:
    """The error of a launch that did not end well. A deadline also leaves a file."""
    plans, status = kernels.plans, outcome.status
    where = f"rank {outcome.rank}, " if plans[0].ranks > 1 else ""
    if status == TASK_FAILED:
        cause = kernels.error
        detail = outcome.reason or f"{type(cause).__name__}: {cause}"
        name = _task(plans, outcome.rank, outcome.task)
        error = TaskFailedError(f"{where}task {name} failed: {detail}{_stuck_text(kernels, outcome)}")
        error.__cause__ = cause
        return error
    if status == TIMED_OUT:
        return hang_error(kernels, outcome)
    if status == HUNG:
        assert outcome.in_the_way is not None
        hung = outcome.in_the_way.plans
        return EngineHungError(
            f"{_task(hung, outcome.rank, outcome.task)} of an earlier launch of {hung[0].graph.name!r} is still inside "
            "its body; the engine takes launches again once it has ended. One that never ends needs a new process"
        )
    if status == NESTED:
        return NestedRunError("run was called from inside a kernel; its workers are busy running that kernel")
    if status == CLOSED:
        return EngineError("the engine is closed: the interpreter is shutting down")
    if status == NO_MEMORY:
        return EngineError(f"{where}no memory for the plan's workspace: {outcome.reason}")
    return EngineError(f"{where}the engine could not start its workers: {outcome.reason or 'no more threads'}")


def _task(plans: Sequence[Plan], rank: int, task: int) -> str:
    return next(plan for plan in plans if plan.rank == rank).task_name(task)


def _stuck_text(kernels: PythonKernels, outcome: Outcome) -> str:
    if len(outcome.stuck) == 0:
        return ""
    names = [_task(kernels.plans, int(core["rank"]), int(core["task"])) for core in outcome.stuck[:4]]
    return f"; the engine takes no launch until {', '.join(names)} has ended"


def hang_error(kernels: PythonKernels, outcome: Outcome) -> LaunchTimeout:
    """The error of a launch past its deadline, with its data, which are also written to a file."""
    # When the cores were looked at; bodies that still ran may have held the end of the launch up.
    seconds = int(outcome.cores["elapsed_ns"].max(initial=0)) / 1e9
    report = hang_report(kernels.plans, outcome.cores, seconds)
    head = f"launch passed its deadline after {seconds:.2f} s{_stuck_text(kernels, outcome)}"
    rest = hang_text(report)
    try:
        path = write_hang(report)
    except OSError as error:
        text = f"{head}\n{rest}\nno file was written: {error} (set {DIRECTORY} to a directory)"
        return LaunchTimeout(text, report, records=outcome.cores)
    return LaunchTimeout(f"{head}; hyper-mpmd explain-hang {path}\n{rest}", report, path, outcome.cores)
