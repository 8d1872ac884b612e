"""A plan, or the plans of a world, as text: what there is to do, where it lies, and how good the schedule is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.viz.summary import PlanSummary, largest_tiles, launch_kinds, summarize
from hyper_mpmd.viz.units import duration, percent, quantity, size

_BOUNDS = {
    "path": "longest path",
    "work_aic": "work of AIC",
    "work_aiv": "work of AIV",
    "work_core": "work of all cores",
    "memory": "memory",
    "link": "link",
}
_MOST_COLUMNS = 8  # ranks side by side; of a larger world the smallest and the largest figures are shown


def report(plans: Sequence[Plan]) -> str:
    """Tasks by op and kind, tile sizes, events, queues, bytes, bounds, and the predicted makespan beside its bound."""
    first = plans[0]
    found = [summarize(plan) for plan in plans]
    device = first.device
    cores = f"{device.aic} cores" if device.unified else f"{device.aic} AIC + {device.aiv} AIV"
    world = "" if first.ranks == 1 else f", {_ranks(plans)}"
    head = f"{first.graph.name} on {device.name} ({cores}), policy {first.policy} ({launch_kinds(plans)}){world}"
    return "\n".join([head, "", *_op_table(found), "", *_rank_table(found), *_notes(found)])


def _ranks(plans: Sequence[Plan]) -> str:
    return f"{len(plans)} ranks" if len(plans) > 1 else f"rank {plans[0].rank} of {plans[0].ranks}"


def _op_table(found: Sequence[PlanSummary]) -> list[str]:
    """A line an op, over all ranks."""
    total = sum(op.busy_ns for plan in found for op in plan.ops)
    tiles = largest_tiles(found)
    lines = [["task", "op", "kind", "rows", "tiles", "tile size", "work", "core time", ""]]
    for same in zip(*(plan.ops for plan in found), strict=True):
        op, flops, busy = same[0], sum(o.flops for o in same), sum(o.busy_ns for o in same)
        tasks = sum(o.tasks for o in same)
        lines.append(
            [
                op.name,
                op.op,
                op.kind,
                f"{sum(o.rows for o in same):,}",
                f"{tasks:,}",
                " x ".join(map(str, tiles[op.name])) if tasks else "-",
                quantity(flops, "FLOP") if flops else "-",
                duration(busy),
                percent(busy / total) if total else "",
            ]
        )
    return _align(lines, left=3)


def _rank_table(found: Sequence[PlanSummary]) -> list[str]:
    """A column a rank: counts, bytes, bounds, makespan."""
    few = len(found) <= _MOST_COLUMNS
    head = [[""] + ([f"rank {plan.rank}" for plan in found] if few else ["smallest", "largest"])]
    lines = head if len(found) > 1 else []

    def line(name: str, values: Sequence[float], show: Callable[[float], str]) -> None:
        shown = values if few else [min(values), max(values)]
        lines.append([name, *(show(value) for value in shown)])

    line("tasks", [plan.tasks for plan in found], _count)
    for kind in ("cube", "vector", "comm"):
        if any(plan.tasks_by_kind[kind] for plan in found):
            line(f"  {kind}", [plan.tasks_by_kind[kind] for plan in found], _count)
    line("events", [plan.events for plan in found], _count)
    line("  waits", [plan.waits for plan in found], _count)
    line("  signals", [plan.signals for plan in found], _count)
    line("queues", [sum(plan.queues.values()) for plan in found], _count)
    line("  longest", [plan.longest_queue for plan in found], lambda n: f"{n:,} tasks")
    line("launches", [plan.launches for plan in found], _count)
    line("bytes", [sum(plan.bytes.values()) for plan in found], size)
    for role in found[0].bytes:
        if any(plan.bytes[role] for plan in found):
            line(f"  {role}", [plan.bytes[role] for plan in found], size)
    if len(found) > 1 or found[0].put_bytes:
        line("put to other ranks", [plan.put_bytes for plan in found], size)
    if any(plan.pulled_bytes for plan in found):
        line("pulled from other ranks", [plan.pulled_bytes for plan in found], size)
    line("bound", [plan.bound_ns for plan in found], duration)
    for name, meaning in _BOUNDS.items():
        if any(name in plan.bounds for plan in found):
            line(f"  {meaning}", [plan.bounds.get(name, 0) for plan in found], duration)
    line("predicted", [plan.predicted_ns for plan in found], duration)
    line("  bound / predicted", [plan.of_bound for plan in found], percent)
    return _align(lines, left=1)


def _notes(found: Sequence[PlanSummary]) -> list[str]:
    """Where a shared resource needs longer than the prediction, which gives each core a rate of its own."""
    notes = []
    for name, unless in (("memory", ", where caches do not hold it,"), ("link", "")):
        short = [plan for plan in found if plan.bounds.get(name, 0) > plan.predicted_ns]
        if short:
            longest = max(plan.bounds[name] for plan in short)
            where = "" if len(found) == 1 else f" on {len(short)} of {len(found)} ranks"
            notes.append(
                f"note: {_BOUNDS[name]}{unless} needs {duration(longest)}{where}, longer than predicted; all cores "
                "share it, and the prediction gives each core a rate of its own"
            )
    return notes


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _align(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns of equal width; the first `left` of them flush left, the others right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
