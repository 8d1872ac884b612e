"""What can go wrong with symmetric memory, one class a kind."""

from __future__ import annotations

from hyper_mpmd.errors import HyperMpmdError


class ShmemError(HyperMpmdError, RuntimeError):
    """The base of every error of this package."""


class ShmemValueError(ShmemError, ValueError):
    """An argument or an environment variable has a value that cannot be."""


class ShmemTypeError(ShmemError, TypeError):
    """An argument is of the wrong kind: not a tensor, not on the CPU, not contiguous, not int32."""


class NotAcquired(ShmemError):
    """No heap is open, or several are and the call does not say which."""


class ShmemUnavailable(ShmemError):
    """A native shutdown failed earlier in this process: nothing can be acquired any more."""


class RendezvousError(ShmemError):
    """The ranks did not all come together; no reference was taken and `acquire` may be tried again."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Not all ranks came together in time."""


class HeapTooSmall(ShmemError, MemoryError):
    """The heap, or the machine's memory, does not hold what is asked; nothing was allocated."""


class StaleTensor(ShmemValueError):
    """A tensor of no live allocation: freed, freed twice, of an earlier life, or inherited from a parent process."""


class AllocationsLive(ShmemError):
    """The last reference cannot go while allocations live; it is kept, so free them and release again."""


class CollectiveMismatch(ShmemError):
    """The ranks called different collectives, or one collective with different arguments; nobody's took effect."""


class GroupAborted(ShmemError):
    """Another rank ended what the group was doing; `rank` is the group rank that did, the text its reason."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class ShmemTimeout(ShmemError, TimeoutError):
    """A wait passed its deadline (HYPER_PARALLEL_SHMEM_TIMEOUT_SEC); raised on every rank of the group."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class PeerLost(ShmemError, ConnectionError):
    """A rank's process has ended. The group stays closed; `release` is local from now on and never waits.

    `rank` is the group rank (PE) of the dead, `global_rank` its rank in the job, or -1 where only the job's rendezvous
    saw it go.
    """

    def __init__(self, text: str, rank: int, global_rank: int) -> None:
        super().__init__(text)
        self.rank = rank
        self.global_rank = global_rank


# What a rank can refuse of its own arguments; all ranks then raise the same class with the same text.
REFUSALS: dict[str, type[ShmemError]] = {
    error.__name__: error for error in (ShmemValueError, ShmemTypeError, HeapTooSmall, StaleTensor, AllocationsLive)
}
