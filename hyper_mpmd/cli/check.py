"""`hyper-mpmd check`: prove a plan or a world, or show the smallest counter-example."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from hyper_mpmd.cli.plan import compile_timed, load_plans, plans_hash
from hyper_mpmd.cli.subject import Subject
from hyper_mpmd.errors import PlanUnsafe
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import Proof, prove
from hyper_mpmd.scheduler.timeline import Timeline, predicted
from hyper_mpmd.viz.terminal import draw
from hyper_mpmd.viz.units import duration, size

_NEIGHBOURS = 2  # tasks told on each side of the one where a queue stands


def check_command(
    subject: Subject | Sequence[Path], *, policy: str, device: str, rank: int | None, backend: Any, as_json: bool
) -> bool:
    """Prove; print the proof, or the counter-example with the cores that it is about. False where there is one."""
    if isinstance(subject, Subject):
        plans, planning = compile_timed(subject, device=device, policy=policy, rank=rank, backend=backend)
        settings = subject.settings
    else:
        plans, planning, settings = load_plans(subject), None, {"files": [str(f) for f in subject]}
    record = {**settings, "device": plans[0].device.name, "policy": plans[0].policy, "hash": plans_hash(plans)}
    if planning is not None:
        record["planning_s"] = planning
    try:
        proof = prove(plans, backend)
    except PlanUnsafe as error:
        if as_json:
            found = {"error": type(error).__name__, "message": str(error), "counterexample": error.counterexample}
            typer.echo(json.dumps({**record, "proven": False, **found}))
        else:
            _show(plans, error)
        return False
    if as_json:
        typer.echo(json.dumps({**record, "proven": True, **proof.to_dict()}))
    else:
        typer.echo(_title(plans) + ": proven" + ("" if proof.world else f" for rank {plans[0].rank} alone"))
        typer.echo(summary(proof))
    return True


def summary(proof: Proof) -> str:
    """The proof in lines for people."""
    held = f", {size(proof.bytes)} held at once" if proof.bytes else ""
    rows = {
        "tasks": f"{proof.tasks:,} on {proof.queues:,} queues of {proof.ranks} rank(s)",
        "edges": f"{proof.edges:,} (queue order, waits, signals, launches), {proof.events:,} events",
        "boxes": f"{proof.boxes:,}, {proof.pairs:,} pairs of accesses compared",
        "proven in": f"{duration(proof.seconds * 1e9)}{held}",
    }
    lines = [f"{name:20} {text}" for name, text in rows.items()]
    return "\n".join([*lines, "shown, over two successive launches:", *(f"  {line}" for line in proof.shown)])


def _title(plans: list[Plan]) -> str:
    return f"{plans[0].graph.name} on {plans[0].device.name}, {plans[0].policy}"


def _show(plans: list[Plan], error: PlanUnsafe) -> None:
    typer.echo(f"{_title(plans)}: refused")
    typer.echo(f"{type(error).__name__}: {error}")
    found = error.counterexample
    places = found.get("circle") or [found[name] for name in ("first", "second") if name in found]
    if not places:
        return
    # The host has no queue.
    cores = {(place["rank"], place["core"]): place["task"] for place in places if place["core"] != "host"}
    typer.echo("")
    for (rank, core), task in cores.items():
        typer.echo(_around(next(plan for plan in plans if plan.rank == rank), core, task, len(plans) > 1))
    typer.echo("")
    timeline = _of_cores(predicted(plans), [f"r{r} {core}" if len(plans) > 1 else core for r, core in cores])
    draw(timeline, [node.core for node in plans[0].graph.nodes], Console(), title="as it was scheduled")


def _around(plan: Plan, core: str, task: str, several: bool) -> str:
    """The queue of a core about the task where it stands."""
    queue = next(q for q in range(len(plan.sections["queues"])) if plan.core_name(q) == core)
    begin, count = (int(plan.sections["queues"][name][queue]) for name in ("begin", "count"))
    at = next(t for t in range(begin, begin + count) if plan.task_name(t) == task)
    first, last = max(begin, at - _NEIGHBOURS), min(begin + count, at + _NEIGHBOURS + 1)
    names = [f"[{plan.task_name(t)}]" if t == at else plan.task_name(t) for t in range(first, last)]
    more = ["..."] if first > begin else [], ["..."] if last < begin + count else []
    return f"{f'r{plan.rank} ' if several else ''}{core}: {' '.join([*more[0], *names, *more[1]])}"


def _of_cores(timeline: Timeline, names: list[str]) -> Timeline:
    """The timeline of these cores alone."""
    kept = [timeline.cores.index(name) for name in names]
    place = np.full(len(timeline.cores), len(kept))
    place[kept] = np.arange(len(kept))
    spans = timeline.spans[place[timeline.spans["core"]] < len(kept)].copy()
    spans["core"] = place[spans["core"]]
    return Timeline(timeline.kind, tuple(names), timeline.ops, spans)
