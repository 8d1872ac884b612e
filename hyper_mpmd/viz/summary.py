"""What is in a plan, in numbers: the one place that reports and `hyper-mpmd plan --json` take them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.scheduler.bounds import bounds, put_and_pulled_bytes
from hyper_mpmd.scheduler.descriptor import AXES, OP_COLUMNS, OPERAND_COLUMNS, describe
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import CORE_KINDS, DTYPES, NONE, ROLES
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
    """One rank's plan. bounds: see `scheduler.bounds`, those that are not 0; bound_ns the largest of them. bytes: of
    the tensors by role. put_bytes, pulled_bytes: what is put to other ranks, and pulled."""

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
    pulled_bytes: int
    bounds: dict[str, int]
    bound_ns: int
    predicted_ns: int
    ops: tuple[OpSummary, ...]

    @property
    def of_bound(self) -> float:
        """The bound as a share of the predicted makespan: 1 means that no better schedule exists; above 1, that the
        prediction, which gives each core a memory and link rate of its own, is too short."""
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
    found = bounds(plan)
    put_bytes, pulled_bytes = put_and_pulled_bytes(plan)
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
        put_bytes=put_bytes,
        pulled_bytes=pulled_bytes,
        bounds={name: ns for name, ns in asdict(found).items() if ns},
        bound_ns=found.largest[1],
        predicted_ns=plan.predicted_ns,
        ops=_ops(plan, per_op),
    )


def largest_tiles(found: Sequence[PlanSummary]) -> dict[str, tuple[int, int]]:
    """Rows and columns of each op's largest tile on any of these ranks; some may have no rows of it."""
    tiles = {}
    for same in zip(*(plan.ops for plan in found), strict=True):
        rows, cols = zip(*(op.tile for op in same), strict=True)
        tiles[same[0].name] = (max(rows), max(cols))
    return tiles


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


def launch_kinds(plans: Sequence[Plan]) -> str:
    """How the host launches these plans."""
    if all(len(p.sections["launches"]) == 1 and p.sections["launches"]["op"][0] == NONE for p in plans):
        return "one launch"
    return "a launch an op"
