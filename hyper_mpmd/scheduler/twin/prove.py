"""The proof, the obvious way: run two launches with real counters, remember all ancestors of every task, compare every
access with every other. Slow, and with nothing in common with the native prover but what a plan means."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import Access, Finding, Race, Signal, Standing, host_reads
from hyper_mpmd.scheduler.records import DTYPES, MAX_THRESHOLD, NONE, ROLES, Records
from hyper_mpmd.scheduler.twin.hops import hops
from hyper_mpmd.tasks.tensor import ITEM_BYTES

_ITEM_BYTES = [ITEM_BYTES[name] for name in sorted(DTYPES, key=DTYPES.__getitem__)]
_Event = tuple[int, int]  # rank, number
_Task = tuple[int, int]  # rank, number


@dataclass
class _World:
    """The plans by rank, and what their records say, in plain lists."""

    plans: dict[int, Plan]
    whole: bool
    waits: dict[_Task, list[tuple[int, int]]] = field(default_factory=dict)  # event, threshold
    signals: dict[_Task, list[_Event]] = field(default_factory=dict)
    credits: dict[_Event, list[int]] = field(default_factory=dict)  # ranks whose credit the event counts
    signallers: dict[_Event, list[_Task]] = field(default_factory=dict)

    def event(self, event: _Event) -> Records:
        found: Records = self.plans[event[0]].sections["events"][event[1]]
        return found

    def threshold(self, event: _Event) -> int:
        return int(self.event(event)["threshold"])

    def remote(self, event: _Event) -> bool:
        return int(self.event(event)["slot"]) != NONE

    def sources(self, event: _Event) -> set[int]:
        return {rank for rank, _ in self.signallers.get(event, [])} | set(self.credits.get(event, []))

    def arrivals(self, rank: int) -> list[_Event]:
        """The events of what peers put on this rank, for which its host waits as well."""
        if not self.whole:
            return []
        events = self.plans[rank].sections["events"]
        puts = (events["slot"] != NONE) & (events["op"] != NONE)
        return [(rank, int(number)) for number in np.flatnonzero(puts)]

    @cached_property
    def waits_for_some(self) -> dict[_Task, list[tuple[_Event, int]]]:
        """For tasks that wait for a part of the signals of an event which one rank signals: the event, and how many."""
        found: dict[_Task, list[tuple[_Event, int]]] = {}
        for (rank, task), waits in self.waits.items():
            for number, need in waits:
                event = (rank, number)
                part = 0 < need < self.threshold(event)
                if part and len(self.sources(event)) == 1 and self.signallers.get(event):
                    found.setdefault((rank, task), []).append((event, need))
        return found

    def dispatched(self, rank: int) -> bool:
        launches = self.plans[rank].sections["launches"]
        return len(launches) != 1 or int(launches["op"][0]) != NONE

    def queues(self, rank: int) -> Iterator[tuple[int, range]]:
        for number, queue in enumerate(self.plans[rank].sections["queues"]):
            yield number, range(int(queue["begin"]), int(queue["begin"]) + int(queue["count"]))


def find(plans: Sequence[Plan]) -> Finding:
    """What is wrong, if anything, with one plan or with all plans of a world."""
    world = _World({plan.rank: plan for plan in plans}, len(plans) == plans[0].ranks)
    if record := _boxes(world):
        return Finding(record=record)
    if signal := _count(world):
        return Finding(signal=signal)
    run = _Run(world)
    if circle := run.stuck():
        return Finding(circle=circle)
    race, pairs = _races(world, run)
    if race is not None:
        return Finding(race=race)
    sections = [plan.sections for plan in plans]
    tasks = sum(len(s["tasks"]) for s in sections)
    edges = sum(len(s[name]) for s in sections for name in ("waits", "signals", "dependencies"))
    chains = sum(int(np.count_nonzero(s["queues"]["count"])) for s in sections)
    counts = (chains, tasks, sum(len(s["events"]) for s in sections), edges + tasks - chains,
              sum(len(s["accesses"]) for s in sections), pairs, 0)  # fmt: skip
    return Finding(counts=counts, hops="" if world.whole else hops(plans[0]))


# ---- records and signals -----------------------------------------------------------------------------------------


def _boxes(world: _World) -> str:
    for rank, plan in world.plans.items():
        for number, box in enumerate(plan.sections["accesses"]):
            owner = world.plans.get(int(box["rank"]))
            if owner is None:
                continue
            tensor = owner.sections["tensors"][int(box["tensor"])]
            if int(box["row"]) + int(box["rows"]) > int(tensor["rows"]) or int(box["col"]) + int(box["cols"]) > int(
                tensor["cols"]
            ):
                return f"rank {rank}: box {number} lies outside its tensor"
        if (plan.sections["events"]["threshold"] > MAX_THRESHOLD).any():
            return f"rank {rank}: a threshold is past {MAX_THRESHOLD}"
    return ""


def _count(world: _World) -> Signal | None:
    words: dict[_Event, int] = {}  # (rank, word) -> event
    for rank, plan in world.plans.items():
        for number, event in enumerate(plan.sections["events"]):
            if int(event["slot"]) == NONE:
                continue
            if (rank, int(event["slot"])) in words:
                return Signal("shared", rank, number, rank, NONE, words[rank, int(event["slot"])], 0)
            words[rank, int(event["slot"])] = number
    for rank, plan in world.plans.items():
        for number, task in enumerate(plan.tasks):
            waits = plan.sections["waits"][task["wait_begin"] :][: task["wait_count"]]
            world.waits[rank, number] = [(int(wait["event"]), int(wait["threshold"])) for wait in waits]
            sent = world.signals[rank, number] = []
            for signal in plan.sections["signals"][task["signal_begin"] :][: task["signal_count"]]:
                peer, event = int(signal["rank"]), int(signal["event"])
                if peer not in world.plans:
                    continue
                if peer != rank and (peer, event) not in words:
                    return Signal("uncounted", peer, event, rank, number, 0, 0)
                target = (peer, event if peer == rank else words[peer, event])
                sent.append(target)
                world.signallers.setdefault(target, []).append((rank, number))
        if not world.whole:
            continue
        for peer, other in world.plans.items():
            if peer == rank or int(other.sections["peers"]["heap_words"][peer]) == 0:
                continue
            word = int(plan.sections["peers"]["credit_slot"][peer])
            if (peer, word) not in words:
                return Signal("uncounted", peer, word, rank, NONE, 0, 0)
            world.credits.setdefault((peer, words[peer, word]), []).append(rank)
    for (rank, task), pairs in world.waits.items():
        for event, need in pairs:
            record = world.event((rank, event))
            if need > int(record["threshold"]):
                return Signal("too much", rank, event, rank, task, int(record["threshold"]), need)
            credit = world.remote((rank, event)) and int(record["op"]) == NONE
            if need and (credit or world.credits.get((rank, event))):
                return Signal("own credit", rank, event, rank, task, 0, 0)
    for rank, plan in world.plans.items():
        for number in range(len(plan.sections["events"])):
            found = (rank, number)
            if world.remote(found) and not world.whole:
                continue
            have = len(world.signallers.get(found, [])) + len(world.credits.get(found, []))
            if have != world.threshold(found):
                return Signal("count", rank, number, rank, NONE, have, world.threshold(found))
    return None


# ---- order -------------------------------------------------------------------------------------------------------

LAUNCHES = 2


class _Run:
    """Two launches, run in some order that counters allow. before[launch, rank, task]: a bit for each task that has
    surely ended when it starts. Task NONE is the host's part at the end of the rank's launch. without: leave this task
    out, and whatever never runs then.
    """

    def __init__(self, world: _World, without: tuple[int, int, int] | None = None) -> None:
        self.world, self.without = world, without
        self.bit: dict[tuple[int, int, int], int] = {}
        for launch in range(LAUNCHES):
            for rank, plan in world.plans.items():
                for task in [*range(len(plan.tasks)), NONE]:
                    self.bit[launch, rank, task] = 1 << len(self.bit)
        self.before: dict[tuple[int, int, int], int] = {}
        self.count: Counter[_Event] = Counter()
        self.launch = dict.fromkeys(world.plans, 0)
        self.head: dict[tuple[int, int], int] = {}  # (rank, queue) -> the next task
        self.ended = {(-1, rank): 0 for rank in world.plans}  # (launch, rank) -> its tasks and all before them
        for rank in world.plans:
            self._enter(rank)
        # A task that waits for a part of an event's signals comes after all others that can come before it, for they
        # say what it has surely seen. Where two such tasks would wait for each other, one goes on.
        self.runs_without: dict[tuple[int, int, int], _Run] = {}
        self.patient = without is None
        while True:
            if max([self._step(rank) for rank in world.plans]):  # all of them, hence no `any`
                continue
            if not self.patient:
                break
            self.patient = False

    def _enter(self, rank: int) -> None:
        for queue, tasks in self.world.queues(rank):
            self.head[rank, queue] = tasks.start

    def _step(self, rank: int) -> bool:
        """Run what can be run now; true if anything was."""
        moved = False
        while self.launch[rank] < LAUNCHES:
            ran = False
            for queue, tasks in self.world.queues(rank):
                while self.head[rank, queue] < tasks.stop and self._may_start(rank, self.head[rank, queue]):
                    self._execute(rank, self.head[rank, queue], tasks)
                    self.head[rank, queue] += 1
                    ran = True
            if self._may_leave(rank):
                self._leave(rank)
                ran = True
            if not ran:
                break
            moved = True
        return moved

    def _may_leave(self, rank: int) -> bool:
        if (self.launch[rank], rank, NONE) == self.without:
            return False
        if any(self.head[rank, queue] < tasks.stop for queue, tasks in self.world.queues(rank)):
            return False
        return all(self.met(event, self.world.threshold(event)) for event in self.world.arrivals(rank))

    def _leave(self, rank: int) -> None:
        launch = self.launch[rank]
        done = 0
        earlier = [(rank, task) for task in range(len(self.world.plans[rank].tasks))]
        for event in self.world.arrivals(rank):
            if len(self.world.sources(event)) == 1:
                earlier.extend(self.world.signallers.get(event, []))
        for source, task in earlier:
            done |= self.before[launch, source, task] | self.bit[launch, source, task]
        self.before[launch, rank, NONE] = done
        self.ended[launch, rank] = done | self.bit[launch, rank, NONE]
        for event, ranks in self.world.credits.items():
            self.count[event] += ranks.count(rank)
        self.launch[rank] += 1
        self._enter(rank)

    def launches_before(self, rank: int, task: int) -> list[int]:
        """Tasks that must have ended before the launch of this one is open."""
        if not self.world.dispatched(rank):
            return []
        plan = self.world.plans[rank]
        launch = plan.sections["launches"][int(plan.tasks["launch"][task])]
        dependencies = plan.sections["dependencies"][launch["dependency_begin"] :][: launch["dependency_count"]]
        return [int(t) for t in np.flatnonzero(np.isin(plan.tasks["launch"], dependencies))]

    def has_run(self, rank: int, task: int) -> bool:
        return (self.launch[rank], rank, task) in self.before

    def have(self, event: _Event) -> int:
        """Signals of this launch, as the waiting rank counts them."""
        return self.count[event] - self.launch[event[0]] * self.world.threshold(event)

    def _may_start(self, rank: int, task: int) -> bool:
        if (self.launch[rank], rank, task) == self.without:
            return False
        if not all(self.has_run(rank, other) for other in self.launches_before(rank, task)):
            return False
        if not all(self.met((rank, event), need) for event, need in self.world.waits[rank, task]):
            return False
        return not (self.patient and self._others_to_come(rank, task))

    def met(self, event: _Event, need: int) -> bool:
        taken_to_arrive = self.world.remote(event) and not self.world.whole
        return taken_to_arrive or self.have(event) >= need

    def _coming_without(self, rank: int, task: int, event: _Event) -> list[_Task]:
        """Those of an event's signallers that run even if this task does not."""
        key = (self.launch[rank], rank, task)
        if key not in self.runs_without:
            self.runs_without[key] = _Run(self.world, without=key)
        ran = self.runs_without[key].before
        return [other for other in self.world.signallers[event] if (key[0], *other) in ran]

    def _others_to_come(self, rank: int, task: int) -> bool:
        """Whether signals of which the task waits for a part can still come without it."""
        return any(
            not self.has_run(*other)
            for event, _ in self.world.waits_for_some.get((rank, task), [])
            for other in self._coming_without(rank, task, event)
        )

    def _seen_by_some(self, rank: int, task: int, event: _Event, need: int) -> int:
        """What has surely ended once `need` of the signals have come: what too few of them come without."""
        launch = self.launch[rank]
        coming = [(launch, *other) for other in self._coming_without(rank, task, event)]
        seen = [self.before[key] | self.bit[key] for key in coming if key in self.before]
        unknown = len(coming) - len(seen)
        sure = 0
        for bit in self.bit.values():
            if unknown + sum(not bits & bit for bits in seen) < need:
                sure |= bit
        return sure

    def _execute(self, rank: int, task: int, queue: range) -> None:
        launch = self.launch[rank]
        sure = self.ended[launch - 1, rank]
        earlier = [(rank, other) for other in self.launches_before(rank, task)]
        if task > queue.start:
            earlier.append((rank, task - 1))
        for number, need in self.world.waits[rank, task]:
            event = (rank, number)
            if self.world.remote(event) and not self.world.whole:
                continue
            sources = self.world.sources(event)
            if len(sources) != 1:
                continue  # signals of two ranks may be of two launches
            (source,) = sources
            credit = bool(self.world.credits.get(event))
            if self.world.remote(event) and credit == (need == 0):
                sure |= self.ended.get((launch - 1, source), 0)
            if need == self.world.threshold(event):
                earlier.extend(self.world.signallers.get(event, []))
        for other in earlier:
            key = (launch, *other)
            sure |= self.before[key] | self.bit[key]
        if self.without is None:
            for event, need in self.world.waits_for_some.get((rank, task), []):
                sure |= self._seen_by_some(rank, task, event, need)
            self.patient = True
        self.before[launch, rank, task] = sure
        for event in self.world.signals[rank, task]:
            self.count[event] += 1

    # Where it got stuck.

    def stuck(self) -> tuple[Standing, ...]:
        """The shortest circle of queues that stand, if any does."""
        standing: dict[tuple[int, int], tuple[Standing, list[_Task]]] = {}
        place: dict[_Task, tuple[int, int]] = {}
        for rank in self.world.plans:
            if self.launch[rank] == LAUNCHES:
                continue
            for queue, tasks in self.world.queues(rank):
                for task in range(self.head[rank, queue], tasks.stop):
                    place[rank, task] = (rank, queue)
                if self.head[rank, queue] < tasks.stop:
                    standing[rank, queue] = self._standing(rank, queue, self.head[rank, queue])
        best: list[tuple[tuple[int, int], _Task]] = []
        for start in standing:
            path = self._circle_from(start, standing, place)
            if path and (not best or len(path) < len(best)):
                best = path
        return tuple(standing[queue][0]._replace(signaller_rank=rank, signaller=task) for queue, (rank, task) in best)

    def _standing(self, rank: int, queue: int, task: int) -> tuple[Standing, list[_Task]]:
        closed = [other for other in self.launches_before(rank, task) if not self.has_run(rank, other)]
        if closed:
            return Standing(rank, queue, task, NONE, 0, 0, rank, NONE), [(rank, other) for other in closed]
        event, need = next(w for w in self.world.waits[rank, task] if not self.met((rank, w[0]), w[1]))
        due = [other for other in self.world.signallers.get((rank, event), []) if not self.has_run(*other)]
        return Standing(rank, queue, task, event, self.have((rank, event)), need, rank, NONE), due

    @staticmethod
    def _circle_from(
        start: tuple[int, int],
        standing: dict[tuple[int, int], tuple[Standing, list[_Task]]],
        place: dict[_Task, tuple[int, int]],
    ) -> list[tuple[tuple[int, int], _Task]]:
        paths: deque[list[tuple[tuple[int, int], _Task]]] = deque([[]])
        seen = set()
        while paths:
            path = paths.popleft()
            queue = place[path[-1][1]] if path else start
            if path and queue == start:
                return path
            if queue in seen:
                continue
            seen.add(queue)
            for task in standing[queue][1]:
                if task in place:
                    paths.append([*path, (queue, task)])
        return []


# ---- races -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Touch:
    rank: int
    task: int
    box: tuple[int, ...]  # tensor, rank, row, rows, col, cols
    written: bool
    bytes: tuple[tuple[int, int], ...]

    def meets(self, other: _Touch) -> bool:
        if self.bytes[0][0] >= other.bytes[-1][1] or other.bytes[0][0] >= self.bytes[-1][1]:
            return False
        return any(a < d and c < b for a, b in self.bytes for c, d in other.bytes)


def _touches(world: _World) -> dict[tuple[int, int, int], list[_Touch]]:
    """By memory."""
    found: dict[tuple[int, int, int], list[_Touch]] = {}
    for rank, plan in world.plans.items():
        for number, task in enumerate(plan.tasks):
            reads = int(plan.sections["ops"]["read_count"][int(task["op"])])
            boxes = plan.sections["accesses"][task["access_begin"] :][: task["access_count"]]
            for place, box in enumerate(boxes):
                tensor, owner, row, rows, col, cols = (int(n) for n in box.tolist())
                if owner not in world.plans or not rows or not cols:
                    continue
                record = world.plans[owner].sections["tensors"][tensor]
                role = int(record["role"])
                if role == ROLES["input"]:
                    continue
                lines = _lines(record, row, rows, col, cols)
                storage = int(record["storage"]) if role == ROLES["output"] else 0
                found.setdefault((owner, role, storage), []).append(
                    _Touch(rank, number, (tensor, owner, row, rows, col, cols), place >= reads, lines)
                )
        for tensor in host_reads(plan) if world.whole else []:
            record = plan.sections["tensors"][tensor]
            rows, cols = int(record["rows"]), int(record["cols"])
            if rows and cols:
                found.setdefault((rank, ROLES["symmetric"], 0), []).append(
                    _Touch(rank, NONE, (tensor, rank, 0, rows, 0, cols), False, _lines(record, 0, rows, 0, cols))
                )
    return found


def _lines(record: Records, row: int, rows: int, col: int, cols: int) -> tuple[tuple[int, int], ...]:
    """The bytes of each row of a box, from the start of the memory."""
    item = _ITEM_BYTES[int(record["dtype"])]
    line = int(record["cols"]) * item
    begins = [int(record["offset"]) + r * line + col * item for r in range(row, row + rows)]
    return tuple((begin, begin + cols * item) for begin in begins)


def _races(world: _World, run: _Run) -> tuple[Race | None, int]:
    """Any two touches of the same bytes, one writing: in one launch, or the first in one and the second in the next."""
    pairs = 0
    for touches in _touches(world).values():
        for i, a in enumerate(touches):
            for b in touches[i:]:
                if not (a.written or b.written) or not a.meets(b):
                    continue
                pairs += 1
                here, there = (0, a.rank, a.task), (0, b.rank, b.task)
                if here != there and not (run.before[there] & run.bit[here] or run.before[here] & run.bit[there]):
                    return _race(a, b, False), pairs
                for first, second in ((a, b), (b, a)):
                    if not run.before[1, second.rank, second.task] & run.bit[0, first.rank, first.task]:
                        return _race(first, second, True), pairs
    return None, pairs


def _race(first: _Touch, second: _Touch, next_launch: bool) -> Race:
    tensor, owner, row, rows, col, cols = second.box
    if first.box[0] == tensor:
        end_row, end_col = min(row + rows, sum(first.box[2:4])), min(col + cols, sum(first.box[4:6]))
        row, col = max(row, first.box[2]), max(col, first.box[4])
        rows, cols = end_row - row, end_col - col
    return Race(
        Access(first.rank, first.task, first.box[0], first.written),
        Access(second.rank, second.task, tensor, second.written),
        next_launch,
        owner,
        row,
        rows,
        col,
        cols,
    )
