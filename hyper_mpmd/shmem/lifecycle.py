"""When symmetric memory exists: the first acquire opens a heap with all ranks of a group, the last release closes it.

One heap per ordered member list, counted by references; two groups with the same members in the same order share one.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Any

import torch.distributed as dist

from hyper_mpmd import _native
from hyper_mpmd.shmem.config import (
    DEFAULT_TIMEOUT_SEC,
    Config,
    apply_log_level,
    logger,
    needed_bytes,
    read_config,
    timeout_from,
)
from hyper_mpmd.shmem.endpoint import EndpointExchange, parse_endpoint
from hyper_mpmd.shmem.errors import (
    HeapTooSmall,
    NotAcquired,
    PeerLost,
    RendezvousError,
    RendezvousTimeout,
    ShmemError,
    ShmemUnavailable,
    ShmemValueError,
)
from hyper_mpmd.shmem.heap import SymmetricHeap
from hyper_mpmd.shmem.rendezvous import Exchange, GroupExchange, Message, SoloExchange
from hyper_mpmd.shmem.tensors import live

PROTOCOL = 1
_SLICE_SEC = 0.05
_LAST_WORDS_SEC = 2.0


class Registry:
    """All open heaps of this process, by ordered member list."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.heaps: dict[tuple[int, ...], SymmetricHeap] = {}
        self.unavailable: str | None = None
        self.last_failure: str | None = None
        self.opening = False

    def heap(self, group: dist.ProcessGroup | None = None) -> SymmetricHeap:
        """The heap of a group, or the only one there is. Raises NotAcquired."""
        if group is not None:
            members = members_of(group)
            if members not in self.heaps:
                raise NotAcquired(f"no heap is open for the group of ranks {list(members)}: acquire(group) first")
            return self.heaps[members]
        if len(self.heaps) == 1:
            return next(iter(self.heaps.values()))
        if not self.heaps:
            raise NotAcquired("no symmetric heap is open in this process: call shmem.acquire() first, on all ranks")
        whole = self.heaps.get(members_of(None)) if dist.is_initialized() else None
        if whole is not None:
            return whole
        raise NotAcquired(f"heaps of {[list(key) for key in self.heaps]} are open: say which with group=")


registry = Registry()


def members_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks by group rank."""
    if group is not None and not dist.is_initialized():
        raise ShmemValueError("a group was given, but torch.distributed is not initialised in this process")
    if dist.is_initialized():
        if group is not None and dist.get_rank(group) < 0:
            raise ShmemValueError("this process is not a member of the group")
        return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    return tuple(range(_world_from_environment()[1]))


def _world_from_environment() -> tuple[int, int]:
    texts = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if texts == ("", ""):
        return 0, 1
    try:
        rank, world = map(int, texts)
    except ValueError:
        rank = world = -1
    if not 0 <= rank < world <= _native.SHMEM_MAX_RANKS:
        raise ShmemValueError(
            f"RANK={texts[0]!r} WORLD_SIZE={texts[1]!r}: without a process group both name this rank and the number of "
            f"ranks, 0 <= RANK < WORLD_SIZE <= {_native.SHMEM_MAX_RANKS}"
        )
    return rank, world


def acquire(group: dist.ProcessGroup | None = None) -> SymmetricHeap:
    """Takes a reference on the symmetric heap of `group` (None: all ranks); the first one opens it, with all ranks.

    Ranks meet through the process group; without torch.distributed through HYPER_PARALLEL_SHMEM_BOOTSTRAP_ENDPOINT,
    with RANK and WORLD_SIZE from the environment (neither: this process alone). Returns the heap.

    Raises ShmemValueError or HeapTooSmall (nothing was taken; every rank raises the same), RendezvousError (no
    reference, may be retried), PeerLost, ShmemUnavailable after a failed native shutdown.
    """
    with registry.lock:
        if registry.unavailable is not None:
            raise ShmemUnavailable(
                f"symmetric memory failed to shut down in this process ({registry.unavailable}); start a new process"
            )
        members = members_of(group)
        heap = registry.heaps.get(members)
        if heap is not None:
            if heap.native.poll_peers() >= 0:
                heap.ready_for_one_sided()  # raises PeerLost
            heap.references += 1
            return heap
        registry.opening = True
        try:
            heap = _open(group, members)
        except BaseException as error:
            registry.last_failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            registry.opening = False
        registry.heaps[members] = heap
        logger.info("rank %d of %d: opened a heap of %d bytes", heap.rank, heap.world_size, heap.config.heap_bytes)
        return heap


def release(group: dist.ProcessGroup | None = None) -> None:
    """Gives a reference back; the last one closes the heap, on all ranks together.

    Raises AllocationsLive while allocations live, and what ends a wait; the reference is then kept and release may be
    called again. After a death has been raised it is local and returns at once.
    """
    with registry.lock:
        heap = registry.heap(group)
        if heap.references > 1:
            heap.references -= 1
            return
        if not heap.lost_was_reported:
            heap.close_with_all()
        try:
            heap.close_here()
        except ShmemError:
            raise
        except Exception as error:
            registry.unavailable = registry.last_failure = f"{type(error).__name__}: {error}"
            raise ShmemUnavailable(f"the native shutdown of the heap failed: {error}") from error
        finally:
            if registry.unavailable is not None or heap.native.closed:
                heap.references = 0
                registry.heaps.pop(heap.members, None)
                registry.last_failure = heap.last_failure or registry.last_failure
        logger.info("rank %d of %d: closed the heap", heap.rank, heap.world_size)


def _open(group: dist.ProcessGroup | None, members: tuple[int, ...]) -> SymmetricHeap:
    config: Config | None = None
    refusal: ShmemError | None = None
    try:
        config = read_config()
        apply_log_level(config)
        timeout = config.timeout_sec
    except ShmemError as error:
        refusal = error
        timeout = _timeout_or_default()
    deadline = time.monotonic() + timeout
    exchange = _exchange(group, members, config, deadline)
    try:
        return _connect(exchange, members, config, refusal, deadline)
    finally:
        exchange.close()


def _timeout_or_default() -> float:
    try:
        return timeout_from(os.environ)
    except ShmemError:
        return DEFAULT_TIMEOUT_SEC


def _exchange(
    group: dist.ProcessGroup | None, members: tuple[int, ...], config: Config | None, deadline: float
) -> Exchange:
    if dist.is_initialized():
        whole = group or dist.group.WORLD
        assert whole is not None
        return GroupExchange(whole)
    rank, world = _world_from_environment()
    if world == 1:
        return SoloExchange()
    endpoint = config.endpoint if config else os.environ.get("HYPER_PARALLEL_SHMEM_BOOTSTRAP_ENDPOINT", "")
    parse_endpoint(endpoint)
    return EndpointExchange(endpoint, rank, world, deadline)


def _connect(
    exchange: Exchange,
    members: tuple[int, ...],
    config: Config | None,
    refusal: ShmemError | None,
    deadline: float,
) -> SymmetricHeap:
    """Two rounds around the mapping: what each brings, then whether it worked; so all open the heap or none does."""
    rank, world = exchange.rank, exchange.world
    invitation: Any = None
    if refusal is None:
        assert config is not None
        try:
            if world > _native.SHMEM_MAX_RANKS:
                raise ShmemValueError(f"a group of {world} ranks: at most {_native.SHMEM_MAX_RANKS} fit on one host")
            invitation = _native.ShmemInvitation(rank, world, config.heap_bytes)
        except ShmemError as error:
            refusal = error
        except OSError as error:
            refusal = HeapTooSmall(f"the machine gave no heap of {config.heap_bytes} bytes: {error}")
    brought: Message = {"protocol": PROTOCOL}
    if refusal is not None:
        brought["refused"] = [type(refusal).__name__, str(refusal)]
    else:
        brought["card"] = invitation.card
    everyone = exchange.all(brought, deadline, _nothing)
    _agree(everyone, refusal)
    cards = [tuple(message["card"]) for message in everyone]

    def watch() -> None:
        for peer, (pid, start, *_) in enumerate(cards):
            if not _native.process_alive(pid, start):
                raise PeerLost(f"rank {peer} is lost: its process {pid} ended in acquire()", peer, members[peer])

    verdict: Message = {}
    caught: BaseException | None = None
    try:
        invitation.expect(cards)
        while not invitation.progress(_SLICE_SEC):
            if time.monotonic() > deadline:
                raise RendezvousTimeout(f"the memory of rank(s) {invitation.missing()} did not come in time")
    except _native.ShmemConnectError as error:
        peer, dead, text = error.args
        if dead:
            raise PeerLost(f"rank {peer} is lost: {text}", peer, members[peer]) from None
        verdict["failed"] = f"no way to the memory of rank {peer}: {text}"
    except BaseException as error:
        verdict["failed"] = f"{type(error).__name__}: {error}"
        caught = error
        deadline = min(deadline, time.monotonic() + _LAST_WORDS_SEC)
    try:
        verdicts = exchange.all(verdict, deadline, watch)
    except (RendezvousError, PeerLost):
        if caught is not None:
            raise caught from None
        raise
    if caught is not None:
        raise caught
    for peer, each in enumerate(verdicts):
        if "failed" in each:
            raise RendezvousError(f"rank {peer} could not join: {each['failed']}")
    assert config is not None
    local_ranks = max(world, _local_world_size())
    native = invitation.finish(local_ranks <= _native.usable_processors())
    return SymmetricHeap(native, members, config)


def _agree(everyone: list[Message], own: ShmemError | None) -> None:
    """Raises, on every rank alike, the first rank's refusal or the first difference."""
    from hyper_mpmd.shmem.errors import REFUSALS

    for peer, message in enumerate(everyone):
        if message.get("protocol") != PROTOCOL:
            raise RendezvousError(f"rank {peer} runs another version of hyper_mpmd.shmem than rank 0")
        if "refused" in message:
            name, text = message["refused"]
            raise REFUSALS.get(name, ShmemError)(f"rank {peer}: {text}") from own
    sizes = [message["card"][2] for message in everyone]
    for peer, size in enumerate(sizes):
        if size != sizes[0]:
            raise RendezvousError(
                f"heaps differ: rank 0 has {sizes[0]} bytes, rank {peer} has {size}; set the same "
                f"HYPER_PARALLEL_SHMEM_HEAP_SIZE on all ranks (registered modules need {needed_bytes()} bytes here)"
            )


def _local_world_size() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1


def _nothing() -> None:
    return


def _forget_in_child() -> None:
    """A forked child has its parent's tensors but is no rank: it starts without a heap, and touches none."""
    live.clear()
    registry.__init__()  # type: ignore[misc]


def _close_at_exit() -> None:
    if registry.pid != os.getpid():
        return
    for heap in registry.heaps.values():
        heap.native.close()  # local; peers that still wait see this process end
    registry.heaps.clear()
    live.clear()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_close_at_exit)
