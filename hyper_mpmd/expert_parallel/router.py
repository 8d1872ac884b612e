"""The router: which k experts a token goes to, and with which weight.

The plain router follows the guide; keyword options turn on what single model families add. Everything here is fp32,
whatever the module's dtype: a rounded gate sends tokens elsewhere.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, check_divides, check_finite, check_size

_NEVER = float("-inf")
# DeepSeek-V3's guard against dividing by a sum of zero.
_NORM_EPS = 1e-20


class TokenChoiceTopKRouter(nn.Module):
    """Each token chooses its `top_k` experts.

    Scores are `score_func` of an fp32 gate matmul, times `route_scale`. A group limit first keeps the
    `num_limited_groups` best of `num_expert_groups` groups of consecutive experts. `expert_bias` is added to choose
    experts, never to weigh them. Of equal scores the lower id wins; a NaN score counts as -inf when choosing.

    Args:
        dim: width H of a token.
        num_experts: E.
        top_k: k, experts a token.
        score_func: "sigmoid" or "softmax" over the experts.
        num_expert_groups: G, or None for no group limit. E must be a multiple of it.
        num_limited_groups: groups a token may use; given exactly when G is, and at most G.
        route_scale: factor on the scores.
        route_norm: divide a token's k weights by their sum (Mixtral, Qwen3, DeepSeek-V3). With softmax scores this
            equals softmax over the chosen logits (gpt-oss).
        group_score: "max", the best unbiased score of a group, or "top2_sum", the sum of its two best biased scores
            (DeepSeek-V3).
        scale_after_norm: multiply the weights by `route_scale` last, after choosing and normalising (DeepSeek-V3),
            not the scores first, where `route_norm` would cancel it.
        gate_bias: give the gate a bias (gpt-oss).
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        score_func: Literal["sigmoid", "softmax"] = "sigmoid",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_scale: float = 1.0,
        *,
        route_norm: bool = False,
        group_score: Literal["max", "top2_sum"] = "max",
        scale_after_norm: bool = False,
        gate_bias: bool = False,
    ) -> None:
        super().__init__()
        self.dim = check_size("dim", dim)
        self.num_experts = check_size("num_experts", num_experts)
        self.top_k = check_size("top_k", top_k)
        if score_func not in ("sigmoid", "softmax"):
            raise ExpertParallelError(f"score_func must be 'sigmoid' or 'softmax', got {score_func!r}")
        if group_score not in ("max", "top2_sum"):
            raise ExpertParallelError(f"group_score must be 'max' or 'top2_sum', got {group_score!r}")
        if (num_expert_groups is None) != (num_limited_groups is None):
            raise ExpertParallelError(
                f"num_expert_groups={num_expert_groups} and num_limited_groups={num_limited_groups} go together: "
                "give both or neither"
            )
        selectable = num_experts
        if num_expert_groups is not None and num_limited_groups is not None:
            check_size("num_expert_groups", num_expert_groups)
            check_size("num_limited_groups", num_limited_groups)
            check_divides("num_experts", num_experts, "num_expert_groups", num_expert_groups, "groups are of one size")
            if num_limited_groups > num_expert_groups:
                raise ExpertParallelError(
                    f"num_limited_groups={num_limited_groups} is above num_expert_groups={num_expert_groups}: "
                    "a token cannot use more groups than there are"
                )
            group_size = num_experts // num_expert_groups
            selectable = num_limited_groups * group_size
            if group_score == "top2_sum" and group_size < 2:
                raise ExpertParallelError(
                    f"group_score='top2_sum' needs 2 experts a group, but num_experts={num_experts} in "
                    f"num_expert_groups={num_expert_groups} leaves {group_size}"
                )
        if top_k > selectable:
            raise ExpertParallelError(
                f"top_k={top_k} is above the {selectable} experts a token can choose from (num_experts={num_experts}, "
                f"num_limited_groups={num_limited_groups} of num_expert_groups={num_expert_groups}): lower top_k"
            )
        self.score_func = score_func
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.route_scale = check_finite("route_scale", route_scale, above_zero=True)
        self.route_norm = route_norm
        self.group_score = group_score
        self.scale_after_norm = scale_after_norm
        self.gate = nn.Linear(dim, num_experts, bias=gate_bias)

    def forward(
        self, x: torch.Tensor, expert_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route tokens.

        Args:
            x: [T, H], or any leading dims, flattened to T.
            expert_bias: [E] fp32, added to the scores for choosing only.

        Returns:
            top_scores [T, k] fp32, best first as chosen, differentiable in x and the gate; selected_experts [T, k]
            int64, distinct in a row; num_tokens_per_expert [E] int64.
        """
        if x.shape[-1] != self.dim:
            raise ExpertParallelError(f"x must be [..., {self.dim}], got {list(x.shape)}")
        if expert_bias is not None and expert_bias.shape != (self.num_experts,):
            raise ExpertParallelError(
                f"expert_bias must be [{self.num_experts}], one an expert, got {list(expert_bias.shape)}"
            )
        scores = self._scores(x.reshape(-1, self.dim))
        selected = self._choose(scores.detach(), expert_bias)
        top_scores = scores.gather(1, selected)
        if self.route_norm:
            top_scores = top_scores / (top_scores.sum(dim=1, keepdim=True) + _NORM_EPS)
        if self.scale_after_norm:
            top_scores = top_scores * self.route_scale
        return top_scores, selected, count_tokens(selected, self.num_experts)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            bias = self.gate.bias
            logits = F.linear(x.float(), self.gate.weight.float(), None if bias is None else bias.float())
            scores = torch.sigmoid(logits) if self.score_func == "sigmoid" else torch.softmax(logits, dim=1)
            return scores if self.scale_after_norm else scores * self.route_scale

    def _choose(self, scores: torch.Tensor, expert_bias: torch.Tensor | None) -> torch.Tensor:
        """Ids [T, k] int64 by scores [T, E]."""
        biased = scores if expert_bias is None else scores + expert_bias.float()
        biased = biased.masked_fill(biased.isnan(), _NEVER)
        if self.num_expert_groups is None or self.num_limited_groups is None:
            return _best(biased, self.top_k)
        T, G = scores.shape[0], self.num_expert_groups
        group_size = self.num_experts // G
        if self.group_score == "max":
            unbiased = scores.masked_fill(scores.isnan(), _NEVER)
            group_scores = unbiased.view(T, G, group_size).amax(dim=2)
        else:
            group_scores = biased.view(T, G, group_size).topk(2, dim=2).values.sum(dim=2)
        # Only experts of the kept groups take part from here on, in the order of their ids: an expert outside can then
        # not even win among scores of -inf.
        groups = _best(group_scores, self.num_limited_groups).sort(dim=1).values
        inside = torch.arange(group_size, device=scores.device)
        ids = (groups.unsqueeze(2) * group_size + inside).view(T, self.num_limited_groups * group_size)
        return ids.gather(1, _best(biased.gather(1, ids), self.top_k))


def count_tokens(selected_experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How often each expert occurs in `selected_experts` (integer ids, any shape): [E] int64."""
    flat = selected_experts.reshape(-1).long()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    # torch.topk may return any of equal scores; a stable sort returns the lowest id.
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
