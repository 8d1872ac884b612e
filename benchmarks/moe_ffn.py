"""moe-ffn under O0 and O1 against eager torch, and against what the machine's products and memory allow.

    python benchmarks/moe_ffn.py [--rounds 7] [--json]

Plans are kept, as for steps with equal counts; "O1 + planning" plans every step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from harness import Comparison, interleave, main
from torch_moe import peers

import hyper_mpmd as hm
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.moe_inputs import DTYPES, make_inputs
from hyper_mpmd.modules.routing import make_routing


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    routing: str = "zipf:1.2"


SHAPES = (
    Shape("prefill", tokens=1024, hidden=1024, intermediate=512, experts=8, top_k=2),
    Shape("prefill, balanced", tokens=1024, hidden=1024, intermediate=512, experts=8, top_k=2, routing="balanced"),
    Shape("many experts", tokens=512, hidden=512, intermediate=256, experts=64, top_k=6),
    Shape("few rows an expert", tokens=16, hidden=1024, intermediate=512, experts=32, top_k=4),
)
PEERS = ("torch loop", "torch grouped")


def compare(shape: Shape, dtype: str, rounds: int) -> Comparison:
    routing = make_routing(shape.routing, tokens=shape.tokens, experts=shape.experts, top_k=shape.top_k)
    graph = moe_ffn(shape.hidden, shape.intermediate, shape.experts, shape.top_k, dtype=dtype)  # type: ignore[arg-type]
    (given,) = make_inputs(routing, shape.hidden, shape.intermediate, dtype=dtype)
    o0, o1 = (hm.compile(graph, routing.loads(), policy=policy) for policy in ("O0", "O1"))
    counts = routing.counts[0]
    contenders = {
        "O0": lambda: o0.run(**given),
        "O1": lambda: o1.run(**given),
        "O1 + planning": lambda: hm.compile(graph, routing.loads()).run(**given),
        **peers(given, counts.tolist()),
    }
    rows, item = int(counts.sum()), DTYPES[dtype].itemsize
    weights = int((counts > 0).sum()) * 3 * shape.hidden * shape.intermediate
    title = (
        f"{shape.name}, {dtype}: {shape.tokens} tokens x {shape.top_k} of {shape.experts} experts, "
        f"hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.routing}"
    )
    return Comparison(
        title,
        interleave(contenders, rounds),
        flops=2 * rows * 3 * shape.hidden * shape.intermediate,
        bytes=(weights + 2 * shape.tokens * shape.hidden) * item,
        dtype=DTYPES[dtype],
    )


def run(rounds: int) -> list[Comparison]:
    return [compare(shape, dtype, rounds) for shape in SHAPES for dtype in ("float32", "bfloat16")]


if __name__ == "__main__":
    sys.exit(main(__doc__.partition("\n")[0], run, PEERS))
