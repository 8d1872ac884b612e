"""`hyper-mpmd explain-hang`: what a launch that passed its deadline was waiting for, from the file that it left."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from hyper_mpmd.engine.hang import hang_text, read_hang, root_cause


def explain_hang_command(path: Path, *, as_json: bool) -> None:
    """Print the root cause, the chain of waits that leads to it, and the state of the cores."""
    report = read_hang(path)
    report["root"] = root_cause(report)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"{report['graph']} under {report['policy']}, {report['ranks']} rank(s): {report['seconds']:.2f} s")
    typer.echo(hang_text(report))
    if report["root"]["chain"]:
        typer.echo("chain of waits:")
    for depth, link in enumerate(report["root"]["chain"]):
        typer.echo(f"  {'  ' * min(depth, 10)}{link}")
