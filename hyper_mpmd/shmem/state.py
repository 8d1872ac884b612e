"""`debug_state()`: what symmetric memory is doing in this process, for a person at a prompt and for a test."""

from __future__ import annotations

import pprint
from typing import Any

import torch.distributed as dist

from hyper_mpmd import _native
from hyper_mpmd.shmem.errors import ShmemError
from hyper_mpmd.shmem.heap import SymmetricHeap
from hyper_mpmd.shmem.lifecycle import registry


class DebugState(dict[str, Any]):
    """A dict that prints itself one key a line."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        lines = []
        for key, value in self.items():
            text = pprint.pformat(value, width=100, sort_dicts=False)
            lines.append(f"{key:<{width}}  " + text.replace("\n", "\n" + " " * (width + 2)))
        return "\n".join(lines)


def debug_state(group: dist.ProcessGroup | None = None) -> DebugState:
    """State, config, reference count, bytes used, free and peak, live allocations by id, last failure.

    Of one heap: that of `group`, or the one calls without `group=` mean, or the first; others are under `other_heaps`.
    Never waits, never raises for want of a heap: `state` is then "closed", "opening" or "unavailable".
    """
    heaps = list(registry.heaps.values())
    if group is not None:
        chosen: SymmetricHeap | None = registry.heap(group)
    else:
        try:
            chosen = registry.heap()
        except ShmemError:
            chosen = heaps[0] if heaps else None
    if chosen is None:
        state = "unavailable" if registry.unavailable else "opening" if registry.opening else "closed"
        return DebugState(
            state=state,
            config=None,
            reference_count=0,
            bytes_used=0,
            bytes_free=0,
            bytes_peak=0,
            allocations={},
            last_failure=registry.last_failure,
        )
    shown = _describe(chosen)
    others = [_describe(heap) for heap in heaps if heap is not chosen]
    if others:
        shown["other_heaps"] = others
    return shown


def _describe(heap: SymmetricHeap) -> DebugState:
    native = heap.native
    aborted = native.abort_state()
    lost = native.lost_rank()
    state = "lost" if lost >= 0 else "aborted" if aborted is not None else "open"
    peers = {}
    for peer in range(heap.world_size):
        pid, start = native.process(peer)
        peers[peer] = {
            "global_rank": heap.members[peer],
            "pid": pid,
            "alive": _native.process_alive(pid, start),
            "activity": native.activity(peer),
        }
    return DebugState(
        state=state,
        config=heap.config.as_dict(),
        reference_count=heap.references,
        bytes_used=native.used,
        bytes_free=native.heap_bytes - native.used,
        bytes_peak=native.peak,
        allocations={
            each.id: {
                "shape": each.shape,
                "dtype": str(each.dtype),
                "nbytes": each.nbytes,
                "offset": each.offset,
                "alignment": each.alignment,
            }
            for each in heap.allocations.values()
        },
        last_failure=heap.last_failure or registry.last_failure,
        rank=heap.rank,
        world_size=heap.world_size,
        members=heap.members,
        generation=native.generation,
        lost_rank=None if lost < 0 else lost,
        abort=None if aborted is None else aborted[2],
        peers=peers,
    )
