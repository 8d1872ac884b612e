"""Simulation: a world of plans executed in virtual time on its device, which need not be at hand.

The very records that the engine runs are walked, core by core: waits are met when signals have landed, the main memory
and the ports of the links are shared by all that use them, what the L2 still holds is not read again. What each rule is
stands in native/include/hyper_mpmd/simulate.h; the twin in hyper_mpmd/scheduler/twin/simulate.py says it the obvious
way and comes to the same nanosecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import HangError, PlanFormatError, SimulationError, WorldSizeError
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.backend import native_module
from hyper_mpmd.scheduler.bounds import distinct_bytes, largest_of, touched
from hyper_mpmd.scheduler.descriptor import AXES, OP_COLUMNS, OPERAND_COLUMNS, describe
from hyper_mpmd.scheduler.device import Device, get_device
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import native_sections
from hyper_mpmd.scheduler.timeline import Timeline, simulated
from hyper_mpmd.tasks.graph import TaskGraph

# native/include/hyper_mpmd/simulate.h, SimulatedTask
SIMULATED = np.dtype(
    [
        *((name, "<i8") for name in ("blocked_ns", "ready_ns", "start_ns", "end_ns", "core_ns", "memory_bytes")),
        ("held", "<u4"),
        ("reserved", "<u4"),
    ]
)
DISPATCH, DATA, COMM = range(3)  # what came last before a task could start
PAGE_ROWS, PAGE_COLS, BYTE_PARTS = 128, 256, 256
Records = NDArray[np.void]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SimulatedBounds:
    """Nanoseconds that no order of the same tiles on the same device can beat, each on the rank where it is most.

    path: the longest chain of tasks that wait for one another, each with a core and links to itself (under O0 through
    whole launches). compute, vector: core time of the tasks / cores of the kind (compute also for cores that are
    both). memory: bytes written and inputs read once. link: bytes out of or into a rank / the rate of its port, and
    bytes between two ranks / the rate between them.
    """

    path: int
    compute: int
    vector: int
    memory: int
    link: int

    @property
    def largest(self) -> tuple[str, int]:
        """The name of the largest bound, and its nanoseconds."""
        return largest_of(self)


@dataclass(frozen=True)
class Simulation:
    """What came of it. records: SIMULATED, one array a rank, in the order of the plan's tasks."""

    plans: tuple[Plan, ...]
    records: tuple[Records, ...]
    bounds: SimulatedBounds

    @cached_property
    def timeline(self) -> Timeline:
        """The same model as a measured run has."""
        return simulated(self.plans, self.records)

    @property
    def makespan_ns(self) -> int:
        """From the host's first move to the end of the last task."""
        return max((int(record["end_ns"].max(initial=0)) for record in self.records), default=0)

    @property
    def of_bound(self) -> float:
        """The largest bound as a share of the makespan: 1 means that nothing better exists. 1 where nothing runs."""
        return self.bounds.largest[1] / self.makespan_ns if self.makespan_ns else 1.0

    def by_core_kind(self) -> dict[str, dict[str, int]]:
        """Nanoseconds of all cores of a kind on all ranks: busy (of which stalled: core done, bytes not through),
        waiting for data of this rank, for comm of another, for dispatch by the host, and idle after the last task."""
        found: dict[str, dict[str, int]] = {}
        for plan, record in zip(self.plans, self.records, strict=True):
            queues = plan.sections["queues"]
            kind_of = queues["kind"][plan.queue_of]
            for kind in np.unique(queues["kind"]):
                times = found.setdefault(R.CORE_KINDS[kind], dict.fromkeys((*_TIMES, "idle"), 0))
                mine = record[kind_of == kind]
                for name, ns in _split(mine).items():
                    times[name] += ns
                cores = int(np.count_nonzero(queues["kind"] == kind))
                used = int((mine["end_ns"] - mine["blocked_ns"]).sum())
                times["idle"] += cores * self.makespan_ns - used
        return found

    def by_op(self) -> dict[str, dict[str, int]]:
        """The same by op (a stage), with its first start and last end, and core: how long its tasks were ready before
        their core was free, summed over them."""
        found: dict[str, dict[str, int]] = {}
        for index, name in enumerate(self.plans[0].op_names):
            mine = np.concatenate(
                [record[plan.tasks["op"] == index] for plan, record in zip(self.plans, self.records, strict=True)]
            )
            if len(mine):
                core = int(np.maximum(mine["start_ns"] - mine["ready_ns"], 0).sum())
                times = {"tasks": len(mine), "start": int(mine["start_ns"].min()), "end": int(mine["end_ns"].max())}
                found[name] = {**times, **_split(mine), "core": core}
        return found

    def exposed_comm_ns(self) -> int:
        """The time in which the cube cores of a rank that has work left stand for want of what comes from another
        rank: averaged over its cores, on the rank where it is most. Where no task is of cube cores, of all cores."""
        most = 0
        for plan, record in zip(self.plans, self.records, strict=True):
            kinds = plan.sections["queues"]["kind"]
            cube = np.isin(kinds, (R.AIC, R.BOTH))
            if not cube[plan.queue_of].any():
                cube[:] = True
            mine = record[cube[plan.queue_of] & (record["held"] == COMM)]
            stood = int(np.maximum(mine["start_ns"] - mine["blocked_ns"], 0).sum())
            most = max(most, stood // max(1, int(np.count_nonzero(cube))))
        return most

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, times in nanoseconds."""
        name, bound = self.bounds.largest
        return {
            "makespan_ns": self.makespan_ns,
            "bound_ns": bound,
            "bound": name,
            "bounds": asdict(self.bounds),
            "of_bound": self.of_bound,
            "exposed_comm_ns": self.exposed_comm_ns(),
            "memory_bytes": sum(int(record["memory_bytes"].sum()) for record in self.records),
            "cores": self.by_core_kind(),
            "ops": self.by_op(),
        }


_TIMES = ("busy", "stalled", "data", "comm", "dispatch")


def _split(record: Records) -> dict[str, int]:
    """Core time spent in these tasks and before them."""
    times = {
        "busy": int((record["end_ns"] - record["start_ns"]).sum()),
        "stalled": int((record["end_ns"] - record["start_ns"] - record["core_ns"]).sum()),
    }
    stood = record["start_ns"] - record["blocked_ns"]
    for name, held in (("data", DATA), ("comm", COMM), ("dispatch", DISPATCH)):
        times[name] = int(stood[record["held"] == held].sum())
    return times


def simulate(
    plans: Sequence[Plan],
    *,
    seed: int = 0,
    jitter: float = 0.0,
    device: str | Device | None = None,
    backend: Literal["native", "python"] | None = None,
) -> Simulation:
    """Execute the plans of all ranks, in order, in virtual time on their device.

    device: another one whose memory, links and latencies to take; queues and core times stay those of the plans.
    jitter: tasks have their cores up to this share longer, 0 to 1, each by a number drawn from `seed`. The same plans,
    seed and jitter give the same times everywhere. backend: "native", or "python" (the twin, slow).
    Errors: WorldSizeError unless the plans are those of all ranks; SimulationError for a jitter, a seed or devices that
    do not fit; HangError if tasks never start (`check` says why); PlanFormatError for records that cannot be read.
    """
    members = tuple(plans)
    planned = _check(members, seed, jitter)
    target = planned if device is None else get_device(device)
    ppm = round(jitter * 1_000_000)
    run = _backend(backend)
    records = run(members, target, seed, ppm, False)
    path = run(members, target, 0, 0, True)
    longest = max((int(record["end_ns"].max(initial=0)) for record in path), default=0)
    return Simulation(members, tuple(records), _bounds(members, target, path, longest))


def _check(plans: tuple[Plan, ...], seed: int, jitter: float) -> Device:
    wanted = plans[0].ranks if plans else 1
    if [plan.rank for plan in plans] != list(range(wanted)):
        found = ", ".join(str(plan.rank) for plan in plans) or "none"
        raise WorldSizeError(
            f"a simulation takes the plans of all {wanted} rank(s), in order; got rank(s) {found}; compile with world= "
            "and without rank="
        )
    if not (math.isfinite(jitter) and 0 <= jitter <= 1):
        raise SimulationError(f"jitter is {jitter}; it must be from 0 to 1")
    if not 0 <= seed < 1 << 63:
        raise SimulationError(f"seed is {seed}; it must be from 0 to 2^63 - 1")
    for plan in plans[1:]:
        if plan.device != plans[0].device:
            raise SimulationError(f"rank {plan.rank} was planned for another device than rank 0")
    return plans[0].device


def _backend(name: str | None) -> Any:
    return _twin if native_module("simulator", name) is None else _native


def _native(plans: Sequence[Plan], device: Device, seed: int, ppm: int, path: bool) -> list[Records]:
    from hyper_mpmd._native import simulator

    records = [np.zeros(len(plan.tasks), SIMULATED) for plan in plans]
    gathered = [list(gathered_reads(plan)) for plan in plans]
    rates = [device.vector_bytes_per_us, device.memory_bytes_per_us, device.link_bytes_per_us]
    fault, stuck, rank, task = simulator.simulate(
        [(*native_sections(plan), []) for plan in plans],
        gathered,
        [*rates, device.link_total_bytes_per_us, device.l2_bytes],
        [device.task_ns, device.event_ns, device.remote_ns, device.launch_ns],
        list(device.near),
        seed,
        ppm,
        path,
        [record.view(np.uint8) for record in records],
    )
    if fault:
        raise PlanFormatError(fault)
    _refuse_stuck(plans, stuck, rank, task)
    return records


def _twin(plans: Sequence[Plan], device: Device, seed: int, ppm: int, path: bool) -> list[Records]:
    from hyper_mpmd.scheduler.twin.simulate import run

    records, stuck, rank, task = run(plans, device, seed, ppm, path)
    _refuse_stuck(plans, stuck, rank, task)
    return records


def _refuse_stuck(plans: Sequence[Plan], stuck: int, rank: int, task: int) -> None:
    if stuck:
        raise HangError(
            f"{stuck} task(s) never start, the first of them rank {rank}'s {plans[rank].task_name(task)}; `check` says "
            "what they wait for"
        )


def gathered_reads(plan: Plan) -> tuple[int, ...]:
    """For each op a bit for each of its reads whose rows are chosen by data: a tile takes its share of them."""
    return _gathered(plan.header.graph, len(plan.sections["ops"]))


@lru_cache(maxsize=64)
def _gathered(graph: str, ops: int) -> tuple[int, ...]:
    descriptor = describe(TaskGraph.from_json(graph))
    if len(descriptor.ops) != ops:
        return (0,) * ops  # a program made by hand
    begin, reads = OP_COLUMNS.index("operand_begin"), OP_COLUMNS.index("read_boxes")
    axis, group = OPERAND_COLUMNS.index("rows_axis"), OPERAND_COLUMNS.index("group")
    found = []
    for op in descriptor.ops:
        operands = descriptor.operands[op[begin] : op[begin] + op[reads]]
        chosen = (operands[:, axis] == AXES["all"]) & (operands[:, group] == 0)
        found.append(sum(1 << min(63, number) for number in np.flatnonzero(chosen).tolist()))
    return tuple(found)


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _bounds(plans: Sequence[Plan], device: Device, path: Sequence[Records], longest: int) -> SimulatedBounds:
    compute = vector = 0
    memory, out, into = (np.zeros(len(plans), np.int64) for _ in range(3))
    pair = 0
    for plan, record in zip(plans, path, strict=True):
        kinds = plan.sections["queues"]["kind"]
        kind_of = kinds[plan.queue_of]
        for kind in np.unique(kinds):
            cores = int(np.count_nonzero(kinds == kind))
            share = -(-int(record["core_ns"][kind_of == kind].sum()) // cores)
            if kind == R.AIV:
                vector = max(vector, share)
            else:
                compute = max(compute, share)
        sizes, owner, written = touched(plan)
        memory += np.bincount(owner[written], sizes[written], len(plans)).astype(np.int64)
        memory[plan.rank] += _inputs_read(plan)
        for put in (True, False):
            chosen = (owner != plan.rank) & (written == put)
            away = np.bincount(owner[chosen], sizes[chosen], len(plans)).astype(np.int64)
            mine, theirs = (out, into) if put else (into, out)
            mine[plan.rank] += away.sum()
            theirs += away
            pair = max(pair, int(away.max(initial=0)))
    port = max(int(out.max(initial=0)), int(into.max(initial=0))) * 1000 // device.link_total_bytes_per_us
    return SimulatedBounds(
        path=longest,
        compute=compute,
        vector=vector,
        memory=int(memory.max(initial=0)) * 1000 // device.memory_bytes_per_us,
        link=max(port, pair * 1000 // device.link_bytes_per_us),
    )


def _inputs_read(plan: Plan) -> int:
    """Bytes of inputs that tiles read, each once however many read it; rows chosen by data are left out."""
    tasks, accesses, tensors = plan.tasks, plan.sections["accesses"], plan.sections["tensors"]
    most = np.zeros(len(tensors), np.int64)
    chosen = gathered_reads(plan)
    for op in plan.ops_with_tasks():
        mine = tasks[tasks["op"] == op]
        count = min(int(plan.sections["ops"]["read_count"][op]), int(mine["access_count"].min()))
        for operand in range(count):
            boxes = accesses[mine["access_begin"] + operand]
            tensor = int(boxes["tensor"][0])
            if chosen[op] >> min(63, operand) & 1 or tensors["role"][tensor] != R.ROLES["input"]:
                continue
            if (boxes["tensor"] != tensor).any() or (boxes["rank"] != plan.rank).any():
                continue
            most[tensor] = max(int(most[tensor]), distinct_bytes(plan, boxes))
    return int(most.sum())
