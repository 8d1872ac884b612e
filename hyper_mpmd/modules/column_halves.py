"""A tensor of gate and up columns as the two shards that it is: what distributed checkpoints save and load.

Its gate half and its up half lie at two places of the whole tensor, with the columns of other ranks between them, and
no placement of a DTensor says that. Checkpoints ask the local tensor of a DTensor what it holds, and this one answers
with both halves, each at its own offset; torch has the class for that, and lacks one method of it in three dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper


class ColumnHalves(LocalShardsWrapper):
    """Two halves side by side, [E, H, 2 * C], which share their memory with the tensor that they were made of."""

    @staticmethod
    def __new__(cls, halves: list[torch.Tensor], offsets: list[tuple[int, ...]]) -> ColumnHalves:
        first = halves[0]
        shape = torch.Size((*first.shape[:-1], sum(half.shape[-1] for half in halves)))
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=half.size())
            for half, offset in zip(halves, offsets, strict=True)
        ]
        made._local_shards = halves
        made._storage_meta = TensorStorageMetadata(TensorProperties.create_from_tensor(first), shape, chunks)
        return made

    @classmethod
    def of(cls, tensor: torch.Tensor, first: int, columns: tuple[int, int]) -> ColumnHalves:
        """Of [E, H, 2 * C]: its experts start at `first` in the whole tensor, its halves at these columns."""
        return cls(list(tensor.chunk(2, dim=-1)), [(first, 0, column) for column in columns])

    def joined(self) -> torch.Tensor:
        """The halves side by side, a copy."""
        return torch.cat(self.local_shards(), dim=-1)

    @staticmethod
    def handle_all_gather_into_tensor(args: Any, kwargs: Any) -> torch.Tensor:
        """Refused: what ranks hold does not follow one another in the whole tensor."""
        raise NotImplementedError(
            "gate_up_weight over a tp_group cannot be gathered by its placements, as its gate and up columns alternate "
            "between ranks; save it with torch.distributed.checkpoint and load that without a tp_group"
        )

    @staticmethod
    def handle_view(args: Any, kwargs: Any) -> ColumnHalves:
        """Views that keep the shape, as DTensor makes of what it is given."""
        halves, shape = args
        if tuple(shape) != tuple(halves.shape):
            raise NotImplementedError(f"halves of shape {list(halves.shape)} have no view of shape {list(shape)}")
        return ColumnHalves(
            [half.view(half.shape) for half in halves.local_shards()],
            [tuple(chunk.offsets) for chunk in halves.storage_metadata().chunks],
        )
