"""The whole job on a real text: bytes, embedding, router, top-k, then the feed-forward of the chosen experts.

    make demo-ffn    or        python examples/demo.py [--text FILE] [--tokens N] [--rounds N]

Letters of a text are anything but evenly spread, so neither are its tokens over the experts. The feed-forward (Permute,
GMM1, SwiGLU, GMM2, Unpermute) is planned for exactly that histogram, under O0 and O1, executed here, compared with
plain torch and drawn.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hyper_mpmd as hm
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.moe_inputs import make_inputs
from hyper_mpmd.modules.routing import Routing
from hyper_mpmd.viz.terminal import draw
from hyper_mpmd.viz.units import duration, percent

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from harness import busy_warning, interleave, median, spread, times_as_fast
from torch_moe import peers

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 768, 768, 16, 2
SEED = 0


def read_text(file: Path | None, tokens: int) -> bytes:
    """The first bytes of the file; without one, of the topics that Python's own `help()` shows."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode() if file is None else file.read_bytes()
    if not text:
        raise SystemExit(f"{file} is empty; the demo needs at least one byte of text")
    return text[:tokens]


def route(text: bytes) -> tuple[dict[str, Any], Routing]:
    """The inputs of graph moe-ffn: a token a byte, embedded, and sent to the K experts that the router likes best."""
    generator = torch.Generator().manual_seed(SEED)
    x_TH = torch.randn(256, HIDDEN, generator=generator)[torch.tensor(list(text))]
    router_HE = torch.randn(HIDDEN, EXPERTS, generator=generator) / HIDDEN**0.5
    weights_TK, ids_TK = (x_TH @ router_HE).softmax(dim=-1).topk(TOP_K)
    routing = Routing((ids_TK.int().numpy(),), EXPERTS)
    (given,) = make_inputs(routing, HIDDEN, INTERMEDIATE, seed=SEED)
    given["x"] = x_TH
    given["weights"] = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return given, routing


def histogram(console: Console, text: bytes, routing: Routing) -> None:
    """Rows of each expert, and the letters that went there most."""
    counts = routing.counts[0].tolist()
    letters: list[Counter[int]] = [Counter() for _ in counts]
    for byte, ids in zip(text, routing.ids[0].tolist(), strict=True):
        for expert in ids:
            letters[expert][byte] += 1
    table = Table(title="where the text goes", title_justify="left", box=None, header_style="dim")
    table.add_column("expert", justify="right")
    table.add_column("rows", justify="right")
    table.add_column("")
    table.add_column("most of all")
    width = max(10, min(60, console.width - 50))
    for expert, count in enumerate(counts):
        bar = "━" * round(count / max(counts) * width)
        common = " ".join("␣" if b == 32 else repr(chr(b))[1:-1] for b, _ in letters[expert].most_common(5))
        table.add_row(str(expert), f"{count:,}", Text(bar, "#E69F00"), Text(common))
    console.print(table)
    mean = sum(counts) / len(counts)
    console.print(f"the busiest expert has {max(counts) / mean:.1f} times the mean; {counts.count(0)} have no rows\n")


def max_rel_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y - reference).abs().max() / reference.abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a text file (default: the topics of Python's help)")
    parser.add_argument("--tokens", type=int, default=2048, help="how many bytes of it (default 2048)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the comparison (default 7)")
    options = parser.parse_args()
    if options.tokens < 1 or options.rounds < 1:
        parser.error("--tokens and --rounds must be at least 1")
    console = Console(highlight=False)

    text = read_text(options.text, options.tokens)
    given, routing = route(text)
    console.rule(f"[bold]{len(text):,} bytes of English through {EXPERTS} experts, {TOP_K} each")
    console.print(f"hidden {HIDDEN}, intermediate {INTERMEDIATE}, float32\n")
    histogram(console, text, routing)

    graph = moe_ffn(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
    plans = {policy: hm.compile(graph, routing.loads(), policy=policy) for policy in ("O0", "O1")}
    torch_peers = peers(given, routing.counts[0].tolist())
    contenders = {
        **{name: lambda plan=plan: plan.run(**given)["y"] for name, plan in plans.items()},
        **torch_peers,
    }
    reference = plans["O1"].run(engine="reference", **given)["y"]
    outputs = {name: call() for name, call in contenders.items()}
    errors = {name: max_rel_error(y, reference) for name, y in outputs.items()}
    seconds = interleave(contenders, options.rounds, warm=1, limit_s=15.0)
    planning = interleave({"planning": lambda: hm.compile(graph, routing.loads())}, options.rounds)["planning"]

    table = Table(title="one step of the feed-forward", title_justify="left")
    for name in ("", "median", "spread", *(f"x {peer}" for peer in torch_peers), "max rel error"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    names = {"O0": "O0, op by op", "O1": "O1, one fused run"}
    for name, times in seconds.items():
        table.add_row(
            names.get(name, name),
            duration(median(times) * 1e9),
            f"±{percent(spread(times) / 2)}",
            *(f"{times_as_fast(times, seconds[peer]):.2f}" for peer in torch_peers),
            f"{errors[name]:.1e}",
        )
    console.print(table)
    same = torch.equal(outputs["O0"], outputs["O1"])
    planned = f"a step is planned in {duration(median(planning) * 1e9)}"
    console.print(f"O0 and O1 {'agree bit for bit' if same else '[bold red]DIFFER[/]'}; {planned}")
    if warning := busy_warning():
        console.print(f"[yellow]{warning}")
    kinds = [node.core for node in graph.nodes]
    for policy, plan in plans.items():
        console.print()
        timelines = [plan.run_measured(**given)[1] for _ in range(options.rounds)]
        fastest = min(timelines, key=lambda timeline: timeline.makespan_ns)
        draw(fastest, kinds, console, title=f"{policy} (fastest of {len(timelines)} runs)")
    worst = max(errors["O0"], errors["O1"])
    console.print(f"\nmax relative error against plain torch: {worst:.1e}")
    return 0 if same and worst <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
