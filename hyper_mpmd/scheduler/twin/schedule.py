"""Policies, the obvious way: which core runs which tile, in which order.

O1 is list scheduling in time order. Whenever a core is free, it takes the ready task with the longest path to the end;
hop levels go one after another, so that no queue goes down in hop level. What travels between ranks passes a rank's
ports one box after another. O0 gives each op a launch of its own. The published design deals tasks out in turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hyper_mpmd.errors import CycleError, PlanLimitError
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.policies import Policy
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.tasks.tensor import ITEM_BYTES

_ITEM_BYTES = {code: ITEM_BYTES[name] for name, code in R.DTYPES.items()}


@dataclass
class Placement:
    """Where and when each task runs (by its number in the program), and the launches."""

    core: list[tuple[int, int]]  # (pool, core within the pool)
    start: list[int]
    end: list[int]
    order: list[list[list[int]]]  # [pool][core] -> tasks in queue order
    launch: list[int] = field(default_factory=list)
    launches: list[tuple[int, int, list[int], int, int]] = field(default_factory=list)  # op, tasks, deps, start, end


class Flow:
    """The program's events as plain lists: who signals what, who waits for what."""

    def __init__(self, program: TileProgram) -> None:
        tasks = program.tasks
        self.count = len(tasks)
        self.costs = [int(cost) for cost in program.costs]
        self.op = [int(op) for op in tasks["op"]]
        self.hop = [int(hop) for hop in program.ops["hop"]]
        self.local_events = program.local_events
        self.thresholds = [int(n) for n in program.events["threshold"]]
        self.waits = [
            [(int(w["event"]), int(w["threshold"])) for w in program.waits[t["wait_begin"] :][: t["wait_count"]]]
            for t in tasks
        ]
        self.signals = [
            [
                int(s["event"])
                for s in program.signals[t["signal_begin"] :][: t["signal_count"]]
                if s["rank"] == program.rank and int(s["event"]) < program.local_events
            ]
            for t in tasks
        ]
        self.remote = [
            [
                int(s["rank"])
                for s in program.signals[t["signal_begin"] :][: t["signal_count"]]
                if s["rank"] != program.rank
            ]
            for t in tasks
        ]  # ranks that a task signals
        self.waiters: list[list[int]] = [[] for _ in program.events]
        for task, waits in enumerate(self.waits):
            for event, _ in waits:
                self.waiters[event].append(task)


class Wire:
    """How long what travels keeps a rank's port, in nanoseconds."""

    def __init__(self, program: TileProgram, device: Device) -> None:
        self.program, self.rate = program, device.link_total_bytes_per_us

    def of_task(self, task: int) -> int:
        """0 unless it moves rows from or to another rank."""
        record = self.program.tasks[task]
        op = self.program.ops[record["op"]]
        if not op["route"] or record["peer"] == self.program.rank:
            return 0
        return self._ns(self.program.accesses[record["access_begin"]], int(op["dtype"]))

    def of_event(self, event: int) -> int:
        """The box of another rank's event."""
        record = self.program.events[event]
        return self._ns(record, int(self.program.tensors[record["tensor"]]["dtype"]))

    def is_pull(self, task: int) -> bool:
        return bool(self.program.accesses[self.program.tasks[task]["access_begin"]]["rank"] != self.program.rank)

    def _ns(self, box: np.void, dtype: int) -> int:
        bytes_ = int(box["rows"]) * int(box["cols"]) * _ITEM_BYTES[dtype]
        return min(bytes_ * 1000 // self.rate, R.MAX_TIME)


def check_times(program: TileProgram, device: Device) -> None:
    """Refuse a program whose times could leave 64 bits."""
    latency = device.event_ns + device.remote_ns + device.launch_ns
    wire = Wire(program, device)
    total = sum(program.costs.tolist()) + (len(program.tasks) + 1) * latency
    total += sum(wire.of_task(task) for task in range(len(program.tasks)))
    remote = range(program.local_events, len(program.events))
    total += sum(wire.of_event(event) for event in remote if program.events[event]["op"] != R.NONE)
    if total > R.MAX_TIME:
        raise PlanLimitError(f"the tasks of rank {program.rank} take {total} ns together; the limit is {R.MAX_TIME}")


class Urgency:
    """What decides among ready tasks: the longest path from the start of the task to the end of the program, in
    nanoseconds; of equals, the turn, then the place in the program.

    Puts of an op share the largest path, so that their order decides among them: rank-aware, those that stay on this
    rank (and need no port) in turn with those that leave. The path is no shorter than the time for which they keep the
    port. Tasks of an op that works on what comes from other ranks, for others, share the largest path, too: first come,
    first served. Other tasks go group by group, rows in the order in which the puts that wait for them visit peers, so
    that ranks at work on the same expert do not send to the same rank; rows that stay here go last.
    """

    def __init__(self, program: TileProgram, flow: Flow, device: Device, policy: Policy) -> None:
        self.path, self._turn = [0] * flow.count, [0] * flow.count
        self._first_come = [False] * flow.count
        if not policy.priorities:
            return
        arriving = {
            flow.op[task]
            for task in range(flow.count)
            if program.tasks[task]["signal_count"] and not program.ops["route"][flow.op[task]]
            for event, _ in flow.waits[task]
            if event >= flow.local_events and program.events["op"][event] != R.NONE
        }
        ranks, wire = program.ranks, Wire(program, device)
        event_tail, event_turn = [0] * len(flow.waiters), [ranks] * len(flow.waiters)
        first = flow.count
        while first:
            last, op = first, flow.op[first - 1]
            route = bool(program.ops["route"][op])
            shared = route or op in arriving
            while first and flow.op[first - 1] == op and (shared or first == last):
                first -= 1
            largest = largest_tail = 0
            place = [0, 0]  # among the op's puts that stay, and among those that leave
            for task in range(first, last):
                record = program.tasks[task]
                tails = [device.event_ns + event_tail[event] for event in flow.signals[task]]
                turns = [event_turn[event] for event in flow.signals[task]]
                if flow.remote[task]:
                    tails.append(device.remote_ns)
                    turns += [(peer - program.rank) % ranks for peer in flow.remote[task]]
                leaves = route and int(record["peer"]) != program.rank
                if leaves:
                    turns = [(int(record["peer"]) - program.rank) % ranks]
                turn = min([ranks, *turns])
                if policy.rotation:
                    self._turn[task] = 2 * place[leaves] + leaves if route else int(record["group"]) << 32 | turn
                place[leaves] += 1
                tail = max(tails, default=0)
                largest, largest_tail = max(largest, flow.costs[task] + tail), max(largest_tail, tail)
                for event, _ in flow.waits[task]:
                    event_turn[event] = min(event_turn[event], turn)
            if route:
                largest = max(largest, sum(wire.of_task(task) for task in range(first, last)) + largest_tail)
            for task in range(first, last):
                self.path[task], self._first_come[task] = largest, op in arriving
                for event, _ in flow.waits[task]:
                    event_tail[event] = max(event_tail[event], largest)

    def key(self, task: int, ready_at: int) -> tuple[int, int, int]:
        """The least is the most urgent."""
        return -self.path[task], ready_at if self._first_come[task] else self._turn[task], task


def pools(device: Device) -> list[tuple[int, int]]:
    """(core kind, cores) of each pool of interchangeable cores."""
    if device.unified:
        return [(R.BOTH, device.aic)]
    return [(R.AIC, device.aic), (R.AIV, device.aiv)]


def pool_of(program: TileProgram, device: Device, op: int) -> int:
    return 0 if device.unified else int(program.ops["kind"][op])


class Arrivals:
    """When events of other ranks may be expected: as far along as this rank is with its own tasks of the same op."""

    def __init__(self, program: TileProgram, device: Device) -> None:
        self.program, self.device = program, device
        self.named = {int(op) for op in program.events["op"][program.local_events :]}  # ops that peers signal
        self.ends: dict[int, list[int]] = {}

    def finish(self, op: int, ends: Iterable[int]) -> None:
        """Take the ends of this rank's own tasks of an op, in order of their numbers."""
        so_far, latest = [], 0
        for end in ends:
            latest = max(latest, end)
            so_far.append(latest)
        self.ends[op] = so_far

    def known(self, event: int) -> bool:
        """Whether this rank has done what tells when the event's box is sent."""
        return bool(self.ends.get(int(self.program.events[event]["op"])))

    def time(self, event: int) -> int:
        record = self.program.events[event]
        if record["op"] == R.NONE:
            return 0  # a credit is due from the launch before
        mine = self.ends.get(int(record["op"]), [])
        place = min(int(record["order"]), len(mine) - 1)
        return (mine[place] if mine else 0) + self.device.remote_ns


def schedule_o1(program: TileProgram, device: Device, policy: Policy) -> Placement:
    check_times(program, device)
    flow = Flow(program)
    urgency = Urgency(program, flow, device, policy)
    wire = Wire(program, device)
    port_out = port_in = 0  # when this rank's ports have passed all that was given to them
    # Hop levels one after another; where ops are not to interleave, the ops of each in turn.
    level_of = [(hop, 0 if policy.interleave else op) for op, hop in enumerate(flow.hop)]
    arrivals = Arrivals(program, device)
    cores = pools(device)
    place = Placement(
        [(0, 0)] * flow.count, [0] * flow.count, [0] * flow.count, [[[] for _ in range(n)] for _, n in cores]
    )
    free = [[(0, core) for core in range(n)] for _, n in cores]  # heaps
    left = list(flow.thresholds)
    event_at = [0] * len(left)  # when the latest signal reaches the waiters
    arrived: dict[int, int] = {}  # the same of other ranks' events
    ready_at = [0] * flow.count
    unmet = [0] * flow.count
    for level in sorted(set(level_of)):
        members = [task for task in range(flow.count) if level_of[flow.op[task]] == level]
        pending: list[list[tuple[int, int]]] = [[] for _ in cores]  # (ready at, task)
        ready: list[list[tuple[int, int, int]]] = [[] for _ in cores]  # by urgency
        clock = [0] * len(cores)  # when the latest task of the level started: what is ready was not all ready before
        # What comes from other ranks passes this rank's port one box after another, in the order in which it is sent.
        due = {e for task in members for e, _ in flow.waits[task] if e >= flow.local_events and e not in arrived}
        for sent, event in sorted((arrivals.time(event), event) for event in due):
            arrived[event] = sent
            if arrivals.known(event):
                arrived[event] = port_in = max(port_in + wire.of_event(event), sent)
        for task in members:
            for event, _ in flow.waits[task]:
                if event >= flow.local_events:
                    ready_at[task] = max(ready_at[task], arrived[event])
                elif left[event] > 0:
                    unmet[task] += 1
            if not unmet[task]:
                heapq.heappush(pending[pool_of(program, device, flow.op[task])], (ready_at[task], task))
        while any(pending) or any(ready):
            now, pool = min(
                (max(free[p][0][0], clock[p] if ready[p] else pending[p][0][0]), p)
                for p in range(len(cores))
                if pending[p] or ready[p]
            )
            clock[pool] = now
            while pending[pool] and pending[pool][0][0] <= now:
                _, task = heapq.heappop(pending[pool])
                heapq.heappush(ready[pool], urgency.key(task, ready_at[task]))
            _, _, task = heapq.heappop(ready[pool])
            _, core = heapq.heappop(free[pool])
            end = now + flow.costs[task]
            if kept := wire.of_task(task):
                if wire.is_pull(task):
                    end = max(end, port_in := max(port_in, now) + kept)
                else:
                    end = max(end, port_out := max(port_out, now) + kept)
            place.core[task], place.start[task], place.end[task] = (pool, core), now, end
            place.order[pool][core].append(task)
            heapq.heappush(free[pool], (end, core))
            for event in flow.signals[task]:
                left[event] -= 1
                event_at[event] = max(event_at[event], end + device.event_ns)
                if left[event] == 0:
                    for waiter in flow.waiters[event]:
                        ready_at[waiter] = max(ready_at[waiter], event_at[event])
                        if level_of[flow.op[waiter]] == level:
                            unmet[waiter] -= 1
                            if unmet[waiter] == 0:
                                home = pool_of(program, device, flow.op[waiter])
                                heapq.heappush(pending[home], (ready_at[waiter], waiter))
        for op in arrivals.named - {R.NONE}:
            if level_of[op] == level:
                arrivals.finish(op, (place.end[task] for task in members if flow.op[task] == op))
        stuck = [task for task in members if unmet[task]]
        if stuck:
            raise CycleError(
                f"{len(stuck)} task(s) at hop level {level[0]} can never start; the first is task {stuck[0]}: it waits "
                "for tasks of a later level, or for itself"
            )
    place.launch = [0] * flow.count
    place.launches = [(R.NONE, flow.count, [], 0, max(place.end, default=0))]
    return place


def schedule_o0(program: TileProgram, device: Device, policy: Policy) -> Placement:
    check_times(program, device)
    flow = Flow(program)
    arrivals = Arrivals(program, device)
    cores = pools(device)
    place = Placement(
        [(0, 0)] * flow.count, [0] * flow.count, [0] * flow.count, [[[] for _ in range(n)] for _, n in cores]
    )
    place.launch = [0] * flow.count
    tasks_of, before, ordered = _waves(flow)
    free = [[0] * n for _, n in cores]
    launch_of: dict[int, int] = {}
    host = 0
    if policy.serial:
        ordered = [[op] for wave in ordered for op in wave]
    for wave in ordered:
        share = _partition(program, device, cores, wave, flow, tasks_of)
        for op in wave:
            pool, first, last = share[op]
            dependencies = sorted(launch_of[b] for b in before[op])
            if policy.serial:
                dependencies = [len(place.launches) - 1] if place.launches else []
            host += device.launch_ns
            begin = max([host, *(place.launches[d][4] for d in dependencies)])
            load = {core: max(free[pool][core], begin) for core in range(first, last)}
            start = end = -1
            for task in tasks_of[op]:
                core = min(load, key=lambda c: (load[c], c))
                remote = [arrivals.time(event) for event, _ in flow.waits[task] if event >= flow.local_events]
                now = max([load[core], *remote])
                place.core[task], place.start[task], place.end[task] = (pool, core), now, now + flow.costs[task]
                place.order[pool][core].append(task)
                place.launch[task] = len(place.launches)
                load[core] = place.end[task]
                start = now if start < 0 else min(start, now)
                end = max(end, load[core])
            for core, time in load.items():
                free[pool][core] = time
            launch_of[op] = len(place.launches)
            place.launches.append((op, len(tasks_of[op]), dependencies, start, end))
            if op in arrivals.named:
                arrivals.finish(op, (place.end[task] for task in tasks_of[op]))
    return place


def _waves(flow: Flow) -> tuple[dict[int, list[int]], dict[int, list[int]], list[list[int]]]:
    """The tasks of each op; the ops that it waits for; waves of ops that do not wait for one another, by hop level,
    then by the length of the path to them within it."""
    tasks_of: dict[int, list[int]] = {}
    for task, op in enumerate(flow.op):
        tasks_of.setdefault(op, []).append(task)
    before = _op_dependencies(flow, tasks_of)
    depth: dict[int, int] = {}
    for op in tasks_of:  # program order, so predecessors come first
        later = [b for b in before[op] if b not in depth]
        if later:
            raise CycleError(
                f"op {op} waits for op {later[0]}, which does not come before it; this policy takes op by op, so no "
                "op may wait for itself or for a later one"
            )
        same = [depth[b] + 1 for b in before[op] if flow.hop[b] == flow.hop[op]]
        depth[op] = max(same, default=0)
    waves: dict[tuple[int, int], list[int]] = {}
    for op in tasks_of:
        waves.setdefault((flow.hop[op], depth[op]), []).append(op)
    return tasks_of, before, [waves[wave] for wave in sorted(waves)]


def _op_dependencies(flow: Flow, tasks_of: dict[int, list[int]]) -> dict[int, list[int]]:
    """The ops whose tasks signal what each op's tasks wait for."""
    signallers: list[set[int]] = [set() for _ in flow.waiters]
    for task, events in enumerate(flow.signals):
        for event in events:
            signallers[event].add(flow.op[task])
    return {
        op: sorted({b for task in tasks for event, _ in flow.waits[task] for b in signallers[event]})
        for op, tasks in tasks_of.items()
    }


def _partition(
    program: TileProgram,
    device: Device,
    cores: list[tuple[int, int]],
    ops: list[int],
    flow: Flow,
    tasks_of: dict[int, list[int]],
) -> dict[int, tuple[int, int, int]]:
    """op -> (pool, first core, end): disjoint shares by work where the ops of a wave fit, else all cores in turn."""
    share: dict[int, tuple[int, int, int]] = {}
    for pool, (_, count) in enumerate(cores):
        mine = [op for op in ops if pool_of(program, device, op) == pool]
        if len(mine) > count:
            share.update(dict.fromkeys(mine, (pool, 0, count)))
            continue
        work = {op: sum(flow.costs[task] for task in tasks_of[op]) for op in mine}
        spare, total = count - len(mine), max(1, sum(work.values()))
        size = {op: 1 + spare * work[op] // total for op in mine}
        for op in mine[: count - sum(size.values())]:
            size[op] += 1
        first = 0
        for op in mine:
            share[op] = (pool, first, first + size[op])
            first += size[op]
    return share


def schedule_published(program: TileProgram, device: Device, policy: Policy) -> Placement:
    """Each core kind has one queue: wave by wave of ops, the ops of a wave group by group in turn. Core c of N takes
    places c, c + N, c + 2N, ... of it, whatever the tasks cost."""
    check_times(program, device)
    flow = Flow(program)
    arrivals = Arrivals(program, device)
    cores = pools(device)
    place = Placement(
        [(0, 0)] * flow.count, [0] * flow.count, [0] * flow.count, [[[] for _ in range(n)] for _, n in cores]
    )
    free = [[0] * n for _, n in cores]
    taken = [0] * len(cores)
    event_at = [0] * len(flow.waiters)  # when the latest signal reaches the waiters
    tasks_of, _, waves = _waves(flow)
    for wave in waves:
        members = [task for op in wave for task in tasks_of[op]]
        if policy.interleave:
            members.sort(key=lambda task: int(program.tasks["group"][task]))
        for task in members:
            pool = pool_of(program, device, flow.op[task])
            core = taken[pool] % len(free[pool])
            taken[pool] += 1
            ready = [event_at[e] if e < flow.local_events else arrivals.time(e) for e, _ in flow.waits[task]]
            start = max([free[pool][core], *ready])
            end = free[pool][core] = start + flow.costs[task]
            place.core[task], place.start[task], place.end[task] = (pool, core), start, end
            place.order[pool][core].append(task)
            for event in flow.signals[task]:
                event_at[event] = max(event_at[event], end + device.event_ns)
        for op in arrivals.named & set(wave):
            arrivals.finish(op, (place.end[task] for task in tasks_of[op]))
    place.launch = [0] * flow.count
    place.launches = [(R.NONE, flow.count, [], 0, max(place.end, default=0))]
    return place


_SCHEDULES: dict[str, Callable[[TileProgram, Device, Policy], Placement]] = {
    "op": schedule_o0,
    "list": schedule_o1,
    "strided": schedule_published,
}


def schedule(program: TileProgram, device: Device, policy: Policy) -> dict[str, R.Records]:
    """A plan's sections."""
    return assemble(program, _SCHEDULES[policy.how](program, device, policy), device, policy)


def assemble(program: TileProgram, place: Placement, device: Device, policy: Policy) -> dict[str, R.Records]:
    """The plan's sections: tasks in queue order, with everything they point to laid out in the same order.

    Where the host launches op by op, the end of a launch orders them: events of this rank's own are left out.
    """
    dropped = program.local_events if policy.how == "op" else 0
    tasks: list[np.void] = []
    stores: dict[str, list[R.Records]] = {"access": [], "wait": [], "signal": []}
    queues: list[tuple[int, int, int, int]] = []
    sums = dict.fromkeys(stores, 0)
    for pool, (kind, _) in enumerate(pools(device)):
        for core, order in enumerate(place.order[pool]):
            queues.append((kind, core, len(tasks), len(order)))
            for number in order:
                task = program.tasks[number].copy()
                waits = program.waits[task["wait_begin"] :][: task["wait_count"]]
                waits = waits[waits["event"] >= dropped].copy()
                waits["event"] -= dropped
                signals = program.signals[task["signal_begin"] :][: task["signal_count"]]
                mine = (signals["rank"] == program.rank) & (signals["event"] < dropped)
                parts = {
                    "access": program.accesses[task["access_begin"] :][: task["access_count"]],
                    "wait": waits,
                    "signal": signals[~mine],
                }
                for name, part in parts.items():
                    task[f"{name}_begin"], task[f"{name}_count"] = sums[name], len(part)
                    sums[name] += len(part)
                    stores[name].append(part)
                task["launch"] = place.launch[number]
                task["start_ns"], task["end_ns"] = place.start[number], place.end[number]
                tasks.append(task)
    launches: list[tuple[int, int, int, int, int, int]] = []
    dependencies: list[int] = []
    for op, count, before, start, end in place.launches:
        launches.append((op, count, len(dependencies), len(before), start, end))
        dependencies.extend(before)
    return {
        "ops": program.ops,
        "tensors": program.tensors,
        "tasks": np.array(tasks, R.TASK),
        "accesses": np.concatenate([np.zeros(0, R.ACCESS), *stores["access"]]),
        "waits": np.concatenate([np.zeros(0, R.WAIT), *stores["wait"]]),
        "signals": np.concatenate([np.zeros(0, R.SIGNAL), *stores["signal"]]),
        "events": program.events[dropped:],
        "queues": np.array(queues, R.QUEUE),
        "launches": np.array(launches, R.LAUNCH),
        "dependencies": np.array(dependencies, R.DEPENDENCY),
        "peers": program.peers,
    }
