"""Slow and obvious MoE mathematics, and how tests compare: by an error relative to values that are not small."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_mpmd.expert_parallel import FeedForward, MoE


def relative_error(actual, expected, floor=1e-3):
    """max |actual - expected| / max |expected|; refuses an `expected` so small that a zero would pass for it."""
    actual, expected = full(actual).double(), full(expected).double()
    assert actual.shape == expected.shape
    # max(0.0, nan) is 0.0 in Python: a NaN would pass for no error at all.
    assert actual.isfinite().all(), "not finite"
    assert expected.isfinite().all(), "not finite"
    largest = expected.abs().max().item()
    assert largest > floor, f"nothing to compare with: the largest value is {largest}"
    return (actual - expected).abs().max().item() / largest


def full(tensor):
    """The whole of a tensor that may be spread over ranks, without its graph."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill_with_values_of_order_one(module, seed=0):
    """Weights such that every layer keeps its input's size; drawn in a fixed order, so equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.0 / fan_in**0.5))
    return module


class Model(nn.Module):
    """Dense parameters before the MoE block, which has experts, a router and a shared expert."""

    def __init__(self, dim=16, hidden_dim=24, num_experts=8, top_k=2, **moe_options):
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.moe = MoE(dim, hidden_dim, num_experts, top_k, shared_expert=FeedForward(dim, hidden_dim), **moe_options)
        fill_with_values_of_order_one(self)

    def forward(self, x):
        return x + self.moe(self.dense(x))


def swiglu_row(row, w1, w2, w3):
    return w2 @ (F.silu(w1 @ row) * (w3 @ row))


def experts_by_row(experts, x, counts, scores=None):
    """GroupedExperts, one row at a time."""
    expert_of_row = torch.repeat_interleave(torch.arange(len(counts)), counts).tolist()
    rows = []
    for n, expert in enumerate(expert_of_row):
        row = swiglu_row(x[n], experts.w1[expert], experts.w2[expert], experts.w3[expert])
        rows.append(row if scores is None else row * scores[n])
    return torch.stack(rows) if rows else x.clone()


def moe_by_token(moe, x):
    """MoE, one token and one expert at a time, on the router's own choice."""
    tokens = x.reshape(-1, x.shape[-1])
    scores, selected, _ = moe.router(tokens, moe.expert_bias)
    experts = moe.experts
    out = []
    for t, token in enumerate(tokens):
        total = torch.zeros_like(token)
        for choice, expert in enumerate(selected[t].tolist()):
            weights = experts.w1[expert], experts.w2[expert], experts.w3[expert]
            score = scores[t, choice]
            if moe.score_before_experts:
                total = total + swiglu_row(token * score, *weights)
            else:
                total = total + swiglu_row(token, *weights) * score
        out.append(total)
    result = torch.stack(out).view(x.shape)
    return result if moe.shared_expert is None else result + moe.shared_expert(x)
