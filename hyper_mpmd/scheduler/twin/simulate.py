"""The simulation, the obvious way: every transfer knows what it has left, and every moment looks at everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import DTYPES, NONE, Records
from hyper_mpmd.scheduler.simulate import (
    BYTE_PARTS,
    COMM,
    DATA,
    DISPATCH,
    PAGE_COLS,
    PAGE_ROWS,
    SIMULATED,
    gathered_reads,
)
from hyper_mpmd.tasks.tensor import ITEM_BYTES

_ITEM_BYTES = [ITEM_BYTES[name] for name in sorted(DTYPES, key=DTYPES.__getitem__)]
_Task = tuple[int, int]  # rank, number
_Event = tuple[int, int]
_Box = tuple[int, int, int, int, int, int]  # tensor, rank, row, rows, col, cols


@dataclass
class _Server:
    """A memory or a port. All transfers in progress pass at the same rate."""

    rate: int  # bytes a microsecond
    left: list[list[object]] = field(default_factory=list)  # [task, parts of bytes left]
    since: int = 0

    def advance(self, now: int) -> None:
        if self.left:
            passed = (now - self.since) * self.rate * BYTE_PARTS // (1000 * len(self.left))
            for transfer in self.left:
                transfer[1] -= passed  # type: ignore[operator]
        self.since = now

    def next(self) -> int | None:
        if not self.left:
            return None
        least: int = min(transfer[1] for transfer in self.left)  # type: ignore[type-var,assignment]
        return self.since - (-least * 1000 * len(self.left) // (self.rate * BYTE_PARTS))


class _L2:
    def __init__(self, plan: Plan, capacity: int) -> None:
        self.tensors = plan.sections["tensors"]
        self.capacity, self.brought = capacity, 0
        # Bytes there, `brought` at the last use, and the task of this rank that it was
        self.pages: dict[tuple[int, int, int], tuple[int, int, int | None]] = {}
        self.ended: dict[int, int] = {}  # by task: `brought` when it ended

    def bytes(self, box: _Box) -> int:
        return box[3] * box[5] * _ITEM_BYTES[int(self.tensors["dtype"][box[0]])]

    def touch(self, box: _Box, write: bool, user: int | None) -> int:
        """Bytes that the main memory moves. user: a task of this rank; what it uses is held while it runs."""
        tensor, _, row, rows, col, cols = box
        if not rows or not cols:
            return 0
        record = self.tensors[tensor]
        item, moved = _ITEM_BYTES[int(record["dtype"])], 0
        for down in range(row // PAGE_ROWS, (row + rows - 1) // PAGE_ROWS + 1):
            for across in range(col // PAGE_COLS, (col + cols - 1) // PAGE_COLS + 1):
                first, left = down * PAGE_ROWS, across * PAGE_COLS
                high = min(first + PAGE_ROWS, row + rows) - max(first, row)
                wide = min(left + PAGE_COLS, col + cols) - max(left, col)
                whole = min(PAGE_ROWS, int(record["rows"]) - first) * min(PAGE_COLS, int(record["cols"]) - left) * item
                key = (int(record["storage"]), down, across)
                there, used, last = self.pages.get(key, (0, 0, None))
                if last is not None:
                    used = self.ended.get(last, self.brought)
                running = last is not None and last not in self.ended
                if not running and self.brought - used >= self.capacity:
                    there = 0
                bytes_ = high * wide * item
                if not write:
                    bytes_ = min(bytes_, whole - there)
                self.brought += bytes_
                self.pages[key] = (min(whole, there + bytes_), self.brought, user)
                moved += bytes_
        return moved


def _hash(seed: int, rank: int, task: int) -> int:
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + (rank << 32 | task) + 0x632BE59BD9B4E019) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def run(
    plans: Sequence[Plan], device: Device, seed: int, jitter_ppm: int, path: bool
) -> tuple[list[Records], int, int, int]:
    """The records (SIMULATED) of each rank; how many tasks never start, and the rank and number of the first."""
    world = _World(plans, device, seed, jitter_ppm, path)
    while world.moment():
        pass
    stuck = [(rank, task) for rank, queue in world.queues for task in queue]
    return world.records, len(stuck), *(stuck[0] if stuck else (0, 0))


class _World:
    def __init__(self, plans: Sequence[Plan], device: Device, seed: int, jitter_ppm: int, path: bool) -> None:
        self.plans, self.device, self.seed, self.jitter_ppm, self.path = plans, device, seed, jitter_ppm, path
        self.records = [np.zeros(len(plan.tasks), SIMULATED) for plan in plans]
        self.l2 = [_L2(plan, device.l2_bytes) for plan in plans]
        self.servers: dict[tuple[object, ...], _Server] = {}
        self.timers: dict[_Task, int] = {}  # when the core is done
        self.landings: list[tuple[int, _Event]] = []
        self.landed: dict[_Event, list[int]] = {}
        self.words = [
            {
                int(event["slot"]): number
                for number, event in enumerate(plan.sections["events"])
                if event["slot"] != NONE
            }
            for plan in plans
        ]
        self.queues: list[tuple[int, list[int]]] = []
        for plan in plans:
            for queue in plan.sections["queues"]:
                tasks = list(range(int(queue["begin"]), int(queue["begin"]) + int(queue["count"])))
                self.queues += [(plan.rank, [task]) for task in tasks] if path else [(plan.rank, tasks)]
        self.running: list[_Task | None] = [None] * len(self.queues)
        self.free = [0] * len(self.queues)
        self.open: dict[tuple[int, int], int] = {}  # (rank, launch) -> when
        self.unfinished = [{task: int(record["launch"]) for task, record in enumerate(plan.tasks)} for plan in plans]
        self.now = -1

    # ---- one moment ------------------------------------------------------------------------------------------------

    def moment(self) -> bool:
        """Apply what is due next, then start what can start. False if nothing is due."""
        due = [*self.timers.values(), *(at for at, _ in self.landings), *(at for _, at in self._openings())]
        due += [at for server in self.servers.values() if (at := server.next()) is not None]
        if not due:
            return False
        now = self.now = min(due)
        openings = [launch for launch, at in self._openings() if at == now]
        landings = [event for at, event in self.landings if at == now]
        self.landings = [landing for landing in self.landings if landing[0] != now]
        busy = [task for task in self.running if task is not None]
        for task in busy:
            if self.timers.get(task) == now:
                del self.timers[task]
        for server in self.servers.values():
            if server.next() == now:
                server.advance(now)
                server.left = [transfer for transfer in server.left if transfer[1] > 0]  # type: ignore[operator]
        for event in landings:
            self.landed.setdefault(event, []).append(now)
        moving = {transfer[0] for server in self.servers.values() for transfer in server.left}
        for number, running in enumerate(self.running):
            if running is not None and running not in self.timers and running not in moving:
                self._finish(number, running)
        for launch in openings:
            self.open[launch] = now
        for number, (rank, queue) in enumerate(self.queues):
            if queue and self.running[number] is None:
                self._try_start(number, rank, queue)
        return True

    def _openings(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Launches that can open, and when."""
        for rank, plan in enumerate(self.plans):
            for number, launch in enumerate(plan.sections["launches"]):
                before = plan.sections["dependencies"][launch["dependency_begin"] :][: launch["dependency_count"]]
                if (rank, number) in self.open or any(not self._ended(rank, int(other)) for other in before):
                    continue
                host = 0 if self.path else (number + 1) * self.device.launch_ns
                yield (rank, number), max(host, self.now)

    def _ended(self, rank: int, launch: int) -> bool:
        return (rank, launch) in self.open and launch not in self.unfinished[rank].values()

    # ---- tasks -----------------------------------------------------------------------------------------------------

    def _try_start(self, number: int, rank: int, queue: list[int]) -> None:
        plan, task = self.plans[rank], queue[0]
        record = plan.tasks[task]
        opened = self.open.get((rank, int(record["launch"])))
        if opened is None:
            return
        ready, held = opened, DISPATCH
        for wait in plan.sections["waits"][record["wait_begin"] :][: record["wait_count"]]:
            need, event = int(wait["threshold"]), int(wait["event"])
            if need == 0:
                continue
            landed = self.landed.get((rank, event), [])
            if len(landed) < need:
                return
            if landed[need - 1] > ready:
                ready = landed[need - 1]
                held = DATA if plan.sections["events"]["slot"][event] == NONE else COMM
        mine = self.records[rank][task]
        mine["blocked_ns"], mine["ready_ns"], mine["start_ns"], mine["held"] = self.free[number], ready, self.now, held
        del queue[0]
        self.running[number] = (rank, task)
        self._start(rank, task)

    def _start(self, rank: int, task: int) -> None:
        plan = self.plans[rank]
        record = plan.tasks[task]
        op = plan.sections["ops"][record["op"]]
        boxes: list[_Box] = plan.sections["accesses"][record["access_begin"] :][: record["access_count"]].tolist()
        reads, writes = boxes[: int(op["read_count"])], boxes[int(op["read_count"]) :]
        core = int(record["end_ns"]) - int(record["start_ns"])
        if op["route"]:
            bytes_ = sum(self.l2[box[1]].bytes(box) for box in writes)
            core = self.device.task_ns - (-bytes_ * 1000 // self.device.vector_bytes_per_us)
        if self.jitter_ppm:
            core += core * (_hash(self.seed, rank, task) % (self.jitter_ppm + 1)) // 1_000_000
        memory, links = 0, 0
        for number, box in enumerate(reads):
            if box[1] != rank:
                links = max(links, self._across(rank, task, box, False))
            elif not self.path:
                if gathered_reads(plan)[int(record["op"])] >> min(63, number) & 1 and writes:
                    box = self._share(box, writes[0])
                memory += self.l2[rank].touch(box, False, task)
        for box in writes:
            if box[1] != rank:
                links = max(links, self._across(rank, task, box, True))
            elif not self.path:
                memory += self.l2[rank].touch(box, True, task)
        self._transfer(("memory", rank), self.device.memory_bytes_per_us, memory, (rank, task))
        mine = self.records[rank][task]
        mine["core_ns"], mine["memory_bytes"] = core, memory
        self.timers[rank, task] = self.now + max(core, links)

    def _share(self, box: _Box, out: _Box) -> _Box:
        """Rows chosen by data: the tile's share of them, as if they lay in its own order."""
        have = int(self.l2[box[1]].tensors["rows"][box[0]])
        of = max(1, int(self.l2[out[1]].tensors["rows"][out[0]]))
        begin, end = out[2] * have // of, (out[2] + out[3]) * have // of
        return box[0], box[1], begin, end - begin, box[4], box[5]

    def _across(self, rank: int, task: int, box: _Box, written: bool) -> int:
        """A box of another rank, put there or pulled from there. Nanoseconds that the links alone take."""
        peer, bytes_ = box[1], self.l2[box[1]].bytes(box)
        link, port = self.device.link_bytes_per_us, self.device.link_total_bytes_per_us
        if self.path:
            return -(-bytes_ * 1000 // min(link, port))
        me = (rank, task)
        self._transfer(("memory", peer), self.device.memory_bytes_per_us, self.l2[peer].touch(box, written, None), me)
        source, target = (rank, peer) if written else (peer, rank)
        self._transfer(("out", source), port, bytes_, me)
        self._transfer(("in", target), port, bytes_, me)
        if link < port:
            self._transfer(("pair", source, target), link, bytes_, me)
        return 0

    def _transfer(self, name: tuple[object, ...], rate: int, bytes_: int, task: _Task) -> None:
        if bytes_:
            server = self.servers.setdefault(name, _Server(rate))
            server.advance(self.now)
            server.left.append([task, bytes_ * BYTE_PARTS])

    def _finish(self, number: int, task: _Task) -> None:
        rank, index = task
        plan = self.plans[rank]
        self.records[rank][index]["end_ns"] = self.now
        self.l2[rank].ended[index] = self.l2[rank].brought
        self.running[number], self.free[number] = None, self.now
        del self.unfinished[rank][index]
        record = plan.tasks[index]
        for signal in plan.sections["signals"][record["signal_begin"] :][: record["signal_count"]]:
            peer, event = int(signal["rank"]), int(signal["event"])
            if peer == rank:
                self.landings.append((self.now + self.device.event_ns, (rank, event)))
            elif event in self.words[peer]:
                at = self.now + self.device.latency_ns(rank, peer)
                self.landings.append((at, (peer, self.words[peer][event])))
