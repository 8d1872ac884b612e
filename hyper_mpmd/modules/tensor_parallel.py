"""Experts cut over ranks: the tp ranks of a team hold the same tokens and a part of every expert's intermediate size.

A shard j of tp holds columns [j * I / tp, (j + 1) * I / tp) of the gate half, the same of the up half, and those rows
of down. What a shard computes is a term of the whole, and the terms are summed over the team: each rank puts a part of
its tokens' terms to each member (a reduce-scatter), each sums the terms of its part in order of rank, so that bits
repeat, and puts the sums to all members (an all-gather). That moves 2 * (tp - 1) / tp rows a token and rank, where
terms put to everybody would move tp - 1: as much for two ranks, a quarter of it for eight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd import ops
from hyper_mpmd.errors import ShapeError, WorldSizeError
from hyper_mpmd.tasks import TaskGraph, Team, Tensor

if TYPE_CHECKING:
    import torch


def check_tp(graph: str, intermediate: int, ranks: int, tp: int) -> int:
    """Refuse a tp that does not share out ranks and intermediate size. Returns how many ranks share out the experts."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise WorldSizeError(f"{graph}: tp is {tp!r}; it must be an int of at least 1")
    if ranks % tp:
        raise WorldSizeError(f"{graph}: {ranks} ranks do not make teams of tp={tp}; tp must divide them")
    if intermediate % tp:
        raise ShapeError(f"{graph}: intermediate is {intermediate}, which tp={tp} does not divide")
    return ranks // tp


def add_parts(g: TaskGraph, tp: int) -> None:
    """Declare what sums over a team need: the row space "part"; and "batch" must have tp groups, see `token_parts`."""
    if tp > 1:
        g.rows("part")


def add_sum(g: TaskGraph, terms: Tensor, tp: int) -> Tensor:
    """Add the sum of `terms` [batch, H] over the tp ranks of a team, after `add_parts`; tp=1: the terms as they are.

    Declares the input shares [part, tp] int32, see `share_rows`. Returns [T, H].
    """
    if tp == 1:
        return terms
    team = Team(tp)
    shares = g.input("shares", (g.spaces["part"], tp), "int32")
    received = g.comm("reduce_scatter", ops.Put(to="scatter", team=team), terms)
    summed = g.vector("reduce", ops.GatherSum(), received, shares)
    made: Tensor = g.comm("all_gather", ops.Put(to="all", team=team), summed)
    return made


def token_parts(tokens: int, tp: int) -> list[int]:
    """How many of the tokens each rank of a team sums: parts that differ by at most 1."""
    return [tokens // tp + (place < tokens % tp) for place in range(tp)]


def share_rows(tokens: int, tp: int, place: int) -> NDArray[np.int32]:
    """Where the terms of a rank's part lie in what it receives: [part, tp], row by row in order of rank."""
    rows = token_parts(tokens, tp)[place]
    return (np.arange(tp, dtype=np.int32) * rows + np.arange(rows, dtype=np.int32)[:, None]).astype(np.int32)


def score_places(back: NDArray[np.int32], tp: int) -> NDArray[np.int32]:
    """Where the terms of each router weight's gradient lie in what the team gathers: [T * K, tp], from back [T, K]."""
    return (back.reshape(-1, 1) + np.arange(tp, dtype=np.int32) * back.size).astype(np.int32)


def shard_gate_up(w: torch.Tensor, tp: int, place: int) -> torch.Tensor:
    """Shard `place` of gate and up side by side in the last dimension, [..., 2I]: [..., 2I / tp], a copy."""
    return w.view(*w.shape[:-1], 2, tp, w.shape[-1] // (2 * tp))[..., place, :].flatten(-2)


def shard_down(w: torch.Tensor, tp: int, place: int) -> torch.Tensor:
    """Shard `place` of [E, I, H]: rows [E, I / tp, H], contiguous."""
    return w.chunk(tp, dim=-2)[place].contiguous()
