"""The table of arXiv 2605.23764 beside simulations of this library's plans under one set of constants, none fitted.

The paper's layer: DeepSeek-V3 experts (H 7168, I 2048, top-8, bf16), 8 experts and 4096 tokens (32768 routed rows) a
rank, from dispatch to combine. Serial is policy `serial` (op by op on the whole device), published the paper's own
schedule (expert-grained waits, strided queues), ours O1. Paper figures are of balanced routing only. Times in
milliseconds of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import hyper_mpmd as hm
from hyper_mpmd.modules.routing import make_routing
from hyper_mpmd.scheduler.simulate import Simulation
from hyper_mpmd.tasks import Team

HIDDEN, INTERMEDIATE, TOP_K, LOCAL_EXPERTS, TOKENS = 7168, 2048, 8, 8, 4096
RANKS = (4, 8, 16)
ROUTINGS = ("balanced", "zipf:0.5", "zipf:1.0", "zipf:1.2", "single")
# (EP, direction) -> milliseconds of the paper's baseline and of its result
PAPER = {
    (4, "forward"): (16.3, 10.2),
    (8, "forward"): (17.3, 10.3),
    (16, "forward"): (18.4, 11.2),
    (4, "backward"): (27.9, 19.4),
    (8, "backward"): (29.8, 19.6),
    (16, "backward"): (30.5, 19.9),
}


def forward(ranks: int) -> hm.TaskGraph:
    """dispatch, up, act, down, combine of rows that are already in order of their experts."""
    g = hm.TaskGraph("forward", ranks=ranks)
    x = g.input("x", (g.rows("routed", groups=LOCAL_EXPERTS * ranks), HIDDEN), "bfloat16")
    w1 = g.input("w1", (LOCAL_EXPERTS, HIDDEN, 2 * INTERMEDIATE), "bfloat16")
    w2 = g.input("w2", (LOCAL_EXPERTS, INTERMEDIATE, HIDDEN), "bfloat16")
    up = g.cube("up", hm.ops.GroupedMatmul(), g.comm("dispatch", hm.ops.Dispatch(), x), w1)
    down = g.cube("down", hm.ops.GroupedMatmul(), g.vector("act", hm.ops.SwiGLU(), up), w2)
    g.output("y", g.comm("combine", hm.ops.Combine(), down))
    return g


def backward(ranks: int) -> hm.TaskGraph:
    """dispatch(dy), act_grad and w2_grad, swiglu_grad, gate_grad and w1_grad, combine."""
    g = hm.TaskGraph("backward", ranks=ranks)
    routed = g.rows("routed", groups=LOCAL_EXPERTS * ranks)
    space = g.routed_rows(routed, "scatter", team=Team(ranks, 1))
    dy = g.input("dy", (routed, HIDDEN), "bfloat16")
    received = g.input("received", (space, HIDDEN), "bfloat16")
    gate_up = g.input("gate_up", (space, 2 * INTERMEDIATE), "bfloat16")
    act = g.input("act", (space, INTERMEDIATE), "bfloat16")
    scores = g.input("scores", (space,))
    w1 = g.input("w1", (LOCAL_EXPERTS, HIDDEN, 2 * INTERMEDIATE), "bfloat16")
    w2 = g.input("w2", (LOCAL_EXPERTS, INTERMEDIATE, HIDDEN), "bfloat16")
    rows = g.comm("dispatch", hm.ops.Dispatch(), dy)
    g.output("dw2", g.cube("w2_grad", hm.ops.GroupedMatmulDW(groups=LOCAL_EXPERTS), act, rows))
    d_act = g.cube("act_grad", hm.ops.GroupedMatmulT(), rows, w2)
    d_gate_up, d_scores = g.vector("swiglu_grad", hm.ops.SwiGLUGrad(), gate_up, d_act, scores)
    g.output("d_scores", d_scores)
    g.output("dx", g.comm("combine", hm.ops.Combine(), g.cube("gate_grad", hm.ops.GroupedMatmulT(), d_gate_up, w1)))
    g.output("dw1", g.cube("w1_grad", hm.ops.GroupedMatmulDW(groups=LOCAL_EXPERTS), received, d_gate_up))
    return g


def simulated(graph: hm.TaskGraph, ranks: int, pattern: str, policy: str, device: Any) -> Simulation:
    """One cell of the table."""
    experts = LOCAL_EXPERTS * ranks
    routing = make_routing(pattern, tokens=TOKENS, experts=experts, top_k=TOP_K, ranks=ranks, tp=1, seed=0)
    loads = {"routed": routing.loads()["routed"]}
    return hm.compile(graph, loads, world=ranks, device=device, policy=policy, prove=False).simulate()


def rows(ranks: tuple[int, ...], routings: tuple[str, ...], device: Any) -> list[dict[str, Any]]:
    """The table."""
    found = []
    for ep in ranks:
        for direction, build in (("forward", forward), ("backward", backward)):
            graph = build(ep)
            for routing in routings:
                serial = simulated(graph, ep, routing, "serial", device)
                published = simulated(graph, ep, routing, "published", device)
                ours = simulated(graph, ep, routing, "O1", device)
                paper = PAPER.get((ep, direction)) if routing == "balanced" else None
                found.append(
                    {
                        "ep": ep,
                        "direction": direction,
                        "routing": routing,
                        "serial_ms": serial.makespan_ns / 1e6,
                        "published_ms": published.makespan_ns / 1e6,
                        "ours_ms": ours.makespan_ns / 1e6,
                        "bound_ms": ours.bounds.largest[1] / 1e6,
                        "bound": ours.bounds.largest[0],
                        "exposed_comm_ms": ours.exposed_comm_ns() / 1e6,
                        "paper_serial_ms": None if paper is None else paper[0],
                        "paper_ms": None if paper is None else paper[1],
                    }
                )
    return found


def table(found: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table(title="dispatch to combine, ms, simulated on ascend-a3", title_justify="left")
    for heading in (
        "EP",
        "direction",
        "routing",
        "serial",
        "paper's",
        "published",
        "paper's",
        "ours",
        "bound",
        "of bound",
    ):
        words = heading in ("direction", "routing")
        shown.add_column(heading, justify="left" if words else "right", no_wrap=words, min_width=8 if words else 1)
    for row in found:
        times = [
            "" if row[name] is None else f"{row[name]:.1f}"
            for name in ("serial_ms", "paper_serial_ms", "published_ms", "paper_ms", "ours_ms", "bound_ms")
        ]
        share = f"{row['bound_ms'] / row['ours_ms']:.0%}"
        shown.add_row(str(row["ep"]), row["direction"], row["routing"], *times, share)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ep", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--routing", nargs="+", default=list(ROUTINGS))
    parser.add_argument("--rounds", type=int, default=1, help="taken for `make bench`; a simulation needs one")
    options = parser.parse_args()
    begin = time.perf_counter()
    found = rows(tuple(options.ep), tuple(options.routing), "ascend-a3")
    Console(stderr=options.json).print(table(found))
    print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
