"""What is in a plan, in numbers: the one place that reports and `hyper-mpmd plan --json` take them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.scheduler.descriptor import AXES, OP_COLUMNS, OPERAND_COLUMNS, describe
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import AIC, CORE_KINDS, DTYPES, NONE, ROLES
from hyper_mpmd.tasks.tensor import ITEM_BYTES

_ITEM_BYTES = np.array([ITEM_BYTES[name] for name in sorted(DTYPES, key=DTYPES.__getitem__)])


@dataclass(frozen=True)
class OpSummary:
    """One op. rows: of its output. tile: rows and columns of its largest tile.
    flops: floating-point operations. busy_ns: predicted core time of all its tiles."""

    name: str
    op: str
    kind: str
    rows: int
    tasks: int
    tile: tuple[int, int]
    flops: int
    busy_ns: int


@dataclass(frozen=True)
class PlanSummary:
    """One rank's plan. bounds: {what: nanoseconds that no schedule can beat}; bound_ns the largest of them. bytes: of
    the tensors by role. put_bytes: what is put to other ranks."""

    rank: int
    hash: str
    tasks: int
    tasks_by_kind: dict[str, int]
    events: int
    waits: int
    signals: int
    queues: dict[str, int]
    longest_queue: int
    launches: int
    bytes: dict[str, int]
    put_bytes: int
    bounds: dict[str, int]
    bound_ns: int
    predicted_ns: int
    ops: tuple[OpSummary, ...]

    @property
    def of_bound(self) -> float:
        """The bound as a share of the predicted makespan; 1 means no better schedule exists."""
        return self.bound_ns / self.predicted_ns if self.predicted_ns else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "of_bound": self.of_bound}


def summarize(plan: Plan) -> PlanSummary:
    """The plan in numbers."""
    sections = plan.sections
    kinds = sections["queues"]["kind"]
    nodes = plan.graph.nodes
    per_op = np.bincount(plan.tasks["op"], minlength=len(nodes))
    by_kind = dict.fromkeys(("cube", "vector", "comm"), 0)
    for node, count in zip(nodes, per_op, strict=True):
        by_kind[node.core] += int(count)
    bounds = _bounds(plan)
    return PlanSummary(
        rank=plan.rank,
        hash=plan.hash,
        tasks=len(plan.tasks),
        tasks_by_kind=by_kind,
        events=len(sections["events"]),
        waits=len(sections["waits"]),
        signals=len(sections["signals"]),
        queues={CORE_KINDS[kind]: int((kinds == kind).sum()) for kind in np.unique(kinds)},
        longest_queue=int(sections["queues"]["count"].max(initial=0)),
        launches=len(sections["launches"]),
        bytes=_bytes_by_role(plan),
        put_bytes=_put_bytes(plan),
        bounds=bounds,
        bound_ns=max(bounds.values()),
        predicted_ns=plan.predicted_ns,
        ops=_ops(plan, per_op),
    )


def _ops(plan: Plan, per_op: NDArray[np.int64]) -> tuple[OpSummary, ...]:
    tasks, tensors = plan.tasks, plan.sections["tensors"]
    names = list(plan.graph.tensors)
    busy = np.bincount(tasks["op"], tasks["cost_ns"].astype(np.float64), minlength=len(per_op))
    return tuple(
        OpSummary(
            name=node.name,
            op=type(node.op).__name__,
            kind=node.core,
            rows=int(tensors["rows"][names.index(node.outputs[0])]),
            tasks=int(per_op[index]),
            tile=_largest_tile(plan, index),
            flops=_flops(plan, index),
            busy_ns=int(busy[index]),
        )
        for index, node in enumerate(plan.graph.nodes)
    )


def _largest_tile(plan: Plan, op: int) -> tuple[int, int]:
    """Of the first output's boxes."""
    tasks, record = plan.tasks[plan.tasks["op"] == op], plan.sections["ops"][op]
    written = plan.sections["accesses"][tasks["access_begin"].astype(np.int64) + int(record["read_count"])]
    return int(written["rows"].max(initial=0)), int(written["cols"].max(initial=0))


def _flops(plan: Plan, op: int) -> int:
    """Points of the op's tiles (rows x columns of the output x reduction) times what its rule says a point costs."""
    descriptor = describe(plan.graph)
    row: dict[str, int] = dict(zip(OP_COLUMNS, descriptor.ops[op].tolist(), strict=True))
    operands = descriptor.operands[row["operand_begin"] : row["operand_begin"] + row["boxes"]]
    begins = plan.tasks["access_begin"][plan.tasks["op"] == op].astype(np.int64)
    accesses = plan.sections["accesses"]
    written = accesses[begins + row["read_boxes"]]
    points = written["rows"].astype(np.int64) * written["cols"]
    sides = ((number, side) for number in range(row["read_boxes"]) for side in ("rows", "cols"))
    for number, side in sides:
        if operands[number][OPERAND_COLUMNS.index(f"{side}_axis")] == AXES["reduction"]:
            points = points * accesses[begins + number][side]
            break
    return int(points.sum()) * row["flops_per_point"]


def _bytes_by_role(plan: Plan) -> dict[str, int]:
    """Bytes of tensors by role; one that shares another's memory counts once."""
    tensors = plan.sections["tensors"]
    own = tensors["storage"] == np.arange(len(tensors))
    bytes_ = tensors["rows"] * tensors["cols"] * _ITEM_BYTES[tensors["dtype"]].astype(np.uint64)
    return {role: int(bytes_[own & (tensors["role"] == number)].sum()) for role, number in ROLES.items()}


def _put_bytes(plan: Plan) -> int:
    accesses = plan.sections["accesses"]
    away = accesses[accesses["rank"] != plan.rank]
    item_bytes = _ITEM_BYTES[plan.sections["tensors"]["dtype"][away["tensor"]]]
    return int((away["rows"].astype(np.int64) * away["cols"] * item_bytes).sum())


def _bounds(plan: Plan) -> dict[str, int]:
    """Nanoseconds that no schedule of these tiles on this device can beat, by reason."""
    device, tasks = plan.device, plan.tasks
    cost = tasks["cost_ns"].astype(np.int64)
    cube = plan.sections["ops"]["kind"][tasks["op"]] == AIC
    found = {"longest path": _longest_path(plan, cost)}
    if device.unified:
        found["work of all cores"] = int(cost.sum()) // device.aic
    else:
        found["work of AIC"] = int(cost[cube].sum()) // device.aic
        found["work of AIV"] = int(cost[~cube].sum()) // device.aiv
    found["memory"] = _touched_bytes(plan) * 1000 // device.memory_bytes_per_us
    if plan.ranks > 1:
        found["link"] = _put_bytes(plan) * 1000 // device.link_total_bytes_per_us
    return found


def _longest_path(plan: Plan, cost: NDArray[np.int64]) -> int:
    """Along local events, an op at a time (edges lead to later ops); what peers signal is taken to be there already."""
    tasks, sections = plan.tasks, plan.sections
    end = np.zeros(len(tasks), np.int64)
    ready = np.zeros(len(sections["events"]), np.int64)
    for op in plan.ops_with_tasks():
        members = np.flatnonzero(tasks["op"] == op)
        waits, waiter = _expand(tasks, members, "wait")
        start = np.zeros(len(members), np.int64)
        np.maximum.at(start, waiter, ready[sections["waits"]["event"][waits]])
        end[members] = start + cost[members]
        signals, sender = _expand(tasks, members, "signal")
        records = sections["signals"][signals]
        local = (records["rank"] == plan.rank) & (records["event"] < len(ready))
        np.maximum.at(ready, records["event"][local], (end[members] + plan.device.event_ns)[sender[local]])
    return int(end.max(initial=0))


def _expand(tasks: NDArray[np.void], members: NDArray[np.int64], what: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Indices of all waits (or signals) of these tasks, and the position among the tasks that each belongs to."""
    counts = tasks[f"{what}_count"][members].astype(np.int64)
    owner = np.repeat(np.arange(len(members)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return tasks[f"{what}_begin"][members].astype(np.int64)[owner] + np.arange(len(owner)) - first, owner


def _touched_bytes(plan: Plan) -> int:
    """Bytes of the inputs and outputs that any tile touches, each once: weights of experts without rows stay out."""
    accesses, tensors = plan.sections["accesses"], plan.sections["tensors"]
    total = 0
    for number in np.flatnonzero(np.isin(tensors["role"], (ROLES["input"], ROLES["output"]))):
        boxes = np.unique(accesses[(accesses["tensor"] == number) & (accesses["rank"] == plan.rank)][["row", "rows"]])
        begin, end = boxes["row"].astype(np.int64), (boxes["row"] + boxes["rows"]).astype(np.int64)
        before = np.maximum.accumulate(np.concatenate(([0], end)))[:-1]
        rows = np.maximum(0, end - np.maximum(begin, before)).sum()
        total += int(rows) * int(tensors["cols"][number]) * int(_ITEM_BYTES[tensors["dtype"][number]])
    return total


def launch_kinds(plans: Sequence[Plan]) -> str:
    """How the host launches these plans."""
    if all(len(p.sections["launches"]) == 1 and p.sections["launches"]["op"][0] == NONE for p in plans):
        return "one launch"
    return "a launch an op"
