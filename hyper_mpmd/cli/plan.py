"""`hyper-mpmd plan`: schedule, report, save."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from hyper_mpmd.cli.subject import Subject, UsageError
from hyper_mpmd.scheduler.bounds import bounds
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.world import World
from hyper_mpmd.viz.report import report
from hyper_mpmd.viz.summary import largest_tiles, summarize
from hyper_mpmd.viz.units import duration


def compile_timed(
    subject: Subject, *, device: str | Device, policy: str, rank: int | None = None, backend: Any = None
) -> tuple[list[Plan], float]:
    """The plans, and the seconds that planning took."""
    start = time.perf_counter()
    try:
        plans = subject.compile(device=device, policy=policy, rank=rank, backend=backend)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    return plans, time.perf_counter() - start


def load_plans(files: Sequence[Path]) -> list[Plan]:
    """One plan, or those of all ranks of a world, in order: WorldSizeError for others."""
    plans = [Plan.load(file) for file in files]
    return plans if len(plans) == 1 else list(World(plans).plans)


def plan_command(
    subject: Subject,
    *,
    policy: str,
    device: str,
    rank: int | None,
    backend: Any,
    save: Path | None,
    as_json: bool,
) -> None:
    """Plan, and print the report or the JSON."""
    plans, seconds = compile_timed(subject, device=device, policy=policy, rank=rank, backend=backend)
    if save is not None:
        for plan in plans:
            file = save if len(plans) == 1 else _rank_file(save, plan.rank)
            plan.save(file)
            typer.echo(f"wrote {file} ({file.stat().st_size:,} bytes)", err=True)
    if as_json:
        typer.echo(json.dumps({**subject.settings, **plans_record(plans), "planning_s": seconds}))
        return
    typer.echo(report(plans))
    typer.echo(f"planned in           {duration(seconds * 1e9)}")
    typer.echo(f"hash                 {plans_hash(plans)[:16]}")


def plans_record(plans: Sequence[Plan]) -> dict[str, Any]:
    """The plans as plain data: totals over the ranks, then each rank."""
    found = [summarize(plan) for plan in plans]
    whole = bounds(plans[0] if len(plans) == 1 else World(plans))
    worst = max(found, key=lambda plan: plan.predicted_ns)
    return {
        "device": plans[0].device.name,
        "policy": plans[0].policy,
        "hash": plans_hash(plans),
        "tasks": sum(plan.tasks for plan in found),
        "tasks_by_kind": {kind: sum(plan.tasks_by_kind[kind] for plan in found) for kind in worst.tasks_by_kind},
        "events": sum(plan.events for plan in found),
        "predicted_ns": worst.predicted_ns,
        "bound_ns": whole.largest[1],
        "bounds": {name: ns for name, ns in asdict(whole).items() if ns},
        "tiles": {name: list(tile) for name, tile in largest_tiles(found).items()},
        "ranks": [plan.to_dict() for plan in found],
    }


def plans_hash(plans: Sequence[Plan]) -> str:
    """A plan's own hash; of a world, the hash of its plans' hashes."""
    if len(plans) == 1:
        return plans[0].hash
    return hashlib.sha256("".join(plan.hash for plan in plans).encode()).hexdigest()


def _rank_file(file: Path, rank: int) -> Path:
    """ffn.plan.json -> ffn.r1.plan.json: the rank goes before the suffixes."""
    stem, dot, suffixes = file.name.partition(".")
    return file.with_name(f"{stem}.r{rank}{dot}{suffixes}")
