"""Keeping experts evenly loaded: an auxiliary loss that acts through the router's gradient, and a bias update after the
optimizer step (DeepSeek-V3's loss-free balancing)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_mpmd.expert_parallel.errors import (
    ExpertParallelError,
    ExpertParallelTypeError,
    check_finite,
    check_size,
)

if TYPE_CHECKING:
    from hyper_mpmd.expert_parallel.moe import MoE

# A process group, a mesh (all its dimensions), or several of them.
GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | Sequence[dist.ProcessGroup | DeviceMesh]"


def add_load_balance_loss(
    top_scores: torch.Tensor,
    selected_experts: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    coeff: float,
    scale: float | torch.Tensor = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hang coeff · E · Σ f_i · P_i on the scores: f_i = count_i / (all counts), P_i = sum of top-k scores to i / T.

    Args:
        top_scores: [T, k], as from the router.
        selected_experts: [T, k] int64.
        num_tokens_per_expert: [E] int64; summed over ranks where the loss is meant for all their tokens.
        coeff: weight of the loss.
        scale: factor on the gradient alone: a GradScaler's scale, or 1 / number of accumulated micro-batches.

    Returns:
        The scores, unchanged, whose backward adds scale times the loss's gradient, coeff · E · f_i / T, to what
        arrives; and the loss itself, coefficient included: 0-dim fp32, no gradient. Balanced scores that add up to 1
        give coeff, everything to one expert gives coeff · E.
    """
    T, E = top_scores.shape[0], num_tokens_per_expert.shape[0]
    share = num_tokens_per_expert.to(torch.float32) / num_tokens_per_expert.sum().clamp(min=1)
    slope = (coeff * E / max(T, 1)) * share[selected_experts]
    loss = (slope * top_scores.detach()).sum()
    if not top_scores.requires_grad:
        return top_scores, loss
    scores: torch.Tensor = _AddToGradient.apply(top_scores, slope * scale)  # type: ignore[no-untyped-call]
    return scores, loss


class _AddToGradient(torch.autograd.Function):
    @staticmethod
    def forward(scores: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return scores.view_as(scores)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad + slope, None


@torch.no_grad()
def update_expert_bias(
    moe: nn.Module, lr: float = 1e-3, num_recomputations: int = 1, group: GroupLike | None = None
) -> None:
    """Make experts that got less than their share more likely to be chosen, and start counting afresh.

    For each MoE block: delta = lr · sign(mean − tokens), minus its own mean; expert_bias += delta; tokens = 0. Call it
    after the optimizer step, on every rank.

    Args:
        moe: an MoE block, or any module that holds some: one exchange then serves them all.
        lr: size of a step.
        num_recomputations: how often a forward ran for each time it was meant. Accepted because callers of the original
            give it. It changes nothing: recomputed forwards are not counted here, and the sign would not see a common
            factor.
        group: where ranks hold different tokens, what to sum the counts over first: a process group, a mesh (over all
            its dimensions), or several of them, each adding ranks that the others do not. The bias is then bitwise
            equal on those ranks.
    """
    from hyper_mpmd.expert_parallel.moe import MoE

    check_finite("lr", lr, above_zero=False)
    check_size("num_recomputations", num_recomputations)
    blocks: list[MoE] = [module for module in moe.modules() if isinstance(module, MoE)]
    if not blocks:
        raise ExpertParallelTypeError(f"update_expert_bias needs an MoE or a module that holds one, got {type(moe)}")
    all_counts = sum_over_groups(torch.cat([block.tokens_per_expert for block in blocks]), group)
    for block, counts in zip(
        blocks, torch.split(all_counts, [block.tokens_per_expert.shape[0] for block in blocks]), strict=True
    ):
        # mean − tokens has the sign of sum − E · tokens, which is exact.
        delta = lr * torch.sign(counts.sum() - counts.shape[0] * counts).to(torch.float32)
        block.expert_bias += delta - delta.mean()
        block.tokens_per_expert.zero_()


def sum_over_groups(counts: torch.Tensor, group: GroupLike | None) -> torch.Tensor:
    """Integer `counts` summed over `group` (see `update_expert_bias`); the same bits on every rank of it."""
    total = counts.clone()
    for one in process_groups(group):
        dist.all_reduce(total, group=one)
    return total


def process_groups(group: GroupLike | None) -> list[dist.ProcessGroup]:
    """The process groups that `group` means: one a mesh dimension."""
    if group is None:
        return []
    if isinstance(group, dist.ProcessGroup):
        return [group]
    if isinstance(group, DeviceMesh):
        return [group.get_group(dim) for dim in range(group.ndim)]
    if not isinstance(group, Sequence) or isinstance(group, str):
        raise ExpertParallelTypeError(
            f"group must be a process group, a DeviceMesh or several of them, got {type(group).__name__}"
        )
    groups = [one for item in group for one in process_groups(item)]
    if len({id(one) for one in groups}) != len(groups):
        raise ExpertParallelError("group names the same ranks twice: their counts would be added twice")
    return groups
