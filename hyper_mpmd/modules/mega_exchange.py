"""What ranks tell one another at each forward: who refuses, how many tokens, which gradients, how many rows where.

A rank that refuses its input tells it here instead of leaving its peers waiting, and all raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hyper_mpmd import shmem
from hyper_mpmd.modules.mega_config import Config
from hyper_mpmd.modules.mega_errors import KINDS, MegaMoeError, MegaMoeValueError
from hyper_mpmd.modules.mega_route import DTYPES
from hyper_mpmd.modules.moe_ffn_backward import GRADIENTS

_TEXT_WORDS = 128  # int64 words of a refusal's text
_HEAD = 6  # status, T, wanted gradients, module number, dtype, digest of the ids


@dataclass(frozen=True)
class Met:
    """What all ranks know after an exchange: tokens [EP], counts [EP, E], and the gradients that any wants."""

    tokens: tuple[int, ...]
    counts: NDArray[np.int64]
    wanted: frozenset[str]


@dataclass(frozen=True)
class Record:
    """What one rank tells. digest: of topk_ids. refusal: its error, in which case the rest says nothing."""

    tokens: int
    counts: NDArray[np.int64]
    wanted: frozenset[str]
    module: int
    dtype: int
    digest: int = 0
    refusal: MegaMoeError | None = None

    def pack(self) -> NDArray[np.int64]:
        words = np.zeros(_HEAD + len(self.counts) + _TEXT_WORDS, np.int64)
        status = 0 if self.refusal is None else _kind(self.refusal)
        bits = sum(1 << place for place, name in enumerate(GRADIENTS) if name in self.wanted)
        words[:_HEAD] = status, self.tokens, bits, self.module, self.dtype, self.digest
        words[_HEAD : _HEAD + len(self.counts)] = self.counts
        if self.refusal is not None:
            text = str(self.refusal).encode()[: 8 * _TEXT_WORDS - 1]
            words[-_TEXT_WORDS:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        return words


class Exchange:
    """This rank's end. Made and closed by all ranks of the group together."""

    def __init__(self, heap_name: Any, group: dist.ProcessGroup | None, config: Config) -> None:
        self._name = heap_name
        self._words = _HEAD + config.num_experts + _TEXT_WORDS
        self._ranks, self._tp = config.ranks, config.tp_size
        self._all: torch.Tensor | None = shmem.empty(self._ranks * self._words, dtype=torch.int64, group=group)

    def meet(self, record: Record) -> Met:
        """Tell and hear; the same error on all ranks where one refuses or they do not fit together."""
        assert self._all is not None
        shmem.all_gather(self._all, torch.from_numpy(record.pack()))
        words = self._all.numpy().reshape(self._ranks, self._words).copy()
        for rank, own in enumerate(words):
            if own[0]:
                text = own[-_TEXT_WORDS:].view(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")
                raise KINDS[int(own[0])](f"{self._name(rank)}: {text}")
        self._check_alike("module number", words[:, 3])
        self._check_alike("dtype", words[:, 4], tuple(DTYPES.values()))
        bits = words[:, 2]
        if bits.any() and not bits.all():
            with_none, with_some = int((bits == 0).argmax()), int((bits != 0).argmax())
            raise MegaMoeValueError(
                f"{self._name(with_none)} wants no gradients and will not come to the backward pass, "
                f"{self._name(with_some)} does; use torch.no_grad() on all ranks or on none"
            )
        self._check_teams(words)
        union = int(np.bitwise_or.reduce(bits))
        return Met(
            tokens=tuple(words[:: self._tp, 1].tolist()),
            counts=np.ascontiguousarray(words[:: self._tp, _HEAD:-_TEXT_WORDS]),
            wanted=frozenset(name for place, name in enumerate(GRADIENTS) if union >> place & 1),
        )

    def close(self) -> None:
        """Give the buffer back, with all ranks. Idempotent."""
        if self._all is not None:
            shmem.free(self._all)
            self._all = None

    def _check_teams(self, words: NDArray[np.int64]) -> None:
        """The ranks that an expert is cut over must bring the same tokens: each computes a term of the same sum."""
        for rank, own in enumerate(words):
            first = rank - rank % self._tp
            for what, place in (("tokens", 1), ("topk_ids digest", 5)):
                if own[place] != words[first, place]:
                    raise MegaMoeValueError(
                        f"ranks of one tp_group bring different tokens: {what} {words[first, place]} on "
                        f"{self._name(first)}, {own[place]} on {self._name(rank)}; they must call with the same "
                        "hidden_states, topk_ids and topk_weights"
                    )

    def _check_alike(self, what: str, values: NDArray[np.int64], names: Sequence[str] = ()) -> None:
        for rank, value in enumerate(values.tolist()):
            if value != values[0]:
                said = [names[v] if names else str(v) for v in (int(values[0]), value)]
                raise MegaMoeValueError(
                    f"ranks call different layers: {what} {said[0]} on {self._name(0)}, {said[1]} on {self._name(rank)}"
                )


def check_configs(group: dist.ProcessGroup | None, config: Config) -> None:
    """Refuse, on all ranks alike, constructor values that differ between ranks."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone: list[Any] = [None] * len(members)
    dist.all_gather_object(everyone, config, group=group)
    for member, other in zip(members, everyone, strict=True):
        if difference := everyone[0].difference(other):
            name, first, value = difference
            raise MegaMoeValueError(
                f"ranks construct different layers: {name}={first!r} on rank {members[0]}, {value!r} on rank {member}"
            )


def _kind(error: MegaMoeError) -> int:
    return next(number for number in range(len(KINDS) - 1, -1, -1) if isinstance(error, KINDS[number])) or 1
