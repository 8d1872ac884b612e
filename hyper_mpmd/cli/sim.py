"""`hyper-mpmd sim`: execute a graph in virtual time on a device, and say what it waits for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hyper_mpmd.cli.plan import compile_timed, load_plans, plans_hash
from hyper_mpmd.cli.subject import Subject
from hyper_mpmd.scheduler.device import get_device
from hyper_mpmd.scheduler.device_file import with_settings
from hyper_mpmd.scheduler.simulate import Simulation, simulate
from hyper_mpmd.viz.summary import summarize
from hyper_mpmd.viz.units import duration, percent

_WIDEST = 12  # of an op's name, before it is cut short


def sim_command(
    subject: Subject | Sequence[Path],
    *,
    policy: str,
    device: str,
    changes: Sequence[str],
    jitter: float,
    seed: int,
    backend: Any,
    as_json: bool,
) -> None:
    """Plan for the device (with `changes`), simulate all ranks, print what came of it."""
    if isinstance(subject, Subject):
        target = with_settings(get_device(device), changes)
        plans, planning = compile_timed(subject, device=target, policy=policy, backend=backend)
        settings = subject.settings
    else:
        plans, planning, settings = load_plans(subject), 0.0, {"files": [str(f) for f in subject]}
    begin = time.perf_counter()
    found = simulate(plans, seed=seed, jitter=jitter, backend=backend)
    record = {
        **settings,
        "device": plans[0].device.name,
        "policy": plans[0].policy,
        "hash": plans_hash(plans),
        "tasks": sum(len(plan.tasks) for plan in plans),
        **found.to_dict(),
        "of_peak": of_peak(found),
        "planning_s": planning,
        "simulation_s": time.perf_counter() - begin,
    }
    if as_json:
        typer.echo(json.dumps(record))
        return
    _show(found, record)


def of_peak(found: Simulation) -> float | None:
    """Operations of cube cores / what their peak allows in the makespan; None for a device whose peak is not known."""
    device = found.plans[0].device
    if device.cube_peak_per_us is None or not found.makespan_ns:
        return None
    needed = 0.0  # microseconds of one core
    for plan in found.plans:
        for op, record in zip(summarize(plan).ops, plan.sections["ops"], strict=True):
            if op.kind == "cube":
                needed += op.flops / device.cube_peak_per_us[int(record["dtype"] == 1)]
    return needed * 1000 / (found.makespan_ns * device.aic * len(found.plans))


def _show(found: Simulation, record: dict[str, Any]) -> None:
    console = Console()
    plan, count = found.plans[0], len(found.plans)
    ranks = f", {count} ranks" if count > 1 else ""
    typer.echo(f"{plan.graph.name} on {record['device']}, {plan.policy}{ranks}: {record['tasks']:,} tasks, simulated")
    peak = f", {percent(record['of_peak'])} of the cubes' peak" if record["of_peak"] is not None else ""
    typer.echo(f"makespan             {duration(record['makespan_ns'])}{peak}")
    share = percent(record["of_bound"])
    typer.echo(f"bound                {duration(record['bound_ns'])} ({record['bound']}): {share} of the makespan")
    bounds = ", ".join(f"{name} {duration(ns)}" for name, ns in record["bounds"].items())
    typer.echo(f"bounds               {bounds}")
    typer.echo(f"exposed comm         {duration(record['exposed_comm_ns'])} of a cube core's time")
    cores = Table(title="core time", title_justify="left")
    cores.add_column("cores")
    headings = ("busy", "stalled", "data", "comm", "dispatch", "idle")
    for heading in headings:
        cores.add_column("of it for bytes" if heading == "stalled" else heading, justify="right")
    for kind, times in record["cores"].items():
        whole = sum(ns for name, ns in times.items() if name != "stalled")
        cores.add_row(kind, *(percent(times[name] / whole if whole else 0.0) for name in headings))
    console.print(cores)
    ops = Table(title="by op, all ranks", title_justify="left")
    for heading in ("op", "tasks", "from", "to", "busy", "of it for bytes", "data", "comm", "dispatch", "core"):
        first = heading == "op"
        ops.add_column(heading, justify="left" if first else "right", no_wrap=first, min_width=_WIDEST if first else 1)
    for name, times in record["ops"].items():
        shown = [times[one] for one in ("start", "end", "busy", "stalled", "data", "comm", "dispatch", "core")]
        ops.add_row(name, f"{times['tasks']:,}", *(duration(ns) for ns in shown))
    console.print(ops)
    typer.echo("data, comm, dispatch: cores stood before these tasks for want of it; core: tasks stood for a core")
