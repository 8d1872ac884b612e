"""What proofs cost: tiles a second of the full proof and of the certificate, and the memory that a proof holds.

    python benchmarks/prover.py [--rounds N] [--json]

Plans of 10^6 tiles are a Mixture-of-Experts feed-forward cut small and a grid of empty tasks. Each figure is the median
of N rounds; planning stands beside, since every plan that is proven was planned before. The certificate includes the
checks of records that come before it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from harness import busy_warning, interleave, median, spread
from hyper_mpmd._native import prover
from planning import moe
from rich.console import Console
from rich.table import Table

import hyper_mpmd as hm
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import native_sections, prove
from hyper_mpmd.testing import programs
from hyper_mpmd.viz.units import duration, quantity, size

ROUNDS = 5
DEVICE = "ascend-a3"


def subjects() -> dict[str, Callable[[], Sequence[Plan]]]:
    """Plans, unproven, by name."""

    def ffn(tokens: int, ranks: int = 1, tile: tuple[int, int] | None = None, policy: str = "O1") -> Sequence[Plan]:
        graph, loads = moe(tokens, 7168, 2048, 256, 8, ranks=ranks)
        tiles = {} if tile is None else dict.fromkeys((node.name for node in graph.nodes), tile)
        options: dict[str, Any] = {"device": DEVICE, "policy": policy, "tiles": tiles, "world": ranks, "prove": False}
        return list(hm.compile(graph, loads, **options).plans)

    return {
        "moe-ffn": lambda: ffn(4096),
        "moe-ffn, 8 ranks": lambda: ffn(4096, ranks=8),
        "moe-ffn cut small, O1": lambda: ffn(20480, tile=(32, 64)),
        "moe-ffn cut small, O0": lambda: ffn(20480, tile=(32, 64), policy="O0"),
        "grid of empty tasks": lambda: [programs.plan_of(programs.grid(1000), DEVICE)],
    }


def measure(name: str, make: Callable[[], Sequence[Plan]], rounds: int) -> dict[str, Any]:
    """Seconds of planning, proof and certificate, and bytes."""
    plans = make()
    given = [(*native_sections(plan), []) for plan in plans]
    tasks = sum(len(plan.tasks) for plan in plans)
    found = interleave(
        {
            "plan": make,
            "proof": lambda: prove(plans),
            "certificate": lambda: [prover.certificate(one) for one in given],
        },
        rounds,
        warm=1,
    )
    proof = prove(plans)
    return {
        "name": name,
        "tasks": tasks,
        "pairs": proof.pairs,
        "bytes_of_plans": sum(records.nbytes for plan in plans for records in plan.sections.values()),
        "bytes_of_proof": proof.bytes,
        "rounds": len(found["proof"]),
        **{f"{what}_s": median(times) for what, times in found.items()},
        **{f"{what}_spread": spread(times) for what, times in found.items()},
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    made = Table(title="proofs on one core", title_justify="left")
    made.add_column("subject")
    for name in ("tiles", "planned", "proven", "tiles/s", "certificate", "memory"):
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(
            row["name"],
            f"{row['tasks']:,}",
            duration(row["plan_s"] * 1e9),
            duration(row["proof_s"] * 1e9),
            quantity(row["tasks"] / row["proof_s"], ""),
            quantity(row["tasks"] / row["certificate_s"], "/s"),
            size(row["bytes_of_proof"]),
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each measurement (default {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    rows = [measure(name, make, options.rounds) for name, make in subjects().items()]
    Console(stderr=True).print(table(rows))
    if options.json:
        json.dump(rows, sys.stdout)
        print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
