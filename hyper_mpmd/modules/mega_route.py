"""What a call brings, checked and turned into a route: rows in expert order, and how many go to each expert."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyper_mpmd.modules.mega_config import Config
from hyper_mpmd.modules.mega_errors import MegaMoeTypeError, MegaMoeValueError
from hyper_mpmd.modules.routing import sort_by_expert

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Set to 1: histograms that callers pass are compared with the ids.
CHECK_HISTOGRAM = "HYPER_MPMD_CHECK_HISTOGRAM"
_SORTS_FASTER = 1 << 16  # numpy sorts 16-bit integers by radix


@dataclass(frozen=True)
class Call:
    """The tensors of a call, as torch sees them: hidden [T, H], weights [T, K], and the rank's own w1 and w2.

    gather, back: see `sort_by_expert`. counts: rows for each expert, int64 [E].
    """

    hidden: torch.Tensor
    weights: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    gather: torch.Tensor
    back: torch.Tensor
    counts: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return len(self.hidden)


def check_call(
    config: Config,
    hidden_states: Any,
    topk_ids: Any,
    topk_weights: Any,
    tokens_per_expert: Any,
    expert_weights: tuple[Any, Any],
) -> Call:
    """The call, or MegaMoeValueError or MegaMoeTypeError with the value, the limit and the fix."""
    w1, w2 = expert_weights
    given = {
        "hidden_states": hidden_states,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "gate_up_weight": w1,
        "down_weight": w2,
    }
    if tokens_per_expert is not None:
        given["tokens_per_expert"] = tokens_per_expert
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise MegaMoeTypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")
    _check_devices(given)
    _check_dtypes(hidden_states, topk_ids, topk_weights, w1, w2)
    experts, hidden, inner = config.local_experts, config.hidden_size, config.local_intermediate
    _check_shape("gate_up_weight", w1, (experts, hidden, 2 * inner))
    _check_shape("down_weight", w2, (experts, inner, hidden))
    if hidden_states.dim() < 1 or hidden_states.shape[-1] != hidden:
        raise MegaMoeValueError(
            f"hidden_states has shape {list(hidden_states.shape)}; its last dimension must be {hidden}"
        )
    rows = hidden_states.reshape(hidden_states.shape[:-1].numel(), hidden)
    tokens = len(rows)
    if config.local_num_tokens is not None and tokens != config.local_num_tokens:
        raise MegaMoeValueError(
            f"hidden_states has {tokens} tokens, local_num_tokens is {config.local_num_tokens}; give "
            "max_local_num_tokens instead if T changes"
        )
    if tokens > config.most_tokens:
        raise MegaMoeValueError(f"hidden_states has {tokens} tokens, max_local_num_tokens is {config.most_tokens}")
    _check_shape("topk_ids", topk_ids, (tokens, config.top_k))
    _check_shape("topk_weights", topk_weights, (tokens, config.top_k))
    ids = topk_ids.detach().numpy()
    counts = _counts(config, ids, tokens_per_expert)
    if config.num_experts <= _SORTS_FASTER:
        ids = ids.astype(np.uint16)
    gather, back = sort_by_expert(ids)
    return Call(rows, topk_weights, w1, w2, torch.from_numpy(gather), torch.from_numpy(back), counts)


def _counts(config: Config, ids: NDArray[Any], histogram: torch.Tensor | None) -> NDArray[np.int64]:
    experts = config.num_experts
    if ids.size and (ids.min() < 0 or ids.max() >= experts):
        token, choice = np.argwhere((ids < 0) | (ids >= experts))[0].tolist()
        raise MegaMoeValueError(
            f"topk_ids[{token}, {choice}] is {ids[token, choice]}; expert ids are global, from 0 to {experts - 1}"
        )
    if histogram is None:
        return np.bincount(ids.ravel(), minlength=experts).astype(np.int64)
    if histogram.dtype not in (torch.int32, torch.int64):
        raise MegaMoeTypeError(f"tokens_per_expert is {histogram.dtype}; it must be int32 or int64")
    _check_shape("tokens_per_expert", histogram, (experts,))
    counts = histogram.detach().numpy().astype(np.int64)
    if (counts < 0).any():
        expert = int(counts.argmin())
        raise MegaMoeValueError(f"tokens_per_expert[{expert}] is {counts[expert]}; counts are not negative")
    if int(counts.sum()) != ids.size:
        raise MegaMoeValueError(
            f"tokens_per_expert adds up to {counts.sum()}; the {len(ids)} tokens have {ids.size} choices in topk_ids"
        )
    if os.environ.get(CHECK_HISTOGRAM) == "1":
        exact = np.bincount(ids.ravel(), minlength=experts)
        if (wrong := np.flatnonzero(exact != counts)).size:
            expert = int(wrong[0])
            raise MegaMoeValueError(
                f"tokens_per_expert[{expert}] is {counts[expert]}, but topk_ids names that expert {exact[expert]} times"
            )
    return counts


def _check_devices(given: dict[str, torch.Tensor]) -> None:
    devices = {name: tensor.device for name, tensor in given.items()}
    first = devices["hidden_states"]
    for name, device in devices.items():
        if device != first:
            raise MegaMoeValueError(f"hidden_states is on {first}, {name} on {device}; they must be on one device")
    if first.type != "cpu":
        raise MegaMoeValueError(f"hidden_states is on {first}; this engine runs on cpu")


def _check_dtypes(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise MegaMoeTypeError(f"topk_ids is {ids.dtype}; it must be int32 or int64")
    if not weights.dtype.is_floating_point:
        raise MegaMoeTypeError(f"topk_weights is {weights.dtype}; it must be a floating dtype")
    if hidden.dtype not in DTYPES:
        raise MegaMoeTypeError(f"hidden_states is {hidden.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    for name, weight in (("gate_up_weight", w1), ("down_weight", w2)):
        if weight.dtype != hidden.dtype:
            raise MegaMoeTypeError(
                f"hidden_states is {hidden.dtype}, {name} is {weight.dtype}; call .to(dtype=...) on one of them"
            )


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise MegaMoeValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
