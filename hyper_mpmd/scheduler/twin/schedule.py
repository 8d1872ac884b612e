"""Policies O0 and O1, the obvious way: which core runs which tile, in which order.

O1 is list scheduling in time order. A task's priority is the longest path from it to the end. Whenever a core is free,
it takes the ready task of highest priority (the earlier one of equals); hop levels go one after another, so that no
queue goes down in hop level. O0 gives each op a launch of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hyper_mpmd.errors import CycleError, PlanLimitError
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.program import TileProgram


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
            any(int(s["rank"]) != program.rank for s in program.signals[t["signal_begin"] :][: t["signal_count"]])
            for t in tasks
        ]
        self.waiters: list[list[int]] = [[] for _ in program.events]
        for task, waits in enumerate(self.waits):
            for event, _ in waits:
                self.waiters[event].append(task)


def check_times(program: TileProgram, device: Device) -> None:
    """Refuse a program whose times could leave 64 bits."""
    latency = device.event_ns + device.remote_ns + device.launch_ns
    total = sum(program.costs.tolist()) + (len(program.tasks) + 1) * latency
    if total > R.MAX_TIME:
        raise PlanLimitError(f"the tasks of rank {program.rank} take {total} ns together; the limit is {R.MAX_TIME}")


def priorities(program: TileProgram, flow: Flow, device: Device) -> list[int]:
    """Nanoseconds of the longest path from the start of each task to the end of the program.

    All puts of one op share the largest, so that their rank-aware order decides among them.
    """
    priority = [0] * flow.count
    event_tail = [0] * len(flow.waiters)
    first = flow.count
    while first:
        last, op = first, flow.op[first - 1]
        shared = bool(program.ops["route"][op])
        while first and flow.op[first - 1] == op and (shared or first == last):
            first -= 1
        for task in range(last - 1, first - 1, -1):
            tails = [device.event_ns + event_tail[event] for event in flow.signals[task]]
            if flow.remote[task]:
                tails.append(device.remote_ns)
            priority[task] = flow.costs[task] + max(tails, default=0)
        priority[first:last] = [max(priority[first:last])] * (last - first)
        for task in range(first, last):
            for event, _ in flow.waits[task]:
                event_tail[event] = max(event_tail[event], priority[task])
    return priority


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

    def time(self, event: int) -> int:
        record = self.program.events[event]
        if record["op"] == R.NONE:
            return 0  # a credit is due from the launch before
        mine = self.ends.get(int(record["op"]), [])
        place = min(int(record["order"]), len(mine) - 1)
        return (mine[place] if mine else 0) + self.device.remote_ns


def schedule_o1(program: TileProgram, device: Device) -> Placement:
    check_times(program, device)
    flow = Flow(program)
    priority = priorities(program, flow, device)
    arrivals = Arrivals(program, device)
    cores = pools(device)
    place = Placement(
        [(0, 0)] * flow.count, [0] * flow.count, [0] * flow.count, [[[] for _ in range(n)] for _, n in cores]
    )
    free = [[(0, core) for core in range(n)] for _, n in cores]  # heaps
    left = list(flow.thresholds)
    event_at = [0] * len(left)  # when the latest signal reaches the waiters
    ready_at = [0] * flow.count
    unmet = [0] * flow.count
    for level in sorted(set(flow.hop)):
        members = [task for task in range(flow.count) if flow.hop[flow.op[task]] == level]
        pending: list[list[tuple[int, int, int]]] = [[] for _ in cores]  # (ready at, -priority, task)
        ready: list[list[tuple[int, int]]] = [[] for _ in cores]  # (-priority, task)
        clock = [0] * len(cores)  # when the latest task of the level started: what is ready was not all ready before
        for task in members:
            for event, _ in flow.waits[task]:
                if event >= flow.local_events:
                    ready_at[task] = max(ready_at[task], arrivals.time(event))
                elif left[event] > 0:
                    unmet[task] += 1
            if not unmet[task]:
                heapq.heappush(
                    pending[pool_of(program, device, flow.op[task])], (ready_at[task], -priority[task], task)
                )
        while any(pending) or any(ready):
            now, pool = min(
                (max(free[p][0][0], clock[p] if ready[p] else pending[p][0][0]), p)
                for p in range(len(cores))
                if pending[p] or ready[p]
            )
            clock[pool] = now
            while pending[pool] and pending[pool][0][0] <= now:
                _, urgency, task = heapq.heappop(pending[pool])
                heapq.heappush(ready[pool], (urgency, task))
            _, task = heapq.heappop(ready[pool])
            _, core = heapq.heappop(free[pool])
            end = now + flow.costs[task]
            place.core[task], place.start[task], place.end[task] = (pool, core), now, end
            place.order[pool][core].append(task)
            heapq.heappush(free[pool], (end, core))
            for event in flow.signals[task]:
                left[event] -= 1
                event_at[event] = max(event_at[event], end + device.event_ns)
                if left[event] == 0:
                    for waiter in flow.waiters[event]:
                        ready_at[waiter] = max(ready_at[waiter], event_at[event])
                        if flow.hop[flow.op[waiter]] == level:
                            unmet[waiter] -= 1
                            if unmet[waiter] == 0:
                                home = pool_of(program, device, flow.op[waiter])
                                heapq.heappush(pending[home], (ready_at[waiter], -priority[waiter], waiter))
        for op in arrivals.named - {R.NONE}:
            if flow.hop[op] == level:
                arrivals.finish(op, (place.end[task] for task in members if flow.op[task] == op))
        stuck = [task for task in members if unmet[task]]
        if stuck:
            raise CycleError(
                f"{len(stuck)} task(s) at hop level {level} can never start; the first is task {stuck[0]}: it waits "
                "for tasks of a later level, or for itself"
            )
    place.launch = [0] * flow.count
    place.launches = [(R.NONE, flow.count, [], 0, max(place.end, default=0))]
    return place


def schedule_o0(program: TileProgram, device: Device, serial: bool = False) -> Placement:
    check_times(program, device)
    flow = Flow(program)
    arrivals = Arrivals(program, device)
    cores = pools(device)
    place = Placement(
        [(0, 0)] * flow.count, [0] * flow.count, [0] * flow.count, [[[] for _ in range(n)] for _, n in cores]
    )
    place.launch = [0] * flow.count
    tasks_of: dict[int, list[int]] = {}
    for task, op in enumerate(flow.op):
        tasks_of.setdefault(op, []).append(task)
    before = _op_dependencies(flow, tasks_of)
    depth: dict[int, int] = {}
    for op in tasks_of:  # program order, so predecessors come first
        later = [b for b in before[op] if b not in depth]
        if later:
            raise CycleError(
                f"op {op} waits for op {later[0]}, which does not come before it; O0 launches op by op, so no op may "
                "wait for itself or for a later one"
            )
        same = [depth[b] + 1 for b in before[op] if flow.hop[b] == flow.hop[op]]
        depth[op] = max(same, default=0)
    waves: dict[tuple[int, int], list[int]] = {}
    for op in tasks_of:
        waves.setdefault((flow.hop[op], depth[op]), []).append(op)
    free = [[0] * n for _, n in cores]
    launch_of: dict[int, int] = {}
    host = 0
    ordered = [waves[wave] for wave in sorted(waves)]
    if serial:
        ordered = [[op] for wave in ordered for op in wave]
    for wave in ordered:
        share = _partition(program, device, cores, wave, flow, tasks_of)
        for op in wave:
            pool, first, last = share[op]
            dependencies = sorted(launch_of[b] for b in before[op])
            if serial:
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


POLICIES: dict[str, Callable[[TileProgram, Device], Placement]] = {
    "O0": schedule_o0,
    "O1": schedule_o1,
    "serial": partial(schedule_o0, serial=True),
}


def assemble(program: TileProgram, place: Placement, device: Device, policy: str) -> dict[str, R.Records]:
    """The plan's sections: tasks in queue order, with everything they point to laid out in the same order.

    Under O0 the end of a launch orders ops, so events of this rank's own are left out.
    """
    dropped = 0 if policy == "O1" else program.local_events
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
