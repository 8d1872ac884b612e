"""Which experts each token picks: seeded patterns from even to hopelessly skewed, or counts from a file. numpy only.

Skewed routing is the normal case, so it must be as easy to ask for as the balanced one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import LoadsError, WorldSizeError
from hyper_mpmd.modules.tensor_parallel import token_parts

PATTERNS = "balanced, zipf:S (S > 0, as zipf:1.2), single, or a JSON file of counts"
_ZIPF = re.compile(r"zipf:(\d+(?:\.\d+)?)")
_BLOCK = 1 << 22  # scores drawn at a time, so that long batches over many experts need little memory


@dataclass(frozen=True)
class Routing:
    """ids: for each rank int32 [T, K], the experts of each token, none twice. experts: E over all ranks.

    tp: each expert is cut over so many ranks, which hold the same tokens: `ids` has an entry for all of them.
    """

    ids: tuple[NDArray[np.int32], ...]
    experts: int
    tp: int = 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Rows for each expert from each entry of ids, [EP, E]."""
        return np.stack([np.bincount(ids.ravel(), minlength=self.experts) for ids in self.ids]).astype(np.int64)

    @property
    def tokens(self) -> list[int]:
        """Tokens of each entry of ids."""
        return [len(ids) for ids in self.ids]

    def loads(self) -> dict[str, Any]:
        """The loads of graph moe-ffn."""
        return moe_loads(self.tokens, self.counts, self.tp)


def moe_loads(tokens: Sequence[int], counts: NDArray[np.int64], tp: int) -> dict[str, Any]:
    """The loads of graphs moe-ffn and moe-ffn-backward; tokens [EP], counts [EP, E] of each team of tp ranks."""
    if tp == 1:
        return {"batch": list(tokens), "routed": counts}
    parts = [token_parts(own, tp) for own in tokens]
    return {
        "batch": np.repeat(np.array(parts, np.int64), tp, axis=0),
        "routed": np.repeat(counts, tp, axis=0),
        "part": np.array(parts, np.int64).flatten(),
    }


def sort_by_expert(ids: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(gather, back) of ids [T, K]: the token of each routed row [T * K], rows in order of expert, then token; and the
    routed rows of each token [T, K]."""
    flat = np.asarray(ids).ravel()
    order = np.argsort(flat, kind="stable")
    back = np.empty(len(flat), np.int32)
    back[order] = np.arange(len(flat), dtype=np.int32)
    choices = ids.shape[1] if ids.ndim == 2 else 1
    return (order // max(1, choices)).astype(np.int32), back.reshape(ids.shape)


def make_routing(
    pattern: str, *, tokens: int | None, experts: int, top_k: int, ranks: int = 1, tp: int = 1, seed: int = 0
) -> Routing:
    """Routing by pattern. tokens: of each rank; None where a file of counts decides. ranks: those that share the
    experts out, each of them tp ranks where an expert is cut.

    balanced: counts that differ by at most 1. zipf:S: expert popularity falls as 1 / place^S, one order of experts for
    all ranks. single: every token picks the same K experts. Otherwise a path: JSON counts [E], or [W][E], whose sums
    are tokens times K.
    """
    if pattern == "balanced" or pattern == "single" or pattern.startswith("zipf:"):
        if not is_pattern(pattern):
            raise LoadsError(f"routing {pattern!r} is not known; it must be {PATTERNS}")
        if tokens is None:
            raise LoadsError(f"routing {pattern!r} needs a number of tokens")
        return Routing(tuple(_pattern(pattern, tokens, experts, top_k, ranks, seed)), experts, tp)
    counts = read_counts(Path(pattern), experts=experts, ranks=ranks)
    return Routing(tuple(_ids_of_counts(counts, tokens, top_k, np.random.default_rng(seed))), experts, tp)


def is_pattern(text: str) -> bool:
    """Whether the text is one of the patterns that need no file."""
    match = _ZIPF.fullmatch(text)
    return text in ("balanced", "single") or (match is not None and float(match[1]) > 0)


def read_counts(path: Path, *, experts: int, ranks: int) -> NDArray[np.int64]:
    """Counts [W, E] from a JSON file that holds [E] (on one rank) or [W][E]."""
    try:
        counts = np.array(json.loads(path.read_text()))
    except OSError as error:
        raise LoadsError(f"routing {str(path)!r}: {error.strerror}; it must be {PATTERNS}") from None
    except ValueError as error:
        raise LoadsError(f"routing file {path} is not a JSON array of counts: {error}") from None
    if counts.ndim == 1:
        counts = counts[None]
    if counts.dtype.kind not in "iu" or counts.shape != (ranks, experts):
        raise LoadsError(
            f"routing file {path} holds {counts.dtype} {list(counts.shape)}; it must be whole numbers "
            f"[{ranks} ranks][{experts} experts]"
        )
    if (counts < 0).any():
        raise LoadsError(f"routing file {path}: the smallest count is {counts.min()}; counts are not negative")
    return counts.astype(np.int64)


def _pattern(pattern: str, tokens: int, experts: int, top_k: int, ranks: int, seed: int) -> list[NDArray[np.int32]]:
    if ranks < 1:
        raise WorldSizeError(f"routing over {ranks} ranks; it must be at least 1")
    rng = np.random.default_rng(seed)
    if pattern == "balanced":
        slots = np.arange(ranks * tokens * top_k).reshape(ranks * tokens, top_k) % experts
        return [ids[rng.permutation(tokens)].astype(np.int32) for ids in np.split(slots, ranks)]
    if pattern == "single":
        return [np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1)) for _ in range(ranks)]
    exponent = float(pattern.removeprefix("zipf:"))
    places = rng.permutation(experts) + 1
    scores = (-exponent * np.log(places)).astype(np.float32)
    return [_draw(scores, tokens, top_k, rng) for _ in range(ranks)]


def _draw(scores: NDArray[np.float32], tokens: int, top_k: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """K different experts for each token, by log-probability: adding Gumbel noise and taking the largest K is the same
    as drawing them one after another without putting back."""
    block = max(1, _BLOCK // len(scores))
    parts = [np.empty((0, top_k), np.int32)]
    for begin in range(0, tokens, block):
        noise = -np.log(rng.standard_exponential((min(block, tokens - begin), len(scores)), dtype=np.float32) + 1e-30)
        parts.append(np.argsort(-(scores + noise), axis=1)[:, :top_k].astype(np.int32))
    return np.concatenate(parts)


def _ids_of_counts(
    counts: NDArray[np.int64], tokens: int | None, top_k: int, rng: np.random.Generator
) -> list[NDArray[np.int32]]:
    """Any choice of K different experts a token that gives these counts: experts dealt out over the tokens in turn."""
    found = []
    for rank, row in enumerate(counts):
        have, left = divmod(int(row.sum()), top_k)
        if left:
            raise LoadsError(f"counts of rank {rank} add up to {row.sum()}, which is not a multiple of top-k {top_k}")
        if tokens is not None and have != tokens:
            raise LoadsError(f"counts of rank {rank} are those of {have} tokens, but {tokens} were asked for")
        if row.max(initial=0) > have:
            expert = int(row.argmax())
            raise LoadsError(
                f"rank {rank}: expert {expert} has {row[expert]} rows, but {have} tokens can pick it only once each"
            )
        dealt = np.repeat(np.arange(len(row), dtype=np.int32), row).reshape(top_k, have)
        found.append(dealt.T[rng.permutation(have)])
    return found
