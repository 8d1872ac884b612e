"""MegaMoeExperts forward and backward against eager torch, on one rank and over two processes with gloo.

    python benchmarks/train_layer.py [--rounds 7] [--json]

Every round brings a routing of its own, so sorting, exchange and planning are part of every contender's time. The eager
layers send rows by all-to-all and compute an expert at a time, or all of them by torch's grouped product.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Comparison, interleave, main
from torch.distributed.nn.functional import all_to_all_single

from hyper_mpmd import MegaMoeExperts
from hyper_mpmd.testing import RankPools

PEERS = ("torch loop", "torch grouped")
_ROUTINGS = 64  # as many as rounds and warm-up take, so that none is met twice


@dataclass(frozen=True)
class Shape:
    """tokens: of each rank."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = (
    Shape("training step", tokens=1024, hidden=512, intermediate=256, experts=8, top_k=2),
    Shape("many experts", tokens=512, hidden=256, intermediate=128, experts=64, top_k=6),
)


def eager(shape: Shape, ranks: int, grouped: bool) -> Callable[..., torch.Tensor]:
    """The layer in eager torch: y of x [T, H], ids and weights [T, K], and this rank's w1 and w2."""

    def feed_forward(rows: torch.Tensor, counts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        if grouped:
            ends = counts.cumsum(0).int()
            gate, up = torch._grouped_mm(rows, w1, offs=ends).chunk(2, dim=-1)
            return torch._grouped_mm(F.silu(gate) * up, w2, offs=ends)
        made = []
        for expert, part in enumerate(rows.split(counts.tolist())):
            gate, up = (part @ w1[expert]).chunk(2, dim=-1)
            made.append((F.silu(gate) * up) @ w2[expert])
        return torch.cat(made)

    def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        made: torch.Tensor = all_to_all_single(rows.new_empty((sum(received), rows.shape[1])), rows, received, sent)
        return made

    def layer(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        token = order // shape.top_k
        counts = torch.bincount(ids.flatten(), minlength=shape.experts)
        rows = x[token]
        if ranks == 1:
            rows = feed_forward(rows, counts, w1, w2)
        else:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts)
            by_source = arriving.view(ranks, -1)
            sent, received = counts.view(ranks, -1).sum(1).tolist(), by_source.sum(1).tolist()
            rows = exchange(rows, sent, received)
            local = torch.arange(by_source.shape[1]).repeat(ranks).repeat_interleave(arriving).argsort(stable=True)
            rows = feed_forward(rows[local], by_source.sum(0), w1, w2)
            rows = exchange(torch.empty_like(rows).index_copy(0, local, rows), received, sent)
        scale = weights.flatten()[order]
        return torch.zeros_like(x).index_add(0, token, rows * scale[:, None].to(rows.dtype))

    return layer


def seconds(shape: Shape, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds a contender and round, of this rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    made = torch.Generator().manual_seed(rank)
    experts, pulling = (
        MegaMoeExperts(
            local_num_tokens=shape.tokens, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_experts=shape.experts, top_k=shape.top_k, ep_size=ranks, dtype=dtype, dispatch_mode=mode,
            create_parameters=mode == "push",
        )
        for mode in ("push", "pull")
    )  # fmt: skip
    assert experts.gate_up_weight is not None
    assert experts.down_weight is not None
    w1, w2 = experts.gate_up_weight, experts.down_weight
    x = torch.randn(shape.tokens, shape.hidden, generator=made).to(dtype).requires_grad_()
    dy = torch.randn(shape.tokens, shape.hidden, generator=made).to(dtype)
    popular = torch.arange(1, shape.experts + 1).float().log() * -0.6  # as zipf:0.6
    routings = []
    for _ in range(_ROUTINGS):
        noise = -torch.rand(shape.tokens, shape.experts, generator=made).log().neg().log()
        weights, ids = (popular + noise).topk(shape.top_k)
        routings.append((ids, weights.softmax(-1)))
    loop, grouped = (eager(shape, ranks, way) for way in (False, True))

    def pull(*call: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = pulling(*call, expert_weights=(w1, w2))
        return made

    def step(layer: Callable[..., torch.Tensor], turns: Iterator[int], *parameters: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            ids, weights = routings[next(turns)]
            for tensor in (x, w1, w2):
                tensor.grad = None
            layer(x, ids, weights.clone().requires_grad_(), *parameters).backward(dy)

        return run

    contenders = {
        "MegaMoeExperts": step(experts, itertools.cycle(range(_ROUTINGS))),
        **({"MegaMoeExperts, pull": step(pull, itertools.cycle(range(_ROUTINGS)))} if ranks > 1 else {}),
        "torch loop": step(loop, itertools.cycle(range(_ROUTINGS)), w1, w2),
        "torch grouped": step(grouped, itertools.cycle(range(_ROUTINGS)), w1, w2),
    }
    ids, weights = routings[0]
    with torch.no_grad():
        want = experts(x, ids, weights)
        for layer in (loop, grouped):
            error = float((layer(x, ids, weights, w1, w2) - want).abs().max() / want.abs().max())
            if not error < (1e-4 if dtype is torch.float32 else 5e-2):
                raise SystemExit(f"eager torch and MegaMoeExperts differ by {error}: nothing to compare")
    # Over ranks no time limit of this rank's own: all run as many rounds.
    found = interleave(contenders, rounds, limit_s=60.0 if ranks == 1 else float("inf"))
    experts.close()
    pulling.close()
    return found


def compare(shape: Shape, dtype: torch.dtype, rounds: int, ranks: int, pools: RankPools) -> Comparison:
    if ranks == 1:
        found = seconds(shape, dtype, rounds)
    else:
        each = pools[ranks].run(seconds, shape, dtype, rounds, timeout=300.0)
        found = {name: [max(times) for times in zip(*(own[name] for own in each), strict=True)] for name in each[0]}
    rows, weights = ranks * shape.tokens * shape.top_k, 3 * shape.experts * shape.hidden * shape.intermediate
    title = (
        f"{shape.name}, EP {ranks}, {str(dtype)[6:]}: {shape.tokens} tokens a rank x {shape.top_k} of {shape.experts} "
        f"experts, hidden {shape.hidden}, intermediate {shape.intermediate}, forward and backward"
    )
    return Comparison(
        title,
        found,
        flops=3 * 2 * rows * 3 * shape.hidden * shape.intermediate,
        bytes=3 * weights * dtype.itemsize,
        dtype=dtype,
    )


def run(rounds: int) -> list[Comparison]:
    with RankPools() as pools:
        return [
            compare(shape, dtype, min(rounds, _ROUTINGS - 2), ranks, pools)
            for shape in SHAPES
            for ranks in (1, 2)
            for dtype in (torch.float32, torch.bfloat16)
        ]


if __name__ == "__main__":
    sys.exit(main(__doc__.partition("\n")[0], run, PEERS))
