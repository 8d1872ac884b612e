"""Plans over processes: the plan of rank r of a world runs in process r, its peers' buffers on the symmetric heap.

Same plan, same memory layout and same worker loop as a world in one process, and the same bits come out. Buffers and
counters are allocated once and grow when a plan needs more; all ranks see that from the counts alone.
"""

from __future__ import annotations

import hashlib
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from hyper_mpmd import _native, shmem
from hyper_mpmd.engine.bindings import check_inputs, make_outputs
from hyper_mpmd.engine.hang import leading_lines
from hyper_mpmd.engine.launching import (
    DONE,
    GROUP_ENDED,
    INTERRUPTED,
    NOT_ENTERED,
    TIMED_OUT,
    WRONG_PROGRAM,
    Outcome,
    hang_error,
    launch,
    launch_error,
)
from hyper_mpmd.engine.python_kernels import PythonKernels
from hyper_mpmd.engine.run import addresses, check_options
from hyper_mpmd.errors import EngineError, EngineHungError, LaunchTimeout, PlanFormatError, WorldSizeError
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import native_sections, require_proof
from hyper_mpmd.scheduler.records import ALIGNMENT, DTYPES, ROLES, WORDS_PER_LINE
from hyper_mpmd.scheduler.timeline import TRACE, Timeline, measured
from hyper_mpmd.shmem.heap import REASON_DEADLINE, REASON_ERROR, REASON_INTERRUPTED
from hyper_mpmd.tasks.tensor import ITEM_BYTES

_LINE_BYTES = 4 * WORDS_PER_LINE


class GroupEngine:
    """This rank's end of an engine that spans the processes of a group (None: all ranks).

    Made by all ranks of the group; `run` is called by all in the same order. rank, world_size: of the group.
    Errors of construction are those of `shmem.acquire`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._heap = shmem.acquire(group)
        self._process_group = group
        self.rank = self._heap.rank
        self.world_size = self._heap.world_size
        self._symmetric: torch.Tensor | None = None
        self._words: torch.Tensor | None = None
        self._native: Any = None
        self._generation = 0
        self._epoch = 0
        self._closed = False

    def run(
        self, plan: Plan, *, workers: int | None = None, timeout: float | None = None, **tensors: Any
    ) -> dict[str, Any]:
        """Run this rank's plan with its peers; outputs by name. See `Plan.run` for inputs and their errors.

        workers: threads of this rank. timeout: seconds from when all ranks have entered the launch, by default
        HYPER_PARALLEL_SHMEM_TIMEOUT_SEC, which entering itself has as well. What goes wrong on one rank ends the launch
        on all: that rank raises its error, the others GroupAborted with its text; LaunchTimeout is raised by all alike;
        a dead rank is PeerLost on all others. After anything but a death the next `run` works, unless a task body does
        not end (EngineHungError).
        """
        return self._run(plan, tensors, workers, timeout, None)

    def run_measured(
        self, plan: Plan, *, workers: int | None = None, timeout: float | None = None, **tensors: Any
    ) -> tuple[dict[str, Any], Timeline]:
        """`run`, and the measured timeline of this rank."""
        trace = np.zeros(len(plan.tasks), TRACE)
        outputs = self._run(plan, tensors, workers, timeout, trace)
        return outputs, measured([plan], [trace])

    def abort(self, error: BaseException) -> None:
        """End what the group is about to launch: the other ranks raise GroupAborted with this error's text."""
        self._heap.abort(f"{type(error).__name__}: {error}")

    def name(self, peer: int) -> str:
        """How messages name a rank of the group."""
        return self._heap.name(peer)

    def close(self) -> None:
        """Give the buffers and the heap's reference back: with all ranks, but local after a death. Idempotent.

        EngineHungError while a task body of a launch that was ended still runs: it may write to these buffers.
        """
        if self._closed:
            return
        if not _native.engine.settled():
            raise EngineHungError(
                "a task body of a launch that was ended is still running; close() again once it has ended, or end the "
                "process"
            )
        self._drop_buffers()
        shmem.release(self._process_group)
        self._closed = True

    def __enter__(self) -> GroupEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self._heap.lost_was_reported:
            return  # the peers may be anywhere: leave the heap to the exit hook, which waits for nobody
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _run(
        self, plan: Plan, tensors: dict[str, Any], workers: int | None, timeout: float | None, trace: Any
    ) -> dict[str, Any]:
        if self._closed:
            raise EngineError("this group engine is closed")
        try:
            generation = self._heap.ready()
        except shmem.ShmemTimeout as error:
            raise LaunchTimeout(str(error)) from None
        try:
            check_options(workers, timeout)
            self._check_plan(plan)
            self._make_room(plan, generation)
            check_inputs(plan, tensors)
            prepared = self._prepare(plan)
            outputs = make_outputs(plan)
            memory, copies = addresses(plan, tensors, outputs)
        except shmem.ShmemError:
            raise  # all ranks know already
        except BaseException as error:
            self.abort(error)
            raise
        self._epoch += 1
        self._heap.native.set_activity(f"launch {self._epoch}, {plan.graph.name} under {plan.policy}")
        self._native.enter(self._epoch, _tag(plan), self._heap.config.timeout_sec)
        kernels = PythonKernels([plan], [prepared], [self._native.workspace], [tensors], [outputs])
        traces = [] if trace is None else [trace]
        seconds = self._heap.config.timeout_sec
        outcome = launch(
            kernels, [], self._native, [memory], [copies], traces, workers, seconds if timeout is None else timeout
        )
        self._heap.native.set_activity(f"between launches, after launch {self._epoch}")
        if outcome.status != DONE:
            self._end(plan, kernels, outcome)
        return outputs

    def _check_plan(self, plan: Plan) -> None:
        if (plan.rank, plan.ranks) != (self.rank, self.world_size):
            raise WorldSizeError(
                f"the plan is rank {plan.rank}'s of a world of {plan.ranks}; this is rank {self.rank} of "
                f"{self.world_size}: compile with world={self.world_size}, rank={self.rank}"
            )

    def _make_room(self, plan: Plan, generation: int) -> None:
        """Buffers that hold the plan, counters at zero after an abort; decided alike on all ranks."""
        peers = plan.sections["peers"]
        stride = max(WORDS_PER_LINE, int(peers["heap_words"].max()) // self.world_size)
        nbytes = _symmetric_bytes(plan)
        have_words = 0 if self._words is None else self._words.numel() // self.world_size
        have_bytes = 0 if self._symmetric is None else self._symmetric.numel()
        if self._words is None or stride > have_words or nbytes > have_bytes:
            self._drop_buffers()
            # Half as much again, so that loads that wander from step to step seldom come here.
            grown = -(-max(stride * 3 // 2, have_words) // WORDS_PER_LINE) * WORDS_PER_LINE
            self._symmetric = shmem.empty(
                max(nbytes * 3 // 2, have_bytes, _LINE_BYTES), dtype=torch.uint8, alignment=_LINE_BYTES,
                group=self._process_group,
            )  # fmt: skip
            self._words = shmem.empty(
                grown * self.world_size, dtype=torch.int32, alignment=_LINE_BYTES, group=self._process_group
            )
        elif generation == self._generation:
            return
        own = self._heap.native.address(self.rank)
        assert self._symmetric is not None
        self._native = _native.engine.Group(
            self._heap.native,
            self._symmetric.data_ptr() - own,
            self._symmetric.numel(),
            self._words.data_ptr() - own,
            self._words.numel(),
        )
        self._epoch = 0
        self._heap.barrier()  # every rank's counters are zero before anybody raises one
        self._generation = self._heap.native.generation

    def _drop_buffers(self) -> None:
        self._native = None
        for name in ("_words", "_symmetric"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, None)
                shmem.free(tensor)

    def _prepare(self, plan: Plan) -> Any:
        assert self._words is not None
        assert self._symmetric is not None
        room = (self._words.numel() // self.world_size, self._symmetric.numel())
        known = plan.__dict__.get("_prepared_for_group")
        if known is not None and known[0] == room:
            return known[1]
        require_proof([plan])
        try:
            prepared = _native.engine.prepare(*native_sections(plan), *room)
        except ValueError as error:
            raise PlanFormatError(f"the engine refuses this plan: {error}") from None
        plan.__dict__["_prepared_for_group"] = (room, prepared)
        return prepared

    def _end(self, plan: Plan, kernels: PythonKernels, outcome: Outcome) -> NoReturn:
        """Tell the group why this rank's launch ended, and raise what all, or this rank, are to see."""
        heap, name = self._heap, f"launch {self._epoch}"
        if outcome.status == GROUP_ENDED:
            self._raise_end(name, kernels, outcome)
        status, rank, raised = outcome.status, outcome.rank, outcome.raised
        if status == INTERRUPTED:
            assert raised is not None
            heap.end_launch(REASON_INTERRUPTED, f"{heap.name(self.rank)} was ended in {name} by {_short(raised)}")
            raise raised
        if status == NOT_ENTERED:
            doing = heap.native.activity(rank) or "not in an engine"
            error: Exception = LaunchTimeout(
                f"{heap.name(rank)} has not entered {name} within {heap.config.timeout_sec:g} s; it is in {doing}"
            )
        elif status == WRONG_PROGRAM:
            error = EngineError(
                f"ranks launch different work as {name}: {heap.name(self.rank)} {plan.graph.name!r}, "
                f"{heap.name(rank)} something else ({heap.native.activity(rank)}); graph, loads, device, policy and "
                "tiles must be equal on all ranks"
            )
        else:
            error = launch_error(kernels, outcome)
        deadline = status in (TIMED_OUT, NOT_ENTERED)
        # All ranks raise the same text: what the heap has room for.
        text = leading_lines(f"{heap.name(self.rank)}: {error}", _native.SHMEM_ABORT_TEXT_BYTES)
        first = heap.end_launch(REASON_DEADLINE if deadline else REASON_ERROR, text)
        if deadline:
            assert isinstance(error, LaunchTimeout)
            raise LaunchTimeout(text if first is None else first[2], error.report, error.path, error.records) from None
        raise error

    def _raise_end(self, launch: str, kernels: PythonKernels, outcome: Outcome) -> NoReturn:
        try:
            self._heap.raise_end(launch)
        except shmem.ShmemTimeout as error:
            # All raise the text of the rank that ended the launch; each leaves a file of what its own cores did.
            own = hang_error(kernels, outcome)
            raise LaunchTimeout(str(error), own.report, own.path, own.records) from None


def _symmetric_bytes(plan: Plan) -> int:
    """Bytes of the tensors that peers write; the same on all ranks, which set aside what the fullest needs."""
    tensors = plan.sections["tensors"]
    mine = tensors[tensors["role"] == ROLES["symmetric"]]
    item_bytes = np.array([ITEM_BYTES[name] for name in DTYPES], np.int64)
    ends = (
        mine["offset"].astype(np.int64)
        + mine["most_rows"].astype(np.int64) * mine["cols"].astype(np.int64) * item_bytes[mine["dtype"]]
    )
    return -(-int(ends.max(initial=0)) // ALIGNMENT) * ALIGNMENT


def _tag(plan: Plan) -> int:
    """Of what all ranks must launch alike: everything in the header but the rank."""
    known = plan.__dict__.get("_tag")
    if known is None:
        same = plan.header.model_dump_json(exclude={"rank"})
        known = plan.__dict__["_tag"] = int.from_bytes(hashlib.sha256(same.encode()).digest()[:8], "little")
    return int(known)


def _short(error: Any) -> str:
    return type(error).__name__
