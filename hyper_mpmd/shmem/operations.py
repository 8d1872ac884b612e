"""The operations on symmetric memory. Tensors say which heap is meant; `group=` says it where no tensor does."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_mpmd.shmem.errors import ShmemTypeError, ShmemValueError, StaleTensor
from hyper_mpmd.shmem.heap import DEFAULT_ALIGNMENT
from hyper_mpmd.shmem.lifecycle import registry
from hyper_mpmd.shmem.tensors import check_local, live, locate, mark_written, storage_key

COMPARISONS = {"eq": 0, "ne": 1, "gt": 2, "ge": 3, "lt": 4, "le": 5}
OPERATIONS = ("set", "add")
_INT32 = range(-(1 << 31), 1 << 31)


def empty(
    *size: int | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    alignment: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A tensor in symmetric memory, at the same offset on every rank; its values are not set.

    Collective. `size` as in torch.empty, `dtype` by default torch's default, `alignment` in bytes (a power of two up to
    2 MiB, default and least 64). Every rank raises the same error where one refuses its arguments, HeapTooSmall (with
    the heap size that would do) among them.
    """
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        shape = tuple(size[0])
    else:
        shape = size  # type: ignore[assignment]
    return registry.heap(group).empty(
        shape,
        torch.get_default_dtype() if dtype is None else dtype,
        DEFAULT_ALIGNMENT if alignment is None else alignment,
    )


def free(tensor: torch.Tensor) -> None:
    """Gives back a whole allocation. Collective: when it returns, no rank uses it any more.

    The tensor and its views may still be looked at, but every operation refuses them. Raises StaleTensor for one that
    is free already, ShmemValueError for a view of a part.
    """
    if isinstance(tensor, torch.Tensor) and storage_key(tensor) in live:
        live[storage_key(tensor)][0].free(tensor)
        return
    try:
        locate(tensor, "tensor")
    except StaleTensor:
        # A second free is a collective of the heap it was in: all ranks hear of it, so none waits for this one.
        for heap in registry.heaps.values():
            if 0 <= tensor.untyped_storage().data_ptr() - heap.native.address(heap.rank) < heap.native.heap_bytes:
                heap.free(tensor)
        raise


def barrier(blocking: bool = True, *, group: dist.ProcessGroup | None = None) -> None:
    """Returns when every rank has come to it; what they put before is then in place.

    With blocking=False it only announces this rank; the next operation on this heap waits for the others first.
    """
    registry.heap(group).barrier(blocking)


def put(remote_dst: torch.Tensor, local_src: torch.Tensor, target_pe: int) -> None:
    """Copies `local_src` into the memory that `remote_dst` names on rank `target_pe`; returns when it is there.

    `remote_dst` is this rank's own symmetric tensor (or a contiguous view): its place is the same on the target. Byte
    counts are equal. The target learns of it by a signal or a barrier after it.
    """
    heap, _, offset = locate(remote_dst, "remote_dst")
    check_local(local_src, "local_src")
    _check_bytes(remote_dst, "remote_dst", local_src, "local_src")
    heap.check_peer(target_pe, "target_pe")
    heap.ready_for_one_sided()
    if local_src.nbytes:
        heap.native.put(target_pe, offset, local_src.data_ptr(), local_src.nbytes)
        if target_pe == heap.rank:
            mark_written(remote_dst)


def get(local_dst: torch.Tensor, remote_src: torch.Tensor, source_pe: int) -> None:
    """Copies the memory that `remote_src` names on rank `source_pe` into `local_dst`. Byte counts are equal."""
    heap, _, offset = locate(remote_src, "remote_src")
    check_local(local_dst, "local_dst")
    _check_bytes(local_dst, "local_dst", remote_src, "remote_src")
    heap.check_peer(source_pe, "source_pe")
    heap.ready_for_one_sided()
    if local_dst.nbytes:
        heap.native.get(source_pe, offset, local_dst.data_ptr(), local_dst.nbytes)
        mark_written(local_dst)


def signal(sig: torch.Tensor, value: int, target_pe: int, operation: str = "set") -> None:
    """Sets, or adds to, one int32 of rank `target_pe`; whoever sees it also sees all that was put before.

    `sig` is one element of a symmetric int32 tensor. Slots that different ranks write are at least 64 bytes apart, and
    all ranks initialise theirs and pass a barrier before the first signal. Adding wraps at 32 bits.
    """
    heap, _, offset = locate(sig, "sig")
    _check_signal(sig)
    _check_int32(value, "value")
    if operation not in OPERATIONS:
        raise ShmemValueError(f"operation={operation!r}: give one of {', '.join(OPERATIONS)}")
    heap.check_peer(target_pe, "target_pe")
    heap.ready_for_one_sided()
    heap.native.signal(target_pe, offset, value, operation == "add")


def wait_signal(sig: torch.Tensor, value: int, comparison: str = "eq") -> int:
    """Waits until this rank's own int32 `sig` compares so with `value` ("eq", "ne", "gt", "ge", "lt", "le").

    Returns a value it had then or just after. Raises ShmemTimeout (on all ranks) after
    HYPER_PARALLEL_SHMEM_TIMEOUT_SEC, PeerLost, GroupAborted.
    """
    heap, allocation, offset = locate(sig, "sig")
    _check_signal(sig)
    _check_int32(value, "value")
    if comparison not in COMPARISONS:
        raise ShmemValueError(f"comparison={comparison!r}: give one of {', '.join(COMPARISONS)}")
    what = f"the signal at byte {offset - allocation.offset} of allocation {allocation.id}"
    return heap.wait_signal(offset, value, comparison, COMPARISONS[comparison], what)


def all_gather(output: torch.Tensor, input: torch.Tensor) -> None:
    """Every rank's `input` into every rank's `output`, slots by rank.

    Collective. `output` is symmetric and has world_size times the bytes of `input`. Zero bytes are a no-op.
    """
    heap = live[storage_key(output)][0] if isinstance(output, torch.Tensor) and storage_key(output) in live else None
    if heap is None:
        locate(output, "output")  # says what is wrong with it
        raise AssertionError("a located tensor is live")
    if isinstance(input, torch.Tensor) and input.nbytes == 0 and output.nbytes == 0:
        return
    heap.all_gather(output, input)


def _check_bytes(target: torch.Tensor, target_name: str, source: torch.Tensor, source_name: str) -> None:
    if target.nbytes != source.nbytes:
        raise ShmemValueError(
            f"{target_name} has {target.nbytes} bytes, {source_name} has {source.nbytes}: they have to be equal"
        )


def _check_signal(sig: torch.Tensor) -> None:
    if sig.dtype != torch.int32 or sig.numel() != 1:
        raise ShmemTypeError(f"sig is {tuple(sig.shape)} {sig.dtype}: a signal is one int32 element")


def _check_int32(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ShmemTypeError(f"{name} is {value!r}: give an int")
    if value not in _INT32:
        raise ShmemValueError(f"{name}={value} does not fit in int32")
