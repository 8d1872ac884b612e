"""Inputs for graph moe-ffn, for each rank, made from its routing and a seed; scaled so that outputs are O(1)."""

from __future__ import annotations

from typing import Any

import torch

from hyper_mpmd.modules.routing import Routing, sort_by_expert

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Root mean square of silu(g) * u for independent standard normal g and u.
_SWIGLU_RMS = 0.596


def make_inputs(
    routing: Routing, hidden: int, intermediate: int, *, dtype: str = "float32", seed: int = 0
) -> list[dict[str, Any]]:
    """One dict of tensors a rank: x, gather, back, weights, w1, w2 (see `moe_ffn`). Experts are shared out in order."""
    ranks = len(routing.ids)
    here = routing.experts // ranks
    generator = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(kind)

    made = []
    for ids in routing.ids:
        gather, back = sort_by_expert(ids)
        made.append(
            {
                "x": normal(len(ids), hidden),
                "gather": torch.from_numpy(gather),
                "back": torch.from_numpy(back),
                "weights": torch.randn(ids.shape, generator=generator).softmax(dim=-1),
                "w1": normal(here, hidden, 2 * intermediate, scale=hidden**-0.5),
                "w2": normal(here, intermediate, hidden, scale=intermediate**-0.5 / _SWIGLU_RMS),
            }
        )
    return made
