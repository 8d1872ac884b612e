"""`hyper-mpmd run`: execute here under each policy, in turn, and compare with the reference engine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hyper_mpmd.cli.plan import compile_timed, plans_hash
from hyper_mpmd.cli.subject import Subject
from hyper_mpmd.engine.compare import Outputs, digest, max_rel_error, tolerance
from hyper_mpmd.engine.run import run as execute
from hyper_mpmd.errors import EngineError
from hyper_mpmd.scheduler.device import usable_cores
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.viz.summary import summarize
from hyper_mpmd.viz.units import duration, quantity, size


def run_command(
    subject: Subject,
    *,
    policies: Sequence[str],
    device: str,
    workers: int | None,
    repeat: int,
    timeout: float,
    processes: bool = False,
    as_json: bool,
) -> bool:
    """Run, print, and say whether every result was right and every run gave the same bits.

    processes: each rank in a process of its own instead of a group of threads of this one.
    """
    worlds = {policy: compile_timed(subject, device=device, policy=policy) for policy in policies}
    plans = next(iter(worlds.values()))[0]
    check_memory(plans)
    inputs = subject.inputs(plans)
    start = time.perf_counter()
    reference = execute(plans, inputs, engine="reference")
    reference_s = time.perf_counter() - start

    outputs: dict[str, Outputs] = {}
    digests: dict[str, set[str]] = {policy: set() for policy in policies}
    seconds: dict[str, list[float]] = {policy: [] for policy in policies}
    with _executor({policy: world for policy, (world, _) in worlds.items()}, inputs, processes) as launch:
        for number in range(repeat + 1):  # policies in turn, so that whatever else the machine does falls on both
            for policy in policies:
                outputs[policy], taken = launch(policy, workers, timeout)
                if number:  # the first run starts workers and touches memory for the first time
                    seconds[policy].append(taken)
                digests[policy].add(digest(outputs[policy]))

    results = {
        policy: _result(worlds[policy], outputs[policy], reference, digests[policy], seconds[policy])
        for policy in policies
    }
    error = max(result["max_rel_error"] for result in results.values())
    allowed = tolerance(reference)
    same = len(set.union(*digests.values())) == 1
    record = {
        **subject.settings,
        "device": device,
        "workers": workers or _default_workers(plans),
        "processes": processes,
        "max_rel_error": error,
        "tolerance": allowed,
        "bit_identical": same,
        "output_sha256": results[policies[-1]]["output_sha256"],
        "reference_s": reference_s,
        "policies": results,
    }
    fine = bool(error <= allowed) and same
    if as_json:
        typer.echo(json.dumps(record))
    else:
        _print(record, plans, fine)
    return fine


Launch = Callable[[str, int | None, float], tuple[Outputs, float]]


@contextmanager
def _executor(worlds: dict[str, list[Plan]], inputs: Sequence[Any], processes: bool) -> Iterator[Launch]:
    """(policy, workers, timeout) -> outputs of all ranks and the seconds that they took."""
    if processes:
        from hyper_mpmd.cli.processes import Processes

        with Processes(worlds, inputs) as ranks:
            yield ranks.run
        return

    def launch(policy: str, workers: int | None, timeout: float) -> tuple[Outputs, float]:
        start = time.perf_counter()
        outputs = execute(worlds[policy], inputs, workers=workers, timeout=timeout)
        return outputs, time.perf_counter() - start

    yield launch


def check_memory(plans: Sequence[Plan]) -> None:
    """Refuse plans whose tensors do not fit into this machine, before anything is made."""
    needed = sum(sum(summarize(plan).bytes.values()) for plan in plans)
    free = _free_bytes()
    if free is not None and needed > free:
        raise EngineError(
            f"the tensors of {plans[0].graph.name!r} take {size(needed)}, and {size(free)} of memory are free; make it "
            "smaller, or look at its plan (plan, show), which needs no tensors"
        )


def _free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _default_workers(plans: Sequence[Plan]) -> int:
    """What the engine takes: this process's processors shared out over the ranks, at most one a queue."""
    most = max(len(plan.sections["queues"]) for plan in plans)
    return max(1, min(most, usable_cores() // len(plans)))


def _result(
    world: tuple[list[Plan], float],
    outputs: Outputs,
    reference: Outputs,
    digests: set[str],
    seconds: list[float],
) -> dict[str, Any]:
    plans, planning_s = world
    tasks, median = sum(len(plan.tasks) for plan in plans), statistics.median(seconds)
    return {
        "max_rel_error": max_rel_error(outputs, reference),
        "median_s": median,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "runs": len(seconds),
        "tasks": tasks,
        "tasks_per_second": tasks / median,
        "predicted_ns": max(plan.predicted_ns for plan in plans),
        "planning_s": planning_s,
        "plan_hash": plans_hash(plans),
        "output_sha256": min(digests) if len(digests) == 1 else sorted(digests),
    }


def _print(record: dict[str, Any], plans: Sequence[Plan], fine: bool) -> None:
    console = Console(highlight=False)
    ranks = f"{len(plans)} ranks, " if len(plans) > 1 else ""
    table = Table(title=f"{plans[0].graph.name}: {ranks}{record['workers']} workers a rank", title_justify="left")
    table.add_column("policy")
    for name in ("median", "fastest", "slowest", "tasks", "tasks/s", "planned in", "max rel error"):
        table.add_column(name, justify="right")
    for policy, result in record["policies"].items():
        table.add_row(
            policy,
            *(duration(result[key] * 1e9) for key in ("median_s", "min_s", "max_s")),
            f"{result['tasks']:,}",
            quantity(result["tasks_per_second"], ""),
            duration(result["planning_s"] * 1e9),
            f"{result['max_rel_error']:.1e}",
        )
    console.print(table)
    same = "the same bits in every run" if record["bit_identical"] else "bits that differ from run to run"
    verdict = "[green]right[/]" if fine else "[bold red]wrong[/]"
    console.print(
        f"{verdict}: {same}; max relative error {record['max_rel_error']:.1e}, at most {record['tolerance']:.0e} is "
        f"rounding."
    )
