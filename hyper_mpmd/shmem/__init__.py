"""Symmetric memory: every rank's tensors at the same place, written and read by the others without their help.

A rank puts rows straight into a peer's buffer and signals; the peer waits for the signal and finds the rows. On CPU
the memory is shared between the processes of one host. See docs/shmem.md.
"""

from hyper_mpmd.shmem.config import Config, require
from hyper_mpmd.shmem.errors import (
    AllocationsLive,
    CollectiveMismatch,
    GroupAborted,
    HeapTooSmall,
    NotAcquired,
    PeerLost,
    RendezvousError,
    RendezvousTimeout,
    ShmemError,
    ShmemTimeout,
    ShmemTypeError,
    ShmemUnavailable,
    ShmemValueError,
    StaleTensor,
)
from hyper_mpmd.shmem.heap import SymmetricHeap
from hyper_mpmd.shmem.lifecycle import acquire, release
from hyper_mpmd.shmem.operations import all_gather, barrier, empty, free, get, put, signal, wait_signal
from hyper_mpmd.shmem.state import debug_state

__all__ = [
    "acquire",
    "release",
    "empty",
    "free",
    "barrier",
    "put",
    "get",
    "signal",
    "wait_signal",
    "all_gather",
    "debug_state",
    "require",
    "Config",
    "SymmetricHeap",
    "ShmemError",
    "ShmemValueError",
    "ShmemTypeError",
    "NotAcquired",
    "ShmemUnavailable",
    "RendezvousError",
    "RendezvousTimeout",
    "HeapTooSmall",
    "StaleTensor",
    "AllocationsLive",
    "CollectiveMismatch",
    "GroupAborted",
    "ShmemTimeout",
    "PeerLost",
]
