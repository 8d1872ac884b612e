"""Contenders measured in turn in one process, and what the machine itself allows.

A noisy neighbour hits every contender of a round alike, so ratios are taken round by round and their median is told.
Every benchmark here takes --rounds N and --json: results as JSON on stdout, tables and talk on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hyper_mpmd as hm
from hyper_mpmd.scheduler.device import usable_cores
from hyper_mpmd.viz.units import duration, percent

ROUNDS = 7


def median(times: Sequence[float]) -> float:
    return statistics.median(times)


def spread(times: Sequence[float]) -> float:
    """The distance of the quartiles as a share of the median."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / median(times)


def times_as_fast(own: Sequence[float], peer: Sequence[float]) -> float:
    """How many times as fast as the peer, above 1 being faster: the median over rounds."""
    return statistics.median(theirs / mine for mine, theirs in zip(own, peer, strict=True))


@dataclass
class Comparison:
    """seconds: {contender: a time a round}. flops, bytes: the least that any must compute, in dtype, and move."""

    title: str
    seconds: dict[str, list[float]]
    flops: float
    bytes: float
    dtype: torch.dtype

    def bound(self, rates: Rates) -> tuple[float, str]:
        """(seconds that this machine cannot beat, what sets them)."""
        compute, memory = self.flops / rates.product[self.dtype], self.bytes / rates.copy
        return max((compute, "products"), (memory, "memory"))

    def record(self, peers: Sequence[str], rates: Rates) -> dict[str, Any]:
        """Plain data for JSON."""
        bound, by = self.bound(rates)
        return {
            "title": self.title,
            "bound_s": bound,
            "bound_by": by,
            "contenders": {
                name: {
                    "median_s": median(times),
                    "spread": spread(times),
                    "rounds": len(times),
                    "times_as_fast_as": {peer: times_as_fast(times, self.seconds[peer]) for peer in peers},
                    "of_bound": bound / median(times),
                }
                for name, times in self.seconds.items()
            },
        }


def interleave(
    contenders: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, warm: int = 2, limit_s: float = 60.0
) -> dict[str, list[float]]:
    """Seconds of each contender, a time a round; who goes first changes from round to round.

    After limit_s no new round begins, so that a machine that others keep busy costs figures, not patience.
    """
    end = time.perf_counter() + limit_s
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warm):
        for name in names:
            contenders[name]()
    for number in range(rounds):
        if number and time.perf_counter() > end:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class Rates:
    """What this machine reaches with all threads: bytes read and written by a copy, and FLOPs of a large product, a
    second."""

    copy: float
    product: dict[torch.dtype, float]

    def better(self, other: Rates) -> Rates:
        """The higher of each: what was measured while others kept the machine busy is no limit."""
        product = {dtype: max(rate, other.product[dtype]) for dtype, rate in self.product.items()}
        return Rates(max(self.copy, other.copy), product)


def measure_rates(rounds: int = 5) -> Rates:
    """Rates of this machine, the best of some rounds; of products, torch's or a plan's, whichever is faster here."""
    source = torch.ones(64 << 20, dtype=torch.float32)
    target = torch.empty_like(source)
    copy = min(interleave({"copy": lambda: target.copy_(source)}, rounds)["copy"])
    product = {
        dtype: 2 * _SIZE**3 / min(min(times) for times in interleave(_products(name, dtype), rounds).values())
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    return Rates(2 * source.nbytes / copy, product)


_SIZE = 2048


def _products(name: Any, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    a, b = torch.randn(_SIZE, _SIZE).to(dtype), torch.randn(_SIZE, _SIZE).to(dtype)
    out = torch.empty(_SIZE, _SIZE, dtype=dtype)
    graph = hm.TaskGraph("product")
    x, w = graph.input("x", (graph.rows("rows"), _SIZE), name), graph.input("w", (_SIZE, _SIZE), name)
    graph.output("y", graph.cube("product", hm.ops.Matmul(), x, w))
    plan = hm.compile(graph, _SIZE)
    return {"torch": lambda: torch.mm(a, b, out=out), "plan": lambda: plan.run(x=a, w=b)}


def table(comparison: Comparison, peers: Sequence[str], rates: Rates) -> Table:
    """The comparison for people; peers: the contenders that the others are held against."""
    bound, by = comparison.bound(rates)
    caption = f"bound {duration(bound * 1e9)}, set by {by}"
    made = Table(title=comparison.title, title_justify="left", caption=caption, caption_justify="left")
    made.add_column("contender")
    for name in ("median", "spread", *(f"x {peer}" for peer in peers), "of bound"):
        made.add_column(name, justify="right")
    fastest = min(comparison.seconds, key=lambda name: median(comparison.seconds[name]))
    for name, times in comparison.seconds.items():
        made.add_row(
            name,
            duration(median(times) * 1e9),
            f"±{percent(spread(times) / 2)}",
            *(f"{times_as_fast(times, comparison.seconds[peer]):.2f}" for peer in peers),
            percent(bound / median(times)),
            style="bold" if name == fastest else "",
        )
    return made


def busy_warning() -> str:
    """A line where other processes compete for the cores. Then OpenMP's barriers, where eager torch stands after each
    op, cost it far more than they do a plan, and ratios say little."""
    cores = usable_cores()
    load = os.getloadavg()[0]
    return f"other processes keep {load:.1f} of {cores} cores busy: figures are noisy" if load > cores / 2 else ""


def main(
    description: str,
    run: Callable[[int], list[Comparison]],
    peers: Sequence[str],
    arguments: Sequence[str] | None = None,
) -> int:
    """The command line that benchmarks share. run: takes the number of rounds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each comparison (default {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    before = measure_rates()
    found = run(options.rounds)
    rates = before.better(measure_rates())
    console = Console(stderr=True)
    for comparison in found:
        console.print(table(comparison, peers, rates))
    products = ", ".join(f"{str(dtype)[6:]} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in rates.product.items())
    console.print(f"bounds are those of this machine: {products}, copy {rates.copy / 1e9:.1f} GB/s")
    if options.json:
        json.dump([comparison.record(peers, rates) for comparison in found], sys.stdout)
        print()
    return 0
