"""Inputs of each rank for the graphs moe-ffn and moe-ffn-backward, made from a routing and a seed; outputs are O(1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_mpmd.modules.routing import Routing, sort_by_expert
from hyper_mpmd.modules.tensor_parallel import score_places, shard_down, shard_gate_up, share_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Root mean square of silu(g) * u for independent standard normal g and u.
_SWIGLU_RMS = 0.596


def make_inputs(
    routing: Routing, hidden: int, intermediate: int, *, dtype: str = "float32", seed: int = 0
) -> list[dict[str, Any]]:
    """One dict of tensors a rank: x, gather, back, weights, w1, w2, shares (see `moe_ffn`). Experts are shared out in
    order. The same layer whatever routing.tp: ranks of a team hold shards of the weights that one rank would hold."""
    here = routing.experts // len(routing.ids)
    generator = torch.Generator().manual_seed(seed)
    normal = _normal(generator, dtype)
    made = []
    for ids in routing.ids:
        gather, back = sort_by_expert(ids)
        whole = {
            "x": normal(len(ids), hidden),
            "gather": torch.from_numpy(gather),
            "back": torch.from_numpy(back),
            "weights": torch.randn(ids.shape, generator=generator).softmax(dim=-1),
            "w1": normal(here, hidden, 2 * intermediate, scale=hidden**-0.5),
            "w2": normal(here, intermediate, hidden, scale=intermediate**-0.5 / _SWIGLU_RMS),
        }
        made += [_sharded(whole, len(ids), routing.tp, place) for place in range(routing.tp)]
    return made


def make_backward_inputs(
    routing: Routing, hidden: int, intermediate: int, *, dtype: str = "float32", seed: int = 0
) -> list[dict[str, Any]]:
    """One dict of tensors a rank, the inputs of `moe_ffn_backward`."""
    forward = make_inputs(routing, hidden, intermediate, dtype=dtype, seed=seed)
    normal = _normal(torch.Generator().manual_seed(seed + 1), dtype)
    ranks, tp = len(routing.ids), routing.tp
    made: list[dict[str, Any]] = []
    for number, rows in enumerate(routing.counts.reshape(ranks, ranks, -1).sum(axis=(0, 2)).tolist()):
        team = forward[number * tp : (number + 1) * tp]
        dy, received, gate_up = normal(*team[0]["x"].shape), normal(rows, hidden), normal(rows, 2 * intermediate)
        scores = by_routed_row(team[0]["weights"], team[0]["back"])
        for place, own in enumerate(team):
            made.append(
                {
                    "dy": dy,
                    "scores": scores,
                    "received": received,
                    "places": places_of(own["back"], tp),
                    "gate_up": shard_gate_up(gate_up, tp, place),
                    **{name: own[name] for name in ("gather", "back", "w1", "w2", "shares") if name in own},
                }
            )
    return made


def by_routed_row(weights: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """The weight of each routed row, [T * K], from weights and back, both [T, K]."""
    scores = torch.empty(back.numel(), dtype=weights.dtype)
    scores[back.reshape(-1).long()] = weights.reshape(-1)
    return scores


def places_of(back: torch.Tensor, tp: int) -> torch.Tensor:
    """The input places of `moe_ffn_backward`, from back [T, K]."""
    return back.flatten() if tp == 1 else torch.from_numpy(score_places(back.numpy(), tp))


def _sharded(whole: dict[str, torch.Tensor], tokens: int, tp: int, place: int) -> dict[str, torch.Tensor]:
    """What the rank at this place of a team gets of the inputs that one rank would get."""
    if tp == 1:
        return whole
    shares = torch.from_numpy(share_rows(tokens, tp, place))
    w1, w2 = shard_gate_up(whole["w1"], tp, place), shard_down(whole["w2"], tp, place)
    return {**whole, "w1": w1, "w2": w2, "shares": shares}


def _normal(generator: torch.Generator, dtype: str) -> Callable[..., torch.Tensor]:
    kind = DTYPES[dtype]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(kind)

    return normal
