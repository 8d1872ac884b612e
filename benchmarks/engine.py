"""What a task costs when it does nothing: nanoseconds a task of lowering, scheduling, checking and running.

    python benchmarks/engine.py [--rounds 9] [--json] [--tasks 1000000]

chain: each task waits for the one before. flat: none waits. grid: rows of 1,000 tasks, each waiting for two of the row
before. Runs of the shapes take turns, round after round in one process; the median and the quartiles' distance are
told. Two workers pay for carrying cache lines between processors, so they need a machine with two that are idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import busy_warning, median, spread
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import hyper_mpmd as hm
from hyper_mpmd import _native
from hyper_mpmd.engine import run as _engine  # noqa: F401  # tells the native engine how many processors there are
from hyper_mpmd.scheduler.backend import get_backend
from hyper_mpmd.scheduler.descriptor import describe
from hyper_mpmd.scheduler.device import get_device
from hyper_mpmd.scheduler.program import TileProgram

WIDTH = 1000
# Aims of the project, nanoseconds a task on one worker (chain, flat) and on two (grid).
AIMS = {("chain", 1): 25, ("flat", 1): 25, ("grid", 2): 100}


def chain(tasks: int) -> NDArray[np.int64]:
    return np.stack([np.arange(tasks - 1), np.arange(1, tasks)], axis=1)


def flat(tasks: int) -> NDArray[np.int64]:
    return np.zeros((0, 2), np.int64)


def grid(tasks: int) -> NDArray[np.int64]:
    above = np.arange(tasks - WIDTH)
    inner = above[above % WIDTH < WIDTH - 1]
    return np.concatenate([np.stack([above, above + WIDTH], 1), np.stack([inner, inner + WIDTH + 1], 1)])


SHAPES: dict[str, Callable[[int], NDArray[np.int64]]] = {"chain": chain, "flat": flat, "grid": grid}


def lowering_ns(tasks: int, rounds: int) -> list[float]:
    """Nanoseconds a task of cutting a flat graph into that many tiles."""
    graph = hm.TaskGraph("tiles")
    rows = graph.rows("rows")
    graph.output("y", graph.vector("act", hm.ops.SwiGLU(), graph.input("x", (rows, 32))))
    backend, device = get_backend("native"), get_device("cpu")
    loads = {0: np.array([[tasks]], np.int64)}
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        backend.lower(describe(graph), loads, device, [0], {0: (1, 16)})
        times.append((time.perf_counter() - begin) * 1e9 / tasks)
    return times


def measure(tasks: int, rounds: int) -> list[dict[str, Any]]:
    backend = get_backend("native")
    cases: list[dict[str, Any]] = []
    for shape, edges in SHAPES.items():
        program = TileProgram.from_edges(np.full(tasks, 100), edges(tasks))
        for workers in (1, 2):
            device = get_device("cpu").model_copy(update={"aic": workers, "aiv": workers})
            begin = time.perf_counter()
            sections = backend.schedule(program, device, "O1")
            scheduled = time.perf_counter()
            plan = _native.engine.prepare({name: part.view(np.uint8) for name, part in sections.items()}, 0, 1)
            checked = time.perf_counter()
            cases.append(
                {
                    "shape": shape,
                    "workers": workers,
                    "plan": plan,
                    "scheduling_ns": (scheduled - begin) * 1e9 / tasks,
                    "checking_ns": (checked - scheduled) * 1e9 / tasks,
                    "times": [],
                }
            )
    for number in range(rounds + 1):
        for case in cases:
            status, *_, seconds, _, _ = _native.engine.launch(
                [case["plan"]], [], None, [[]], [[]], [], case["workers"], 120.0, lambda rank, task: True, None
            )
            if status != 0:
                raise RuntimeError(f"{case['shape']} on {case['workers']} workers ended with status {status}")
            if number:  # the first round warms caches and starts threads
                case["times"].append(seconds * 1e9 / tasks)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description="nanoseconds a task")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tasks", type=int, default=1_000_000, help=f"a multiple of {WIDTH}")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    options = parser.parse_args()
    if options.rounds < 1 or options.tasks < 2 * WIDTH or options.tasks % WIDTH:
        parser.error(f"--rounds must be at least 1, and --tasks a multiple of {WIDTH} and at least {2 * WIDTH}")
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    cases = measure(options.tasks, options.rounds)
    lowered = lowering_ns(options.tasks, min(options.rounds, 3))
    table = Table(title=f"{options.tasks:,} empty tasks, ns a task", title_justify="left")
    for column in ("shape", "workers", "run", "spread", "aim", "scheduling", "checking"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for case in cases:
        aim = AIMS.get((case["shape"], case["workers"]))
        table.add_row(
            case["shape"],
            str(case["workers"]),
            f"{median(case['times']):.1f}",
            f"±{spread(case['times']) / 2:.0%}",
            "" if aim is None else str(aim),
            f"{case['scheduling_ns']:.0f}",
            f"{case['checking_ns']:.0f}",
        )
    console = Console(stderr=True)
    console.print(table)
    console.print(f"lowering {statistics.median(lowered):.0f} ns a task (a flat graph of as many tiles)")
    if options.json:
        rows = [
            {
                **{key: value for key, value in case.items() if key not in ("plan", "times")},
                "run_ns": median(case["times"]),
                "run_spread": spread(case["times"]),
            }
            for case in cases
        ]
        json.dump({"tasks": options.tasks, "lowering_ns": statistics.median(lowered), "cases": rows}, sys.stdout)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
