"""Inputs of each rank for the graphs moe-ffn and moe-ffn-backward, made from a routing and a seed; outputs are O(1)."""

from __future__ import annotations

from collections.abc import Callable
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
    here = routing.experts // len(routing.ids)
    generator = torch.Generator().manual_seed(seed)
    normal = _normal(generator, dtype)
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


def make_backward_inputs(
    routing: Routing, hidden: int, intermediate: int, *, dtype: str = "float32", seed: int = 0
) -> list[dict[str, Any]]:
    """One dict of tensors a rank, the inputs of `moe_ffn_backward`."""
    forward = make_inputs(routing, hidden, intermediate, dtype=dtype, seed=seed)
    normal = _normal(torch.Generator().manual_seed(seed + 1), dtype)
    rows = routing.counts.reshape(len(routing.ids), len(routing.ids), -1).sum(axis=(0, 2))
    return [
        {
            "dy": normal(*own["x"].shape),
            "scores": by_routed_row(own["weights"], own["back"]),
            "places": own["back"].flatten(),
            "received": normal(int(received), hidden),
            "gate_up": normal(int(received), 2 * intermediate),
            **{name: own[name] for name in ("gather", "back", "w1", "w2")},
        }
        for own, received in zip(forward, rows, strict=True)
    ]


def by_routed_row(weights: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """The weight of each routed row, [T * K], from weights and back, both [T, K]."""
    scores = torch.empty(back.numel(), dtype=weights.dtype)
    scores[back.reshape(-1).long()] = weights.reshape(-1)
    return scores


def _normal(generator: torch.Generator, dtype: str) -> Callable[..., torch.Tensor]:
    kind = DTYPES[dtype]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(kind)

    return normal
