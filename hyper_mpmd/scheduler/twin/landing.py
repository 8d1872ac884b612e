"""Puts and where they land: tiles, their rank-aware order and their event words, numbered from the counts alone.

Every rank comes to the same numbers without planning for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from hyper_mpmd.errors import PlanLimitError
from hyper_mpmd.scheduler.records import MAX_INDEX, WORDS_PER_LINE
from hyper_mpmd.scheduler.twin.layout import Layout, Tables
from hyper_mpmd.scheduler.twin.tiling import ROW_UNIT, even_cut


class PutTile(NamedTuple):
    """Rows that one task puts: the receiver, the received group, the first row there and here, and how many."""

    peer: int
    group: int
    source_row: int
    target_row: int
    rows: int


class Landings:
    """The puts of all ranks, for one choice of tile sizes."""

    def __init__(self, tables: Tables, layout: Layout, tiles: list[tuple[int, int]]) -> None:
        self.tables, self.layout, self.tiles = tables, layout, tiles
        self.routed = [index for index, op in enumerate(tables.ops) if op.route] if tables.ranks > 1 else []
        self.stride = cache(self._stride)
        self.first_landing = cache(self._first_landing)
        for rank in range(tables.ranks) if self.routed else ():
            words = tables.ranks * self.stride(rank)
            if words > MAX_INDEX:
                raise PlanLimitError(f"rank {rank} would have {words} event words; the limit is {MAX_INDEX}")

    def puts(self, index: int, source: int) -> list[PutTile]:
        """Every put of `source` in this op, in rank-aware order (RATR): its peers in the order source, source + 1, ...
        mod W, one tile each in turn."""
        op, ranks = self.tables.ops[index], self.tables.ranks
        found = []
        for peer in range(ranks):
            place = 0
            for segment in self.layout.segments(op, source, peer):
                for row, rows in self._row_tiles(index, peer, segment.target_group):
                    begin = max(row, segment.target_row)
                    end = min(row + rows, segment.target_row + segment.rows)
                    if begin < end:
                        where = segment.source_row + begin - segment.target_row
                        turn = (place, (peer - source) % ranks)
                        found.append((turn, PutTile(peer, segment.target_group, where, begin, end - begin)))
                        place += 1
        return [tile for _, tile in sorted(found)]

    def count(self, index: int, source: int) -> int:
        """How many puts that is, without making them."""
        op = self.tables.ops[index]
        total = 0
        for peer in range(self.tables.ranks):
            for segment in self.layout.segments(op, source, peer):
                begin, _, height = self._cut(index, peer, segment.target_group)
                first = (segment.target_row - begin) // height
                total += (segment.target_row + segment.rows - 1 - begin) // height - first + 1
        return total

    def slot(self, index: int, source: int, put: PutTile) -> int:
        """The word in the receiver's heap that this put raises: one for each row tile, in the sender's own lines."""
        begin, _, height = self._cut(index, put.peer, put.group)
        landing = self.first_landing(index, put.peer, put.group) + (put.target_row - begin) // height
        return self.credit_slot(source, put.peer) + WORDS_PER_LINE + landing

    def credit_slot(self, source: int, rank: int) -> int:
        """The first word of `source` in the heap of `rank`, which holds its credit."""
        return source * self.stride(rank)

    def _stride(self, rank: int) -> int:
        """Words that one source rank has in the heap of `rank`: whole lines, so that each line has one writer."""
        words = WORDS_PER_LINE + self.first_landing(len(self.tables.ops), rank, 0)
        return -(-words // WORDS_PER_LINE) * WORDS_PER_LINE

    def _first_landing(self, index: int, rank: int, group: int) -> int:
        """How many row tiles `rank` may receive before those of this group of this op."""
        before = 0
        for other in self.routed:
            groups = self.tables.spaces[self._received(other)].groups
            for g in range(groups if other < index else group if other == index else 0):
                _, size, height = self._cut(other, rank, g)
                before += -(-size // height) if size else 0
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
