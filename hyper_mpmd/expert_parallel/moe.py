"""The MoE block: route, permute, run the experts, bring home, add the shared expert.

Shapes: x [..., H] flattens to T tokens; k choices a token; E experts over all ranks; rows [T·k, H] expert after expert.
The block knows nothing of ranks: a parallel style on `moe.experts` does all communication inside that one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, ExpertParallelTypeError, check_finite
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts
from hyper_mpmd.expert_parallel.load_balance import GroupLike, add_load_balance_loss, sum_over_groups
from hyper_mpmd.expert_parallel.permute import permutation, scale_rows, unpermutation
from hyper_mpmd.expert_parallel.router import TokenChoiceTopKRouter


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward.

    Args:
        dim: width H.
        hidden_dim: width I of an expert.
        num_experts: E.
        top_k: experts a token.
        score_before_experts: True scales an expert's input by the token's score, False weighs its output.
        load_balance_coeff: weight of the auxiliary loss, or None for none. The loss acts through the router's gradient
            by itself; do not add it to yours. Its value is `output._load_balance_loss` and `moe.last_aux_loss`.
        shared_expert: a module that every token goes through as well, [..., H] to [..., H], such as `FeedForward`.
        router_kwargs: further arguments of `TokenChoiceTopKRouter`.
        use_grouped_mm: see `GroupedExperts`.

    Attributes:
        expert_bias: buffer [E] fp32, saved, moved by `update_expert_bias`.
        tokens_per_expert: buffer [E] int64, not saved: choices since the last update, counted in training, once under
            activation checkpointing. Both keep their dtype under `.bfloat16()`, `.half()` and `.double()`.
        aux_loss_scale: factor on the auxiliary loss's gradient (not on its value), a float or 0-dim tensor: 1 / number
            of accumulated micro-batches, times a GradScaler's scale, times this rank's share of all tokens where the
            losses of ranks add up (`reduce_gradients(..., reduction="sum")`).
        aux_loss_group: what to sum the expert counts over for the auxiliary loss (see `update_expert_bias`), so that it
            balances the batch of all those ranks. None: each rank's own tokens.
        last_aux_loss: value of the last forward's auxiliary loss, coefficient included, 0-dim fp32; None if there is
            none.
    """

    expert_bias: torch.Tensor
    tokens_per_expert: torch.Tensor

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 1,
        score_before_experts: bool = True,
        load_balance_coeff: float | None = None,
        shared_expert: nn.Module | None = None,
        router_kwargs: Mapping[str, Any] | None = None,
        use_grouped_mm: bool = False,
    ) -> None:
        super().__init__()
        if shared_expert is not None and not isinstance(shared_expert, nn.Module):
            raise ExpertParallelTypeError(f"shared_expert must be a module or None, got {type(shared_expert).__name__}")
        if load_balance_coeff is not None:
            check_finite("load_balance_coeff", load_balance_coeff, above_zero=False)
        self.dim = dim
        self.top_k = top_k
        self.score_before_experts = score_before_experts
        self.load_balance_coeff = load_balance_coeff
        self.aux_loss_scale: float | torch.Tensor = 1.0
        self.aux_loss_group: GroupLike | None = None
        self.last_aux_loss: torch.Tensor | None = None
        self.router = TokenChoiceTopKRouter(dim, num_experts, top_k, **(router_kwargs or {}))
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, use_grouped_mm)
        self.shared_expert = shared_expert
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero the two buffers, after `to_empty`; weights belong to the submodules, which have methods of this name."""
        self.expert_bias.zero_()
        self.tokens_per_expert.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] with any leading dims, also of size 0; the result has its shape and dtype."""
        if x.ndim < 1 or x.shape[-1] != self.dim:
            raise ExpertParallelError(f"x must be [..., {self.dim}], got {list(x.shape)}")
        tokens = x.reshape(-1, self.dim)
        top_scores, selected, counts = self.router(tokens, self.expert_bias)
        recomputing = in_backward()
        if self.training and not recomputing:
            with torch.no_grad():
                self.tokens_per_expert += counts
        loss = None
        if self.load_balance_coeff is not None:
            scale = self.aux_loss_scale if self.training else 0.0
            shared_counts = sum_over_groups(counts, self.aux_loss_group)
            top_scores, loss = add_load_balance_loss(
                top_scores, selected, shared_counts, self.load_balance_coeff, scale
            )
        rows, order = permutation(tokens, selected)
        if self.score_before_experts:
            rows = scale_rows(rows, top_scores.reshape(-1)[order])
        rows = self.experts(rows, counts)
        # Between the experts and the first use of their rows: with ExpertParallel(async_combine=True) the rows are
        # still on their way while the shared expert computes.
        shared = None if self.shared_expert is None else self.shared_expert(x)
        flat = unpermutation(rows, order, self.top_k, None if self.score_before_experts else top_scores)
        # Not view(): on a view, fully_shard warns that its hook is lost if the caller writes into the output in place.
        out: torch.Tensor = torch.ops.aten._unsafe_view(flat, x.shape)
        if shared is not None:
            if shared.shape != x.shape:
                raise ExpertParallelError(
                    f"shared_expert must keep the shape of x, {list(x.shape)}, but returned {list(shared.shape)}"
                )
            out = (out + shared).to(x.dtype)
        if loss is not None:
            out._load_balance_loss = loss  # type: ignore[attr-defined]  # the guide's name
            if not recomputing:
                self.last_aux_loss = loss
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MoE:
        # `.bfloat16()` and its like would round the bias, and a bias of 1e-3 steps with it, and `.type(torch.half)` the
        # counts too: follow moves, not casts.
        kept = {"expert_bias": self.expert_bias, "tokens_per_expert": self.tokens_per_expert}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # With assign=True the checkpoint's own tensor, in its own dtype, would become the buffer.
        saved = state_dict.get(prefix + "expert_bias")
        if isinstance(saved, torch.Tensor):
            state_dict[prefix + "expert_bias"] = saved.to(torch.float32)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward in it is one that activation checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1
