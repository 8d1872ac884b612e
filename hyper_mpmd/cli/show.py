"""`hyper-mpmd show`: the timeline in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from hyper_mpmd.cli.plan import compile_timed
from hyper_mpmd.cli.subject import Subject
from hyper_mpmd.errors import EngineError
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.timeline import Timeline, predicted
from hyper_mpmd.viz.terminal import draw

_RUNS = 7  # the fastest is drawn: the first ones start workers and touch memory, others meet a busy machine


def show_command(
    subject: Subject | Path,
    *,
    policy: str,
    device: str,
    rank: int | None,
    backend: Any,
    measured: bool,
    workers: int | None,
    seed: int,
    most_rows: int,
    as_json: bool,
) -> None:
    """Draw the timeline of a graph or of a saved plan, or print it as JSON."""
    if isinstance(subject, Path):
        plans = [Plan.load(subject)]
    else:
        plans, _ = compile_timed(subject, device=device, policy=policy, rank=rank, backend=backend)
    timeline = _measure(subject, plans, workers, seed) if measured else predicted(plans)
    if as_json:
        typer.echo(json.dumps(_record(plans, timeline)))
        return
    kinds = [node.core for node in plans[0].graph.nodes]
    title = f"{plans[0].graph.name} on {plans[0].device.name}, {plans[0].policy}"
    if measured:
        title += f" (fastest of {_RUNS} runs)"
    draw(timeline, kinds, Console(), title=title, most_rows=most_rows)


def _measure(subject: Subject | Path, plans: list[Plan], workers: int | None, seed: int) -> Timeline:
    from hyper_mpmd.cli.run import check_memory
    from hyper_mpmd.engine.run import run_measured
    from hyper_mpmd.modules.random_inputs import random_inputs

    if len(plans) != plans[0].ranks:
        raise EngineError(
            f"rank {plans[0].rank} of {plans[0].ranks} cannot run alone; to measure, show the whole world (no --rank)"
        )
    check_memory(plans)
    inputs = random_inputs(plans, seed) if isinstance(subject, Path) else subject.inputs(plans)
    timelines = [run_measured(plans, inputs, workers=workers)[1] for _ in range(_RUNS)]
    return min(timelines, key=lambda timeline: timeline.makespan_ns)


def _record(plans: list[Plan], timeline: Timeline) -> dict[str, Any]:
    spans = timeline.spans
    return {
        "graph": plans[0].graph.name,
        "device": plans[0].device.name,
        "policy": plans[0].policy,
        "kind": timeline.kind,
        "makespan_ns": timeline.makespan_ns,
        "ops": timeline.ops,
        "cores": [
            {"name": name, "busy_ns": busy}
            for name, busy in zip(timeline.cores, timeline.busy_ns().tolist(), strict=True)
        ],
        "spans": {name: spans[name].tolist() for name in spans.dtype.names or ()},
    }
