"""Puts and pulls: tiles, their rank-aware order and their event words, numbered from the counts alone.

Every rank comes to the same numbers without planning for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from hyper_mpmd.errors import PlanLimitError
from hyper_mpmd.scheduler.descriptor import AXES
from hyper_mpmd.scheduler.policies import Policy
from hyper_mpmd.scheduler.records import MAX_INDEX, WORDS_PER_LINE
from hyper_mpmd.scheduler.twin.layout import Layout, Tables
from hyper_mpmd.scheduler.twin.tiling import ROW_UNIT, even_cut


class Travel(NamedTuple):
    """Rows that one task puts or pulls: from whom to whom, the received group, the first row at each, and how many."""

    source: int
    target: int
    group: int
    source_row: int
    target_row: int
    rows: int


class Landings:
    """The puts and pulls of all ranks, for one choice of tile sizes."""

    def __init__(self, tables: Tables, layout: Layout, tiles: list[tuple[int, int]], policy: Policy) -> None:
        self.tables, self.layout, self.tiles, self.rotation = tables, layout, tiles, policy.rotation
        self.bursts = policy.bursts
        self.routed = [index for index, op in enumerate(tables.ops) if op.route] if tables.ranks > 1 else []
        self.stride = cache(self._stride)
        self.first_landing = cache(self._first_landing)
        for rank in range(tables.ranks) if self.routed else ():
            words = tables.ranks * self.stride(rank)
            if words > MAX_INDEX:
                raise PlanLimitError(f"rank {rank} would have {words} event words; the limit is {MAX_INDEX}")

    def tiles_of(self, index: int, rank: int) -> list[Travel]:
        """Every tile of this op that runs on `rank`, in rank-aware order (RATR): its peers in the order rank, rank + 1,
        ... mod W, a burst each in turn. Without rotation the turns begin with rank 0."""
        ranks, found, burst = self.tables.ranks, [], self.burst(index)
        for peer in range(ranks):
            way = (peer, rank) if self.tables.ops[index].pull else (rank, peer)
            for place, tile in enumerate(self.between(index, *way)):
                turn = (peer - rank) % ranks if self.rotation else peer
                found.append(((place // burst, turn, place), tile))
        return [tile for _, tile in sorted(found)]

    def burst(self, index: int) -> int:
        """How many tiles one peer gets in its turn: as many as make a tile of the first op that reads them by rows."""
        received = self.tables.boxes(self.tables.ops[index])[1].tensor
        if self.bursts:
            for reader, op in enumerate(self.tables.ops):
                boxes = self.tables.boxes(op)
                if any(not box.write and box.tensor == received and box.rows_axis == AXES["rows"] for box in boxes):
                    return max(1, self.tiles[reader][0] // self.tiles[index][0])
        return 1

    def between(self, index: int, source: int, target: int) -> list[Travel]:
        """What goes from one rank to the other, in order of the received row tiles."""
        found = []
        for segment in self.layout.segments(self.tables.ops[index], source, target):
            for row, rows in self._row_tiles(index, target, segment.target_group):
                begin = max(row, segment.target_row)
                end = min(row + rows, segment.target_row + segment.rows)
                if begin < end:
                    where = segment.source_row + begin - segment.target_row
                    found.append(Travel(source, target, segment.target_group, where, begin, end - begin))
        return found

    def count(self, index: int, rank: int) -> int:
        """How many tiles of the op run on `rank`, without making them."""
        op = self.tables.ops[index]
        total = 0
        for peer in range(self.tables.ranks):
            source, target = (peer, rank) if op.pull else (rank, peer)
            for segment in self.layout.segments(op, source, target):
                begin, _, height = self._cut(index, target, segment.target_group)
                first = (segment.target_row - begin) // height
                total += (segment.target_row + segment.rows - 1 - begin) // height - first + 1
        return total

    def slot(self, index: int, tile: Travel) -> int:
        """The word in the receiver's heap that says that the rows were put, or may be pulled: one for each row tile, in
        the sender's own lines."""
        begin, _, height = self._cut(index, tile.target, tile.group)
        landing = self.first_landing(index, tile.target, tile.group) + (tile.target_row - begin) // height
        return self.credit_slot(tile.source, tile.target) + WORDS_PER_LINE + landing

    def taken_slot(self, index: int, reader: int, owner: int) -> int:
        """The word in the heap of `owner` that `reader` raises with each tile that it has pulled from there."""
        groups = self.tables.spaces[self._received(index)].groups
        return self.credit_slot(reader, owner) + WORDS_PER_LINE + self.first_landing(index, owner, groups)

    def credit_slot(self, source: int, rank: int) -> int:
        """The first word of `source` in the heap of `rank`, which holds its credit."""
        return source * self.stride(rank)

    def _stride(self, rank: int) -> int:
        """Words that one source rank has in the heap of `rank`: whole lines, so that each line has one writer."""
        words = WORDS_PER_LINE + self.first_landing(len(self.tables.ops), rank, 0)
        return -(-words // WORDS_PER_LINE) * WORDS_PER_LINE

    def _first_landing(self, index: int, rank: int, group: int) -> int:
        """How many words of a source come before those of the row tiles of this group of this op."""
        before = 0
        for other in self.routed:
            groups = self.tables.spaces[self._received(other)].groups
            for g in range(groups if other < index else group if other == index else 0):
                _, size, height = self._cut(other, rank, g)
                before += -(-size // height) if size else 0
            if other < index:
                before += self.tables.ops[other].pull  # the word that says what was pulled
        return before

    def _received(self, index: int) -> int:
        return self.tables.tensors[self.tables.boxes(self.tables.ops[index])[1].tensor].space

    def _cut(self, index: int, rank: int, group: int) -> tuple[int, int, int]:
        """(first row, rows, rows of a tile) of a received group."""
        space = self._received(index)
        size = self.layout.sizes[space][rank][group]
        return self.layout.offsets[space][rank][group], size, even_cut(size, self.tiles[index][0], ROW_UNIT)

    def _row_tiles(self, index: int, rank: int, group: int) -> Iterator[tuple[int, int]]:
        """(first row, rows) of the row tiles that a received group is cut in. A put never straddles two."""
        begin, size, height = self._cut(index, rank, group)
        for row in range(0, size, height) if size else ():
            yield begin + row, min(height, size - row)
