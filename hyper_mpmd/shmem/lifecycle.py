"""When symmetric memory exists: the first acquire opens a heap with all ranks of a group, the last release closes it.

One heap per ordered member list, counted by references; two groups with the same members in the same order share one.
"""

from __future__ import annotations

import atexit
import os
import threading

import torch.distributed as dist

from hyper_mpmd.shmem.config import logger
from hyper_mpmd.shmem.errors import NotAcquired, ShmemError, ShmemUnavailable, ShmemValueError
from hyper_mpmd.shmem.heap import SymmetricHeap
from hyper_mpmd.shmem.opening import open_heap, world_from_environment
from hyper_mpmd.shmem.tensors import live


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
    return tuple(range(world_from_environment()[1]))


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
            registry.heaps[members] = heap = open_heap(group, members)
        except BaseException as error:
            registry.last_failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            registry.opening = False
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
