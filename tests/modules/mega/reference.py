"""The layer in plain torch, and inputs whose results are O(1): tiny weights would make comparisons vacuous."""

from __future__ import annotations

import torch

from hyper_mpmd import MegaMoeExperts

HIDDEN, INNER, EXPERTS, TOP_K = 48, 24, 8, 2
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS, "top_k": TOP_K}
PATTERNS = ("balanced", "zero-token experts", "skewed", "single destination")


def layer(**kwargs) -> MegaMoeExperts:
    """A layer of these sizes, any T up to 64 unless told, with weights of O(1) results."""
    if "local_num_tokens" not in kwargs:
        kwargs.setdefault("max_local_num_tokens", 64)
    made = MegaMoeExperts(**{**SIZES, **kwargs})
    if made.gate_up_weight is not None:
        fill_weights(made)
    return made


def all_weights(dtype: torch.dtype = torch.float32, experts: int = EXPERTS, seed: int = 11):
    """gate_up [E, H, 2I] and down [E, I, H] of all experts."""
    made = torch.Generator().manual_seed(seed)
    w1 = torch.randn(experts, HIDDEN, 2 * INNER, generator=made) / HIDDEN**0.5
    w2 = torch.randn(experts, INNER, HIDDEN, generator=made) / INNER**0.5 * 1.7
    return w1.to(dtype), w2.to(dtype)


def fill_weights(module: MegaMoeExperts, rank: int = 0, seed: int = 11) -> None:
    """This rank's share of `all_weights`."""
    with torch.no_grad():
        own = module.config.local_experts
        for weight, whole in zip(
            (module.gate_up_weight, module.down_weight),
            all_weights(experts=module.config.num_experts, seed=seed),
            strict=True,
        ):
            weight.copy_(whole[rank * own : (rank + 1) * own])


def batch(tokens: int, *, seed: int = 0, pattern: str = "random", dtype: torch.dtype = torch.float32, top_k=TOP_K):
    """hidden states, ids, weights of one rank; hidden states and weights want gradients."""
    made = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=made)
    if pattern == "zero-token experts":
        scores[:, ::3] -= 2
    elif pattern == "skewed":
        scores[:, 1] += torch.where(torch.rand(tokens, generator=made) < 0.8, 2.0, 0.0)
    elif pattern == "single destination":
        scores[:, -top_k:] += 2
    ids = scores.topk(top_k, dim=1).indices
    if pattern == "balanced":
        ids = (torch.arange(tokens * top_k) % EXPERTS).view(tokens, top_k)
    x = torch.randn(tokens, HIDDEN, generator=made).to(dtype).requires_grad_()
    weights = (torch.rand(tokens, top_k, generator=made) + 0.2).requires_grad_()
    return x, ids, weights


def plain(x, ids, weights, w1, w2, limit=None):
    """The layer in plain torch, expert by expert, in float64. limit: swiglu_limit."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    x, weights, w1, w2 = (t.double() for t in (x, weights, w1, w2))
    for expert in range(len(w1)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[expert]).chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert]
        y = y.index_add(0, token, weights[token, choice, None] * rows)
    return y


def rel(have: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over largest value."""
    have, want = have.detach().double(), want.detach().double()
    if want.numel() == 0:
        return 0.0 if have.shape == want.shape else float("inf")
    largest = float(want.abs().max())
    return float((have - want).abs().max()) / (largest or 1.0)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies that gradients of a second computation can go to."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]
