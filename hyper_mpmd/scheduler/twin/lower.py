"""Lowering, the obvious way: enumerate tiles, compare boxes pairwise, make an event for each box that must be ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.descriptor import Descriptor
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.scheduler.twin.layout import Layout, Row, Tables
from hyper_mpmd.scheduler.twin.tiling import COL_UNIT, ROW_UNIT, choose_tiles, even_cut, slabs, tile_cost

Box = tuple[int, int, int, int]  # row, rows, col, cols


@dataclass
class TileTask:
    op: int
    number: int
    group: int
    peer: int
    cost: int
    accesses: list[tuple[int, int, Box, bool]]  # tensor, rank, box, written
    waits: list[tuple[int, int]] = field(default_factory=list)  # event, threshold
    signals: list[tuple[int, int]] = field(default_factory=list)  # rank, event or slot


@dataclass
class Ghost:
    """A put of another rank that lands here."""

    op: int
    source: int
    order: int
    tensor: int
    box: Box
    slot: int


@dataclass
class History:
    """Who touched a storage since it was last written as a whole."""

    writers: list[tuple[Box, int]] = field(default_factory=list)
    ghosts: list[Ghost] = field(default_factory=list)
    readers: list[tuple[Box, int]] = field(default_factory=list)


def lower(
    descriptor: Descriptor,
    loads: Mapping[int, NDArray[np.int64]],
    device: Device,
    rank: int,
    given_tiles: dict[int, tuple[int, int]],
) -> TileProgram:
    """Cut every op into tiles for `rank` and derive what each tile waits for."""
    return _Lowering(descriptor, loads, device, rank, given_tiles).program()


class _Lowering:
    def __init__(
        self,
        descriptor: Descriptor,
        loads: Mapping[int, NDArray[np.int64]],
        device: Device,
        rank: int,
        given_tiles: dict[int, tuple[int, int]],
    ) -> None:
        self.tables = Tables.of(descriptor)
        self.device, self.rank = device, rank
        self.layout = Layout(self.tables, loads)
        self.tiles = choose_tiles(self.tables, self.layout, device, given_tiles)
        self.routed = [index for index, op in enumerate(self.tables.ops) if op.route] if descriptor.ranks > 1 else []
        self.tasks: list[TileTask] = []
        self.events: list[list[int]] = []  # the fields of an event record
        self.histories = [History() for _ in self.tables.tensors]
        self.ghosts: list[Ghost] = []

    def program(self) -> TileProgram:
        for index, op in enumerate(self.tables.ops):
            first = len(self.tasks)
            self.tasks.extend(self._puts(index, op) if op.route else self._grid(index, op))
            self._order(index, op, first)
        self._close_events()
        return self._records()

    # ---- tiles ---------------------------------------------------------------------------------------------------

    def _grid(self, index: int, op: Row) -> Iterator[TileTask]:
        tile_rows, tile_cols = self.tiles[index]
        width = even_cut(op.cols_value, tile_cols, COL_UNIT)
        number = 0
        for slab in slabs(self.tables, self.layout, op, self.rank):
            height = even_cut(slab.rows, tile_rows, ROW_UNIT)
            for row in range(0, slab.rows, height):
                rows = min(height, slab.rows - row)
                for col in range(0, op.cols_value, width):
                    cols = min(width, op.cols_value - col)
                    reach = {
                        1: (slab.begin + row, rows),
                        2: (col, cols),
                        3: (slab.reduction_begin, slab.reduction),
                    }
                    accesses = [
                        (box.tensor, self.rank, self._box(op, box, slab.group, reach), bool(box.write))
                        for box in self.tables.boxes(op)
                    ]
                    cost = tile_cost(self.tables, self.device, op, rows, cols, slab.reduction)
                    yield TileTask(index, number, slab.group, self.rank, cost, accesses)
                    number += 1

    def _box(self, op: Row, box: Row, group: int, reach: dict[int, tuple[int, int]]) -> Box:
        tensor = self.tables.tensors[box.tensor]
        height = tensor.block_rows if box.group else self._tensor_rows(box.tensor, self.rank)
        row, rows = reach.get(box.rows_axis, (0, height))
        col, cols = reach.get(box.cols_axis, (0, tensor.cols))
        if box.group:
            row += group * tensor.block_rows
        if box.shift:
            col += box.shift * {1: op.rows_value, 2: op.cols_value, 3: op.reduction_value}[box.cols_axis]
        return row, rows, col, cols

    def _tensor_rows(self, tensor: int, rank: int) -> int:
        row = self.tables.tensors[tensor]
        return row.rows if row.space < 0 else self.layout.total(row.space, rank)

    def _puts(self, index: int, op: Row) -> Iterator[TileTask]:
        source, target = self.tables.boxes(op)
        tensor = self.tables.tensors[source.tensor]
        for number, (peer, group, source_row, target_row, rows) in enumerate(self._put_tiles(index, op, self.rank)):
            cost = tile_cost(self.tables, self.device, op, rows, 1, 1)
            task = TileTask(
                index,
                number,
                group,
                peer,
                cost,
                [
                    (source.tensor, self.rank, (source_row, rows, 0, tensor.cols), False),
                    (target.tensor, peer, (target_row, rows, 0, tensor.cols), True),
                ],
            )
            if peer != self.rank:
                slot = self._slots(peer)[index, group, target_row]
                task.signals.append((peer, self._first_word(self.rank, peer) + R.WORDS_PER_LINE + slot))
            yield task

    def _put_tiles(self, index: int, op: Row, source: int) -> list[tuple[int, int, int, int, int]]:
        """(peer, received group, source row, target row, rows) of every put of `source`, in rank-aware order (RATR):
        its peers in the order source, source + 1, ... mod W, one tile each in turn."""
        found = []
        for peer in range(self.tables.ranks):
            place = 0
            for segment in self.layout.segments(op, source, peer):
                for row, rows in self._landing_tiles(index, op, peer, segment.target_group):
                    begin = max(row, segment.target_row)
                    end = min(row + rows, segment.target_row + segment.rows)
                    if begin < end:
                        where = segment.source_row + begin - segment.target_row
                        turn = (place, (peer - source) % self.tables.ranks)
                        found.append((turn, (peer, segment.target_group, where, begin, end - begin)))
                        place += 1
        return [tile for _, tile in sorted(found)]

    def _landing_tiles(self, index: int, op: Row, rank: int, group: int) -> Iterator[tuple[int, int]]:
        """(first row, rows) of the row tiles that a received group is cut in. A put never straddles two."""
        space = self.tables.tensors[self.tables.boxes(op)[1].tensor].space
        begin, size = self.layout.offsets[space][rank][group], self.layout.sizes[space][rank][group]
        if size:
            height = even_cut(size, self.tiles[index][0], ROW_UNIT)
            for row in range(0, size, height):
                yield begin + row, min(height, size - row)

    # ---- events of other ranks: numbered from the counts alone ---------------------------------------------------

    def _landings(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(op, group, first row, rows) of every row tile that `rank` may receive, over all communication ops."""
        found = []
        for index in self.routed:
            op = self.tables.ops[index]
            space = self.tables.tensors[self.tables.boxes(op)[1].tensor].space
            for group in range(self.tables.spaces[space].groups):
                for row, rows in self._landing_tiles(index, op, rank, group):
                    found.append((index, group, row, rows))
        return found

    def _slots(self, rank: int) -> dict[tuple[int, int, int], int]:
        """(op, group, row that a put starts at) -> number of the row tile on `rank`."""
        slots = {}
        for number, (index, group, row, rows) in enumerate(self._landings(rank)):
            slots.update({(index, group, start): number for start in range(row, row + rows)})
        return slots

    def _stride(self, rank: int) -> int:
        """Words that one source rank has in the heap of `rank`: whole lines, so that each line has one writer."""
        words = R.WORDS_PER_LINE + len(self._landings(rank))
        return -(-words // R.WORDS_PER_LINE) * R.WORDS_PER_LINE

    def _first_word(self, source: int, rank: int) -> int:
        return source * self._stride(rank)

    def _ghosts(self, index: int, op: Row) -> list[Ghost]:
        tensor = self.tables.boxes(op)[1].tensor
        cols = self.tables.tensors[tensor].cols
        slots = self._slots(self.rank)
        found = []
        for source in range(self.tables.ranks):
            if source == self.rank:
                continue
            for order, (peer, group, _, row, rows) in enumerate(self._put_tiles(index, op, source)):
                if peer == self.rank:
                    slot = self._first_word(source, self.rank) + R.WORDS_PER_LINE + slots[index, group, row]
                    found.append(Ghost(index, source, order, tensor, (row, rows, 0, cols), slot))
        return found

    # ---- dependencies --------------------------------------------------------------------------------------------

    def _order(self, index: int, op: Row, first: int) -> None:
        """Make the op's tasks wait for all earlier accesses that overlap theirs, then enter theirs in the histories."""
        ghosts = self._ghosts(index, op) if op.route and self.tables.ranks > 1 else []
        ready: dict[tuple[int, bool, tuple[Box, ...]], list[tuple[int, int] | Ghost]] = {}
        for task_id in range(first, len(self.tasks)):
            task = self.tasks[task_id]
            touched: dict[tuple[int, bool], list[Box]] = {}
            for tensor, rank, box, written in task.accesses:
                if rank == self.rank:
                    touched.setdefault((self.tables.tensors[tensor].storage, written), []).append(box)
            for (storage, written), boxes in touched.items():
                key = (storage, written, tuple(boxes))
                if key not in ready:
                    ready[key] = self._event(storage, written, boxes)
                for wait in ready[key]:
                    if wait not in task.waits:
                        task.waits.append(wait)  # type: ignore[arg-type]  # ghosts become events in _close_events
            if op.route and task.peer != self.rank:
                task.waits.append(("credit", task.peer))  # type: ignore[arg-type]
        for storage in {self.tables.tensors[box.tensor].storage for box in self.tables.boxes(op) if box.write}:
            self.histories[storage] = History(ghosts=list(ghosts))
        for task_id in range(first, len(self.tasks)):
            for tensor, rank, box, written in self.tasks[task_id].accesses:
                if rank == self.rank:
                    history = self.histories[self.tables.tensors[tensor].storage]
                    (history.writers if written else history.readers).append((box, task_id))
        self.ghosts.extend(ghosts)

    def _event(self, storage: int, written: bool, boxes: list[Box]) -> list[tuple[int, int] | Ghost]:
        """What a task that touches `boxes` must wait for: one local event at most, and the ghosts that land there."""
        history = self.histories[storage]
        earlier = history.writers + (history.readers if written else [])
        producers = sorted({task for box, task in earlier if any(_overlap(box, mine) for mine in boxes)})
        waits: list[tuple[int, int] | Ghost] = []
        if producers:
            event = len(self.events)
            row, col = min(box[0] for box in boxes), min(box[2] for box in boxes)
            rows = max(box[0] + box[1] for box in boxes) - row
            cols = max(box[2] + box[3] for box in boxes) - col
            op = self.tasks[producers[0]].op
            self.events.append([len(producers), self.rank, R.NONE, op, 0, storage, row, rows, col, cols])
            for task in producers:
                self.tasks[task].signals.append((self.rank, event))
            waits.append((event, len(producers)))
        landing = [ghost for ghost in history.ghosts if any(_overlap(ghost.box, mine) for mine in boxes)]
        waits.extend(sorted(landing, key=lambda ghost: ghost.slot))
        return waits

    def _close_events(self) -> None:
        """Number the events of other ranks (by slot) after the local ones, and let waits name them."""
        self.local_events = len(self.events)
        numbers: dict[int | tuple[str, int], int] = {}
        for ghost in sorted(self.ghosts, key=lambda ghost: ghost.slot):
            numbers[ghost.slot] = len(self.events)
            self.events.append([1, ghost.source, ghost.slot, ghost.op, ghost.order, ghost.tensor, *ghost.box])
        if self.routed:
            for peer in range(self.tables.ranks):
                if peer != self.rank:
                    numbers["credit", peer] = len(self.events)
                    slot = self._first_word(peer, self.rank)
                    self.events.append([1, peer, slot, R.NONE, 0, R.NONE, 0, 0, 0, 0])
        for task in self.tasks:
            # A credit is due from the launch before: nothing is added to this launch's base.
            task.waits = [
                (numbers[wait.slot], 1)
                if isinstance(wait, Ghost)
                else (numbers[wait], 0)  # type: ignore[index]
                if wait[0] == "credit"
                else wait
                for wait in task.waits
            ]

    # ---- records -------------------------------------------------------------------------------------------------

    def _records(self) -> TileProgram:
        tasks = np.zeros(len(self.tasks), R.TASK)
        accesses: list[tuple[int, ...]] = []
        waits: list[tuple[int, int]] = []
        signals: list[tuple[int, int]] = []
        for record, task in zip(tasks, self.tasks, strict=True):
            record["op"], record["number"], record["group"], record["peer"] = (
                task.op,
                task.number,
                task.group,
                task.peer,
            )
            record["access_begin"], record["access_count"] = len(accesses), len(task.accesses)
            record["wait_begin"], record["wait_count"] = len(waits), len(task.waits)
            record["signal_begin"], record["signal_count"] = len(signals), len(task.signals)
            record["cost_ns"] = min(task.cost, R.NONE)
            accesses.extend((tensor, rank, *box) for tensor, rank, box, _ in task.accesses)
            waits.extend(task.waits)
            # A put's signal to its peer comes last, after the signals to this rank's own tasks.
            signals.extend(sorted(task.signals, key=lambda signal: (signal[0] != self.rank, signal[1])))
        return TileProgram(
            rank=self.rank,
            ranks=self.tables.ranks,
            ops=np.array([(o.kernel, o.kind, o.dtype, o.read_boxes, o.hop, o.route) for o in self.tables.ops], R.OP),
            tensors=self._tensors(),
            tasks=tasks,
            accesses=np.array(accesses, R.ACCESS),
            waits=np.array(waits, R.WAIT),
            signals=np.array(signals, R.SIGNAL),
            events=np.array([tuple(event) for event in self.events], R.EVENT),
            peers=self._peers(),
            costs=np.array([task.cost for task in self.tasks], np.int64),
            local_events=self.local_events,
            tiles=np.array(self.tiles, np.int64).reshape(-1, 2),
        )

    def _tensors(self) -> R.Records:
        offsets = {R.ROLES["workspace"]: 0, R.ROLES["symmetric"]: 0}
        records = np.zeros(len(self.tables.tensors), R.TENSOR)
        symmetric = R.ROLES["symmetric"]
        for index, (record, tensor) in enumerate(zip(records, self.tables.tensors, strict=True)):
            rows = self._tensor_rows(index, self.rank)
            record["dtype"], record["role"], record["storage"] = tensor.dtype, tensor.role, tensor.storage
            record["rows"], record["cols"] = rows, tensor.cols
            if tensor.role in offsets:
                if tensor.storage == index:
                    record["offset"] = offsets[tensor.role]
                    if tensor.role == symmetric:  # the same offsets on every rank: room for the rank with most rows
                        rows = max(self._tensor_rows(index, rank) for rank in range(self.tables.ranks))
                    size = rows * tensor.cols * tensor.item_bytes
                    offsets[tensor.role] += -(-size // R.ALIGNMENT) * R.ALIGNMENT
                else:
                    record["offset"] = records[tensor.storage]["offset"]
        return records

    def _peers(self) -> R.Records:
        if not self.routed:
            return np.zeros(self.tables.ranks, R.PEER)
        world = self.tables.ranks
        strides = [self._stride(peer) for peer in range(world)]
        return np.array([(self.rank * stride, world * stride) for stride in strides], R.PEER)


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1] and a[2] < b[2] + b[3] and b[2] < a[2] + a[3]
