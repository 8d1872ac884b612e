"""One open symmetric heap in Python: live allocations, and every status of the native core turned into its error."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch

from hyper_mpmd import _native
from hyper_mpmd.shmem.config import Config, logger
from hyper_mpmd.shmem.errors import (
    REFUSALS,
    AllocationsLive,
    CollectiveMismatch,
    GroupAborted,
    HeapTooSmall,
    NotAcquired,
    PeerLost,
    ShmemError,
    ShmemTimeout,
    ShmemTypeError,
    ShmemValueError,
)
from hyper_mpmd.shmem.tensors import Allocation, check_local, check_whole, live, locate, mark_written, storage_key

# Values of the native enums Status, AbortReason and Collective (shmem_heap.h, shmem_layout.h).
DONE, PENDING, ABORTED, LOST = range(4)
INTERRUPTED = _native.SHMEM_INTERRUPTED
REASON_DEADLINE, REASON_INTERRUPTED, REASON_ERROR = 1, 2, 3
BARRIER, EMPTY, FREE, ALL_GATHER, ALL_GATHER_END, RELEASE = range(1, 7)

DEFAULT_ALIGNMENT = 64


class SymmetricHeap:
    """A heap of one ordered member list, as `acquire` returns it. Its ranks are group ranks (PEs).

    Attributes: rank, world_size, members (global ranks by PE), config, native (the engine's handle: base addresses,
    abort word, generation, liveness).
    """

    def __init__(self, native: Any, members: tuple[int, ...], config: Config) -> None:
        self.native = native
        self.members = members
        self.config = config
        self.rank: int = native.rank
        self.world_size: int = native.world
        self.references = 1
        self.allocations: dict[int, Allocation] = {}  # live ones by id
        self.last_failure: str | None = None
        self._ids = 0
        self._collective_lock = threading.Lock()
        self._reported_generation = 0  # an abort of this generation has been raised here
        self.lost_was_reported = False
        self._unfinished: tuple[int, str] | None = None  # a barrier entered with blocking=False
        self._deferred: BaseException | None = None  # an interrupt that came after a collective went through

    # Collectives ----------------------------------------------------------------------------------------------------

    def barrier(self, blocking: bool = True) -> None:
        with self._one_collective():
            number = self._enter(BARRIER, "barrier()")
            if blocking:
                self._complete(number, BARRIER, "barrier()")
            else:
                self._unfinished = (number, "barrier(blocking=False)")
        self._raise_deferred()

    def empty(self, size: tuple[int, ...], dtype: torch.dtype, alignment: int) -> torch.Tensor:
        call = f"empty({', '.join(map(str, size))}, dtype={dtype}, alignment={alignment})"
        with self._one_collective():
            nbytes, offset, refusal = self._reserve(size, dtype, alignment, call)
            try:
                number = self._enter(EMPTY, call, nbytes, 0 if offset is None else offset, refusal)
                self._complete(number, EMPTY, call)
            except BaseException:
                if offset is not None:
                    self.native.free(offset, nbytes)
                raise
            assert offset is not None
            allocation = self._register(offset, nbytes, size, dtype, alignment)
        logger.debug("rank %d: %s is allocation %d", self.rank, call, allocation.id)
        self._raise_deferred()
        return allocation.tensor

    def free(self, tensor: torch.Tensor) -> None:
        """As `shmem.free`. After a death that was raised here already it is local and silent, like all cleaning up."""
        if self.lost_was_reported:
            self._drop(self._whole(tensor))
            return
        allocation, refusal = None, None
        try:
            allocation = self._whole(tensor)
        except ShmemError as error:
            refusal = error.with_traceback(None)  # a traceback would keep the tensor, and with it the mapping
        call = f"free(allocation {allocation.id})" if allocation else "free()"
        with self._one_collective():
            number = self._enter(FREE, call, allocation.offset if allocation else 0, 0, refusal)
            self._complete(number, FREE, call)
            assert allocation is not None
            self._drop(allocation)
        self._raise_deferred()

    def all_gather(self, output: torch.Tensor, local: torch.Tensor) -> None:
        call = f"all_gather({tuple(output.shape)} {output.dtype}, {tuple(local.shape)} {local.dtype})"
        refusal, offset, nbytes = None, 0, 0
        try:
            _, _, offset = locate(output, "output")
            check_local(local, "input")
            nbytes = local.nbytes
            if output.nbytes != nbytes * self.world_size:
                raise ShmemValueError(
                    f"output has {output.nbytes} bytes, the inputs of {self.world_size} ranks have "
                    f"{nbytes} × {self.world_size} = {nbytes * self.world_size}"
                )
        except ShmemError as error:
            refusal = error.with_traceback(None)
        with self._one_collective():
            # The first meeting: everyone's output may be written, everyone has the same idea of it.
            self._complete(self._enter(ALL_GATHER, call, nbytes, offset, refusal), ALL_GATHER, call)
            for step in range(self.world_size):
                peer = (self.rank + step) % self.world_size  # not all at one rank at a time
                self.native.put(peer, offset + self.rank * nbytes, local.data_ptr(), nbytes)
            self._complete(self._enter(ALL_GATHER_END, call), ALL_GATHER_END, call)
        mark_written(output)
        self._raise_deferred()

    def close_with_all(self) -> None:
        """The closing collective of the last reference; afterwards nobody reaches anybody's memory."""
        refusal = None
        if self.allocations:
            ids = ", ".join(str(each) for each in self.allocations)
            refusal = AllocationsLive(
                f"release() refused: {len(self.allocations)} allocation(s) live (id {ids}); "
                "free them on all ranks first"
            )
        with self._one_collective():
            self._complete(self._enter(RELEASE, "release()", refusal=refusal), RELEASE, "release()")

    def close_here(self) -> None:
        """Lets go of all memory without asking anybody; stale tensors keep what they show."""
        if not self.native.close():
            raise ShmemError("another thread is inside a call on this heap; release it when that has returned")
        for allocation in self.allocations.values():
            live.pop(allocation.key, None)
        self.allocations.clear()

    # One-sided ------------------------------------------------------------------------------------------------------

    def wait_signal(self, offset: int, value: int, comparison: str, code: int, what: str) -> int:
        self.ready_for_one_sided()
        status = self.native.wait_signal(offset, value, code, self.config.timeout_sec)
        have = self.native.read_signal(self.rank, offset)
        if status == DONE:
            return int(have)
        wanted = f"{what} to be {comparison} {value}"
        if status == PENDING:
            text = f"{self._name(self.rank)} waited {self.config.timeout_sec:g} s for {wanted}; it is {have}"
            status = self.native.abort(REASON_DEADLINE, text)
        raise self._failure(status, f"wait_signal for {wanted}")

    def abort(self, text: str) -> None:
        """Ends what the group is doing: every rank in, or next coming to, an operation raises GroupAborted(text).

        The first to abort decides the text. This rank raises nothing: it has an error of its own. All meet again in
        their next collective.
        """
        self.native.abort(REASON_ERROR, f"{self._name(self.rank)}: {text}")
        self._reported_generation = self.native.generation

    def ready_for_one_sided(self) -> None:
        """Raises what ended the group, if anything did, and finishes a barrier that was not waited for."""
        if not self.native.is_quiet():
            self._check_group(may_meet=False)
        if self._unfinished is not None:
            with self._lock():
                self._finish_barrier()

    def check_peer(self, peer: int, name: str) -> None:
        if isinstance(peer, bool) or not isinstance(peer, int):
            raise ShmemTypeError(f"{name} is {peer!r}: give a group rank, an int")
        if not 0 <= peer < self.world_size:
            raise ShmemValueError(f"{name}={peer}: this group has ranks 0 to {self.world_size - 1}")

    # Inside ---------------------------------------------------------------------------------------------------------

    def _whole(self, tensor: torch.Tensor) -> Allocation:
        _, allocation, offset = locate(tensor, "tensor")
        check_whole(tensor, allocation, offset)
        return allocation

    def _reserve(
        self, size: tuple[int, ...], dtype: torch.dtype, alignment: int, call: str
    ) -> tuple[int, int | None, ShmemError | None]:
        """Bytes, and an offset that holds them, or why not; a refusal still has to be told to all."""
        largest = _native.SHMEM_MAX_ALIGNMENT
        if any(isinstance(n, bool) or not isinstance(n, int) for n in size):
            return 0, None, ShmemTypeError(f"{call}: sizes are ints")
        if any(n < 0 for n in size):
            return 0, None, ShmemValueError(f"{call}: a size is at least 0")
        if not isinstance(dtype, torch.dtype):
            return 0, None, ShmemTypeError(f"{call}: dtype is not a torch.dtype")
        if isinstance(alignment, bool) or not isinstance(alignment, int):
            return 0, None, ShmemTypeError(f"{call}: an alignment is an int")
        if not 0 < alignment <= largest or alignment & (alignment - 1):
            return 0, None, ShmemValueError(f"{call}: an alignment is a power of two up to {largest} bytes")
        nbytes = math.prod(size) * dtype.itemsize
        heap_bytes = self.native.heap_bytes
        offset = None
        try:
            if nbytes <= heap_bytes:
                offset = self.native.allocate(nbytes, alignment)
        except OSError as error:
            return nbytes, None, HeapTooSmall(f"{call} needs {nbytes} bytes, the machine gave none: {error}")
        if offset is None:
            needed = self.native.capacity_needed(min(nbytes, 1 << 62), alignment)
            return (
                nbytes,
                None,
                HeapTooSmall(
                    f"{call} needs {nbytes} bytes; the heap of {heap_bytes} has {heap_bytes - self.native.used} free, "
                    f"{self.native.largest_free} of them in one piece: set "
                    f"HYPER_PARALLEL_SHMEM_HEAP_SIZE to {needed} or more"
                ),
            )
        return nbytes, offset, None

    def _register(
        self, offset: int, nbytes: int, size: tuple[int, ...], dtype: torch.dtype, alignment: int
    ) -> Allocation:
        raw = self.native.view(offset, max(nbytes, 1))  # no bytes is no storage, and no identity either
        tensor = raw[:nbytes].view(dtype).view(size)
        self._ids += 1
        allocation = Allocation(
            self._ids, offset, nbytes, alignment, size, dtype, raw.data_ptr(), storage_key(tensor), tensor
        )
        self.allocations[allocation.id] = allocation
        live[allocation.key] = (self, allocation)
        return allocation

    def _drop(self, allocation: Allocation) -> None:
        self.native.free(allocation.offset, allocation.nbytes)
        del self.allocations[allocation.id], live[allocation.key]

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        if not self._collective_lock.acquire(timeout=self.config.timeout_sec):
            raise ShmemError(f"another thread of {self._name(self.rank)} has been in a collective for too long")
        try:
            yield
        finally:
            self._collective_lock.release()

    @contextlib.contextmanager
    def _one_collective(self) -> Iterator[None]:
        with self._lock():
            self._check_group(may_meet=True)
            self._finish_barrier()
            try:
                yield
            except ShmemError:
                raise
            except BaseException as error:
                # A Ctrl-C between two lines of Python ends the group as one inside a wait does.
                self._end_group(error)
                raise

    def _enter(self, kind: int, call: str, a: int = 0, b: int = 0, refusal: ShmemError | None = None) -> int:
        text = call if refusal is None else f"{type(refusal).__name__}|{refusal}"
        number = self.native.enter(kind, a & 0xFFFFFFFFFFFFFFFF, b, refusal is not None, text)
        return int(number)

    def _finish_barrier(self) -> None:
        if self._unfinished is not None:
            number, what = self._unfinished
            self._unfinished = None
            self._complete(number, BARRIER, what)

    def _complete(self, number: int, kind: int, call: str) -> None:
        """Waits for all ranks to enter, then lets all raise the same error if their entries do not agree."""
        status = self.native.wait_all(number, self.config.timeout_sec)
        if status == PENDING:
            late = [peer for peer in range(self.world_size) if not self.native.has_entered(peer, number)]
            text = f"{self._name(self.rank)} waited {self.config.timeout_sec:g} s in {call}; {self._whereabouts(late)}"
            status = self.native.abort(REASON_DEADLINE, text, number)
        elif status == INTERRUPTED:
            caught = self.native.take_raised()
            text = f"{self._name(self.rank)} was ended in {call} by {type(caught).__name__}"
            status = self.native.abort(REASON_INTERRUPTED, text, number)
            if status != DONE:
                self._reported_generation = self.native.generation
                raise caught
            # The others have it behind them, so here it takes effect as well before the group ends.
            self.native.abort(REASON_INTERRUPTED, text)
            self._deferred = caught
        if status != DONE:
            raise self._failure(status, call)
        self._compare(number, kind)

    def _compare(self, number: int, kind: int) -> None:
        entries = [self.native.entry(peer, number) for peer in range(self.world_size)]
        texts = [text.partition("|")[2] if refused else text for _, refused, _, _, text in entries]
        for peer, (other, *_rest) in enumerate(entries):
            if other != entries[0][0]:
                raise CollectiveMismatch(
                    f"ranks called different collectives: {self._name(0)} {texts[0]}, "
                    f"{self._name(peer)} {texts[peer]}; "
                    "allocation, free, barrier, all_gather and release come in the same order on all ranks"
                )
        for peer, (_, refused, _, _, text) in enumerate(entries):
            if refused:
                name, _, reason = text.partition("|")
                raise REFUSALS.get(name, ShmemError)(f"{self._name(peer)}: {reason}")
        for peer, (_, _, a, b, _) in enumerate(entries):
            if (a, b) != entries[0][2:4]:
                raise CollectiveMismatch(
                    f"ranks called one collective with different arguments: {self._name(0)} {texts[0]} "
                    f"{entries[0][2:4]}, {self._name(peer)} {texts[peer]} {(a, b)} (bytes and offset, or offset)"
                )

    def _check_group(self, *, may_meet: bool) -> None:
        if self.native.closed:
            raise NotAcquired("this heap is closed: acquire() begins a new life")
        aborted = self.native.abort_state() is not None
        # An abort comes before a death: who aborted may have left, and its reason says more than its leaving.
        if aborted and self._reported_generation != self.native.generation:
            raise self._failure(ABORTED, "")
        if self.native.poll_peers() >= 0:
            raise self._failure(LOST, "")
        if not aborted:
            return
        if not may_meet:
            raise self._failure(ABORTED, "")
        # Everyone leaves the aborted generation before anyone acts in the next.
        self._unfinished = None
        status = self.native.meet(self.config.timeout_sec)
        if status == PENDING:
            late = [peer for peer in range(self.world_size) if not self.native.has_met(peer)]
            text = f"{self._name(self.rank)} waited {self.config.timeout_sec:g} s to go on after an abort; "
            raise self._noted(ShmemTimeout(text + self._whereabouts(late), self.rank))
        if status != DONE:
            raise self._failure(status, "the meeting after an abort")

    def _failure(self, status: int, call: str) -> BaseException:
        """The error of a wait that did not end well, noted as reported here."""
        if self._deferred is not None:  # this rank's own interrupt is why the rest of the call found the group ended
            caught, self._deferred = self._deferred, None
            self._reported_generation = self.native.generation
            return caught
        if status == INTERRUPTED:
            interrupt: BaseException = self.native.take_raised()
            self._end_group(interrupt, f" in {call}")
            return interrupt
        if status == LOST:
            self.lost_was_reported = True
            lost = self.native.lost_rank()
            pid, _ = self.native.process(lost)
            text = f"{self._name(lost)} is lost: its process {pid} has ended without release()"
            return self._noted(PeerLost(f"{text}; this group stays closed", lost, self.members[lost]))
        state = self.native.abort_state()
        self._reported_generation = self.native.generation
        if state is None:
            return self._noted(GroupAborted("the group was aborted and has met again without this thread", self.rank))
        rank, reason, text = state
        if reason == REASON_DEADLINE:
            return self._noted(ShmemTimeout(text, rank))
        return self._noted(GroupAborted(text, rank))

    def _end_group(self, error: BaseException, where: str = "") -> None:
        reason = REASON_ERROR if isinstance(error, Exception) else REASON_INTERRUPTED
        self.native.abort(reason, f"{self._name(self.rank)} was ended{where} by {type(error).__name__}")
        self._reported_generation = self.native.generation

    def _raise_deferred(self) -> None:
        if self._deferred is not None:
            caught, self._deferred = self._deferred, None
            self._reported_generation = self.native.generation
            raise caught

    def _noted(self, error: ShmemError) -> ShmemError:
        self.last_failure = f"{type(error).__name__}: {error}"
        logger.error("%s", self.last_failure)
        return error

    def _name(self, peer: int) -> str:
        member = self.members[peer]
        return f"rank {peer}" if member == peer else f"rank {peer} (global rank {member})"

    def _whereabouts(self, peers: list[int]) -> str:
        parts = []
        for peer in peers:
            activity = self.native.activity(peer)
            parts.append(f"{self._name(peer)} has not entered" + (f", it is in {activity}" if activity else ""))
        return "; ".join(parts) or "all have entered by now"
