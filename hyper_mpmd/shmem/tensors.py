"""Which torch tensors symmetric memory is in use through, and what any tensor handed to an operation must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hyper_mpmd import _native
from hyper_mpmd.shmem.errors import ShmemTypeError, ShmemValueError, StaleTensor

if TYPE_CHECKING:
    from hyper_mpmd.shmem.heap import SymmetricHeap


@dataclass(eq=False)
class Allocation:
    """One live allocation; `key` is the identity of its torch storage, which no other storage has while it lives."""

    id: int
    offset: int
    nbytes: int
    alignment: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int
    key: int
    # Keeps the storage, and with it `key`, from being reused while the allocation lives.
    tensor: torch.Tensor = field(repr=False)


# Every live allocation of every heap of this process, by storage key.
live: dict[int, tuple[SymmetricHeap, Allocation]] = {}


def locate(tensor: torch.Tensor, name: str) -> tuple[SymmetricHeap, Allocation, int]:
    """The heap and live allocation a contiguous tensor is (part) of, and the heap offset of its first byte.

    Raises ShmemTypeError, StaleTensor, or ShmemValueError for a tensor of ordinary memory.
    """
    check_tensor(tensor, name)
    found = live.get(storage_key(tensor))
    if found is None:
        refuse_stale(tensor, name)
        raise ShmemValueError(f"{name} is not in a symmetric heap: give a tensor made by shmem.empty, or a view of one")
    heap, allocation = found
    inside = tensor.data_ptr() - allocation.address if tensor.nbytes else 0  # torch gives nothing the address 0
    return heap, allocation, allocation.offset + inside


def check_local(tensor: torch.Tensor, name: str) -> None:
    """A tensor this rank reads or writes for itself: ordinary memory, or live symmetric memory of any heap."""
    check_tensor(tensor, name)
    if storage_key(tensor) not in live:
        refuse_stale(tensor, name)


def check_whole(tensor: torch.Tensor, allocation: Allocation, offset: int) -> None:
    """Refuses a view of a part where the whole allocation is asked for."""
    first = offset - allocation.offset
    if first != 0 or tensor.nbytes != allocation.nbytes:
        raise ShmemValueError(
            f"free() takes whole allocations: this tensor is bytes {first} to {first + tensor.nbytes} of allocation "
            f"{allocation.id}, which has {allocation.nbytes}"
        )


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def check_tensor(tensor: torch.Tensor, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ShmemTypeError(f"{name} is a {type(tensor).__name__}: give a torch.Tensor")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ShmemTypeError(f"{name} is a {tensor.layout} tensor on {tensor.device}: give a strided one on the CPU")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ShmemTypeError(f"{name} of shape {tuple(tensor.shape)} is not contiguous: pass {name}.contiguous()")


def refuse_stale(tensor: torch.Tensor, name: str) -> None:
    if _native.shmem_in_own_mapping(tensor.untyped_storage().data_ptr()):
        raise StaleTensor(
            f"{name} lies in symmetric memory but belongs to no live allocation of this heap: "
            "it was freed, is of an earlier life or another group, or was inherited from a parent process"
        )


def mark_written(tensor: torch.Tensor) -> None:
    """Tells autograd that memory changed behind its back, so that a saved tensor is noticed instead of used."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
