"""Lowering, the obvious way: enumerate tiles, compare boxes pairwise, an event for each set of tasks to wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import PlanLimitError
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.descriptor import AXES, Descriptor
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.policies import Policy
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.scheduler.twin.landing import Landings
from hyper_mpmd.scheduler.twin.layout import Layout, Row, Tables
from hyper_mpmd.scheduler.twin.tiling import COL_UNIT, ROW_UNIT, choose_tiles, even_cut, slabs, tile_cost

Box = tuple[int, int, int, int]  # row, rows, col, cols


@dataclass
class Event:
    """ "These tasks are done", and the hull of the boxes that its waiters touch."""

    producers: list[int]
    op: int
    storage: int
    hull: Box


@dataclass(frozen=True)
class Ghost:
    """An event that another rank signals here: rows were put, rows may be pulled (op: the one that made them), or a
    reader has pulled all that it needs. order: how far along it is with its tasks of the op when it signals."""

    op: int
    source: int
    order: int
    tensor: int
    box: Box
    slot: int
    threshold: int = 1


@dataclass(frozen=True)
class Credit:
    """Leave of a peer to write into its memory: due from the launch before."""

    peer: int


@dataclass
class TileTask:
    op: int
    number: int
    group: int
    peer: int
    cost: int
    accesses: list[tuple[int, int, Box, bool]]  # tensor, rank, box, written
    waits: list[int | Ghost | Credit] = field(default_factory=list)  # an int is the index of a local event
    peer_signals: list[tuple[int, int]] = field(default_factory=list)  # peer, word in its heap


@dataclass
class History:
    """Who touched a storage since it was last written as a whole, and the events made of that."""

    writers: list[tuple[Box, int]] = field(default_factory=list)
    ghosts: list[Ghost] = field(default_factory=list)  # rows that other ranks put there
    takers: list[Ghost] = field(default_factory=list)  # rows that other ranks pull from there
    readers: list[tuple[Box, int]] = field(default_factory=list)
    events: dict[tuple[int, ...], int] = field(default_factory=dict)  # producers -> index of the event


def lower(
    descriptor: Descriptor,
    loads: Mapping[int, NDArray[np.int64]],
    device: Device,
    policy: Policy,
    ranks: list[int],
    given_tiles: dict[int, tuple[int, int]],
) -> list[TileProgram]:
    """Cut every op into tiles for each of `ranks` and derive what each tile waits for."""
    tables = Tables.of(descriptor)
    layout = Layout(tables, loads)
    tiles = choose_tiles(tables, layout, device, given_tiles)
    landings = Landings(tables, layout, tiles, policy)
    return [_Lowering(tables, layout, landings, device, policy, rank).program() for rank in ranks]


class _Lowering:
    def __init__(
        self, tables: Tables, layout: Layout, landings: Landings, device: Device, policy: Policy, rank: int
    ) -> None:
        self.tables, self.layout, self.landings = tables, layout, landings
        self.device, self.policy, self.rank = device, policy, rank
        self.tiles = landings.tiles
        self.tasks: list[TileTask] = []
        self.events: list[Event] = []
        self.histories = [History() for _ in self.tables.tensors]
        self.ghosts: list[Ghost] = []

    def program(self) -> TileProgram:
        tensors = self.layout.tensor_records(self.rank)
        self._check_size()
        for index, op in enumerate(self.tables.ops):
            first = len(self.tasks)
            self.tasks.extend(self._travels(index, op) if op.route else self._grid(index, op))
            self._order(index, op, first)
        return self._records(tensors)

    # ---- tiles ---------------------------------------------------------------------------------------------------

    def _check_size(self) -> None:
        """Refuse what no index can number, before it is made."""
        total = 0
        for index, op in enumerate(self.tables.ops):
            if op.route:
                count = self.landings.count(index, self.rank)
            else:
                tile_rows, tile_cols = self.tiles[index]
                across = -(-op.cols_value // even_cut(op.cols_value, tile_cols, COL_UNIT))
                count = sum(
                    across * -(-slab.rows // even_cut(slab.rows, tile_rows, ROW_UNIT))
                    for slab in slabs(self.tables, self.layout, op, self.rank)
                )
            total += count
            if total > R.MAX_INDEX:
                name = self.tables.op_names[index]
                raise PlanLimitError(
                    f"task {name!r} has {count} tiles on rank {self.rank}, which makes {total}; the limit is "
                    f"{R.MAX_INDEX}; take larger tiles"
                )

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
        height = tensor.block_rows if box.group else self.layout.tensor_rows(box.tensor, self.rank)
        row, rows = reach.get(box.rows_axis, (0, height))
        col, cols = reach.get(box.cols_axis, (0, tensor.cols))
        if box.group:
            row += group * tensor.block_rows
        if box.shift:
            col += box.shift * {1: op.rows_value, 2: op.cols_value, 3: op.reduction_value}[box.cols_axis]
        return row, rows, col, cols

    def _travels(self, index: int, op: Row) -> Iterator[TileTask]:
        """The tasks of a communication op: a put runs where the rows lie, a pull where they go."""
        source, target = self.tables.boxes(op)
        cols = self.tables.tensors[source.tensor].cols
        for number, tile in enumerate(self.landings.tiles_of(index, self.rank)):
            peer = tile.source if op.pull else tile.target
            task = TileTask(
                index,
                number,
                tile.group,
                peer,
                tile_cost(self.tables, self.device, op, tile.rows, 1, 1),
                [
                    (source.tensor, tile.source, (tile.source_row, tile.rows, 0, cols), False),
                    (target.tensor, tile.target, (tile.target_row, tile.rows, 0, cols), True),
                ],
            )
            if peer != self.rank:
                slots = self.landings
                word = slots.taken_slot(index, self.rank, peer) if op.pull else slots.slot(index, tile)
                task.peer_signals.append((peer, word))
            yield task

    def _landed(self, index: int, op: Row) -> list[Ghost]:
        """The puts of other ranks that land here, in order of their event words."""
        tensor = self.tables.boxes(op)[1].tensor
        cols = self.tables.tensors[tensor].cols
        found = [
            Ghost(index, source, order, tensor, (put.target_row, put.rows, 0, cols), self.landings.slot(index, put))
            for source in range(self.tables.ranks)
            if source != self.rank
            for order, put in enumerate(self.landings.tiles_of(index, source))
            if put.target == self.rank
        ]
        return sorted(found, key=lambda ghost: ghost.slot)

    def _ready(self, index: int, op: Row) -> list[Ghost]:
        """Rows of other ranks that this one pulls: each row tile is ready when the tasks that write it are done."""
        tensor = self.tables.boxes(op)[1].tensor
        cols = self.tables.tensors[tensor].cols
        found = []
        for source in range(self.tables.ranks):
            tiles = self.landings.between(index, source, self.rank) if source != self.rank else []
            writer, rows_of = self._makers(index, op, source) if tiles else (0, [])
            for tile in tiles:
                makers = [
                    number
                    for number, (row, rows) in enumerate(rows_of)
                    if max(row, tile.source_row) < min(row + rows, tile.source_row + tile.rows)
                ]
                box = (tile.target_row, tile.rows, 0, cols)
                slot = self.landings.slot(index, tile)
                found.append(Ghost(writer, source, makers[-1], tensor, box, slot, len(makers)))
        return found

    def _makers(self, index: int, op: Row, rank: int) -> tuple[int, list[tuple[int, int]]]:
        """The op that writes what this one pulls, and the rows that each of its tiles on `rank` writes."""
        storage = self.tables.tensors[self.tables.boxes(op)[0].tensor].storage
        for writer in range(index - 1, -1, -1):
            for box in self.tables.boxes(self.tables.ops[writer]):
                if box.write and self.tables.tensors[box.tensor].storage == storage:
                    other = _Lowering(self.tables, self.layout, self.landings, self.device, self.policy, rank)
                    tiles = other._grid(writer, self.tables.ops[writer])
                    boxes = (next(b for t, _, b, w in tile.accesses if w and t == box.tensor) for tile in tiles)
                    return writer, [(row, rows) for row, rows, _, _ in boxes]
        raise PlanLimitError(f"task {self.tables.op_names[index]!r} pulls what no task writes")

    def _takers(self, index: int, op: Row) -> list[Ghost]:
        """The ranks that pull from this one: each says what it has taken."""
        tensor = self.tables.boxes(op)[0].tensor
        box = (0, self.layout.tensor_rows(tensor, self.rank), 0, self.tables.tensors[tensor].cols)
        found = []
        for reader in range(self.tables.ranks):
            count = len(self.landings.between(index, self.rank, reader)) if reader != self.rank else 0
            if count:
                slot = self.landings.taken_slot(index, reader, self.rank)
                found.append(Ghost(index, reader, count - 1, tensor, box, slot, count))
        return found

    # ---- dependencies --------------------------------------------------------------------------------------------

    def _order(self, index: int, op: Row, first: int) -> None:
        """Make the op's tasks wait for all earlier accesses that overlap theirs, then enter theirs in the histories."""
        routed, pull = index in self.landings.routed, bool(op.pull)
        ghosts = self._landed(index, op) if routed and not pull else []
        ready = self._ready(index, op) if routed and pull else []
        takers = self._takers(index, op) if routed and pull else []
        ready_at = {ghost.slot: ghost for ghost in ready}
        tiles = iter(self.landings.tiles_of(index, self.rank) if pull else ())
        for task in self.tasks[first:]:
            touched: dict[int, list[tuple[Box, bool]]] = {}
            for operand, (tensor, rank, box, written) in zip(self.tables.boxes(op), task.accesses, strict=True):
                if rank == self.rank:
                    reach = self._reach(operand, box)
                    touched.setdefault(self.tables.tensors[tensor].storage, []).append((reach, written))
            for storage, boxes in touched.items():
                self._wait(task, storage, [box for box, _ in boxes], any(written for _, written in boxes))
            tile = next(tiles, None)
            if task.peer != self.rank:
                task.waits.append(Credit(task.peer) if tile is None else ready_at[self.landings.slot(index, tile)])
        if routed and pull:
            self._tell_readers(index, op)
        for storage in {self.tables.tensors[box.tensor].storage for box in self.tables.boxes(op) if box.write}:
            self.histories[storage] = History(ghosts=ghosts)
        for number, task in enumerate(self.tasks[first:], first):
            for tensor, rank, box, written in task.accesses:
                if rank == self.rank:
                    history = self.histories[self.tables.tensors[tensor].storage]
                    (history.writers if written else history.readers).append((box, number))
        if takers:
            self.histories[self.tables.tensors[self.tables.boxes(op)[0].tensor].storage].takers.extend(takers)
        for events in (ghosts, ready, takers):
            if any(ghost.threshold > R.MAX_THRESHOLD for ghost in events):
                most = max(ghost.threshold for ghost in events)
                raise PlanLimitError(f"{most} tasks would signal one event; the limit is {R.MAX_THRESHOLD}")
            self.ghosts.extend(events)

    def _reach(self, operand: Row, box: Box) -> Box:
        """What a tile with this box waits for: the box, or all rows of the groups that it lies in."""
        space = self.tables.tensors[operand.tensor].space
        if not self.policy.whole_groups or operand.rows_axis != AXES["rows"] or operand.group or space < 0:
            return box
        return (*self.layout.whole_groups(space, self.rank, *box[:2]), *box[2:])

    def _tell_readers(self, index: int, op: Row) -> None:
        """The tasks that made the rows which peers pull signal each row tile there."""
        sent = self.tables.tensors[self.tables.boxes(op)[0].tensor]
        for reader in range(self.tables.ranks):
            for tile in self.landings.between(index, self.rank, reader) if reader != self.rank else ():
                rows = (tile.source_row, tile.rows, 0, sent.cols)
                writers = self.histories[sent.storage].writers
                for task in sorted({task for box, task in writers if _overlap(box, rows)}):
                    self.tasks[task].peer_signals.append((reader, self.landings.slot(index, tile)))

    def _wait(self, task: TileTask, storage: int, boxes: list[Box], written: bool) -> None:
        """Make a task that touches `boxes` wait: for one local event at most, and the puts that land there.

        One that writes also waits for the peers that pull from there. Tasks that wait for the same earlier tasks share
        the event. A task that overwrites what it reads reads no more than it writes, so that its boxes may be taken
        together.
        """
        history = self.histories[storage]
        earlier = history.writers + (history.readers if written else [])
        producers = sorted({task for box, task in earlier if any(_overlap(box, mine) for mine in boxes)})
        if producers:
            event = history.events.setdefault(tuple(producers), len(self.events))
            if event == len(self.events):
                self.events.append(Event(producers, self.tasks[producers[0]].op, storage, boxes[0]))
                if len(producers) > R.MAX_THRESHOLD:
                    raise PlanLimitError(
                        f"{len(producers)} tasks would signal one event; the limit is {R.MAX_THRESHOLD}"
                    )
            self.events[event].hull = _hull([self.events[event].hull, *boxes])
            task.waits.append(event)
        others = history.ghosts + (history.takers if written else [])
        others.sort(key=lambda ghost: ghost.slot)
        task.waits.extend(ghost for ghost in others if any(_overlap(ghost.box, mine) for mine in boxes))

    # ---- records -------------------------------------------------------------------------------------------------

    def _records(self, tensors: R.Records) -> TileProgram:
        events, numbers = self._event_records()
        local: list[list[int]] = [[] for _ in self.tasks]
        for index, event in enumerate(self.events):
            for producer in event.producers:
                local[producer].append(index)
        tasks = np.zeros(len(self.tasks), R.TASK)
        accesses: list[tuple[int, ...]] = []
        waits: list[tuple[int, int]] = []
        signals: list[tuple[int, int]] = []
        for record, task, events_of_task in zip(tasks, self.tasks, local, strict=True):
            record["op"], record["number"], record["group"] = task.op, task.number, task.group
            record["peer"] = task.peer
            record["cost_ns"] = min(task.cost, R.NONE)
            record["access_begin"], record["access_count"] = len(accesses), len(task.accesses)
            accesses.extend((tensor, rank, *box) for tensor, rank, box, _ in task.accesses)
            record["wait_begin"], record["wait_count"] = len(waits), len(task.waits)
            # A credit is due from the launch before: nothing is added to this launch's base.
            waits.extend(
                (wait, len(self.events[wait].producers))
                if isinstance(wait, int)
                else (numbers[wait], wait.threshold if isinstance(wait, Ghost) else 0)
                for wait in task.waits
            )
            # Signals to peers come last, after those to this rank's own tasks.
            record["signal_begin"] = len(signals)
            signals.extend((self.rank, event) for event in events_of_task)
            signals.extend(task.peer_signals)
            record["signal_count"] = len(signals) - int(record["signal_begin"])
        for what, count in (("boxes", accesses), ("waits", waits), ("signals", signals), ("events", events)):
            if len(count) > R.MAX_INDEX:
                raise PlanLimitError(f"rank {self.rank} has {len(count)} {what}; the limit is {R.MAX_INDEX}")
        return TileProgram(
            rank=self.rank,
            ranks=self.tables.ranks,
            ops=self.tables.op_records(),
            tensors=tensors,
            tasks=tasks,
            accesses=np.array(accesses, R.ACCESS),
            waits=np.array(waits, R.WAIT),
            signals=np.array(signals, R.SIGNAL),
            events=np.array(events, R.EVENT),
            peers=self._peers(),
            costs=np.array([task.cost for task in self.tasks], np.int64),
            local_events=len(self.events),
            tiles=np.array(self.tiles, np.int64).reshape(-1, 2),
        )

    def _event_records(self) -> tuple[list[tuple[int, ...]], dict[Ghost | Credit, int]]:
        """The events (local ones, then those of other ranks by their word, then credits) and the latter's numbers."""
        records: list[tuple[int, ...]] = [
            (len(event.producers), self.rank, R.NONE, event.op, 0, event.storage, *event.hull) for event in self.events
        ]
        numbers: dict[Ghost | Credit, int] = {}
        for ghost in sorted(self.ghosts, key=lambda ghost: ghost.slot):
            numbers[ghost] = len(records)
            records.append((ghost.threshold, ghost.source, ghost.slot, ghost.op, ghost.order, ghost.tensor, *ghost.box))
        for peer in range(self.tables.ranks) if self.landings.routed else ():
            if peer != self.rank:
                numbers[Credit(peer)] = len(records)
                slot = self.landings.credit_slot(peer, self.rank)
                records.append((1, peer, slot, R.NONE, 0, R.NONE, 0, 0, 0, 0))
        return records, numbers

    def _peers(self) -> R.Records:
        world = range(self.tables.ranks)
        if not self.landings.routed:
            return np.zeros(len(world), R.PEER)
        slots = [
            (self.landings.credit_slot(self.rank, peer), len(world) * self.landings.stride(peer)) for peer in world
        ]
        return np.array(slots, R.PEER)


def _overlap(a: Box, b: Box) -> bool:
    """Whether two boxes share a point; an empty box shares none."""
    return all(max(a[i], b[i]) < min(a[i] + a[i + 1], b[i] + b[i + 1]) for i in (0, 2))


def _hull(boxes: list[Box]) -> Box:
    row, col = min(box[0] for box in boxes), min(box[2] for box in boxes)
    return row, max(box[0] + box[1] for box in boxes) - row, col, max(box[2] + box[3] for box in boxes) - col
