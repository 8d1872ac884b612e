"""The dense SwiGLU feed-forward, used as the shared expert of an MoE block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hyper_mpmd.expert_parallel.errors import check_size


class FeedForward(nn.Module):
    """w2(silu(w1 x) · w3 x).

    Args:
        dim: width H of input and output.
        hidden_dim: width I in between.
        bias: give all three linear layers a bias.
    """

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        check_size("dim", dim)
        check_size("hidden_dim", hidden_dim)
        self.w1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] of any floating dtype; the result has its shape and dtype, the arithmetic that of the weights."""
        inner = x.to(self.w1.weight.dtype)
        out: torch.Tensor = self.w2(F.silu(self.w1(inner)) * self.w3(inner))
        return out.to(x.dtype)
