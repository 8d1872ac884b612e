"""Rows of tokens to rows of experts and back: the two local steps around the experts, usable on their own.

T tokens, k choices a token, H hidden, E experts. Row r of the expert-major layout holds choice `order[r] % k` of token
`order[r] // k`; rows of one expert keep the order of their tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, check_size


def permutation(x: torch.Tensor, selected_experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each token to its k experts' places, expert after expert.

    Args:
        x: [T, H].
        selected_experts: [T, k] integer ids, as the router gives them.

    Returns:
        rows [T·k, H] of x's dtype, differentiable in x, and order [T·k] int64 (see the module's docstring). The weights
        of the rows are `top_scores.reshape(-1)[order]`, their counts a histogram of the ids.
    """
    if x.ndim != 2 or selected_experts.ndim != 2 or x.shape[0] != selected_experts.shape[0]:
        raise ExpertParallelError(
            f"permutation takes x [T, H] and selected_experts [T, k] of one T, got {list(x.shape)} and "
            f"{list(selected_experts.shape)}"
        )
    # Stable, so that the order of sums in backward, and with it every bit, is the same in each run.
    order = torch.argsort(selected_experts.reshape(-1), stable=True)
    return take_rows(x, order // selected_experts.shape[1], inverse_order(order)), order


def unpermutation(
    rows: torch.Tensor, order: torch.Tensor, top_k: int, scores: torch.Tensor | None = None
) -> torch.Tensor:
    """Bring each token's k rows home and add them up, in fp32 (or the rows' dtype if that is wider).

    Args:
        rows: [T·k, H] in the order that `permutation` gave.
        order: [T·k] int64, from `permutation`.
        top_k: k.
        scores: [T, k] weights of the rows, or None for a plain sum.

    Returns:
        [T, H] of the rows' dtype, differentiable in rows and scores.
    """
    check_size("top_k", top_k)
    if rows.ndim != 2 or order.shape != rows.shape[:1] or rows.shape[0] % top_k:
        raise ExpertParallelError(
            f"unpermutation takes rows [T·k, H] and order [T·k] with k={top_k}, got {list(rows.shape)} and "
            f"{list(order.shape)}"
        )
    home = take_rows(rows, inverse_order(order), order).view(rows.shape[0] // top_k, top_k, rows.shape[1])
    wide = home.to(torch.promote_types(rows.dtype, torch.float32))
    if scores is not None:
        if scores.shape != wide.shape[:2]:
            raise ExpertParallelError(f"scores must be {list(wide.shape[:2])} like the rows, got {list(scores.shape)}")
        wide = wide * scores.unsqueeze(-1)
    return wide.sum(dim=1).to(rows.dtype)


def scale_rows(rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """rows [N, H] times scores [N], multiplied in fp32 (or wider), in the rows' dtype."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return (wide * scores.unsqueeze(-1)).to(rows.dtype)


def inverse_order(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order` [N] int64."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


def take_rows(x: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """x[source], where every row of x [M, H] is taken equally often, f = len(source) / M times.

    `inverse` [M·f] says where in the result the copies of row 0 are, then those of row 1, and so on. With it backward
    is a gather and a sum as well: no scattered adds, whose order, on a GPU, would differ from run to run.
    """
    result: torch.Tensor = _TakeRows.apply(x, source, inverse)  # type: ignore[no-untyped-call]
    return result


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, _, inverse = inputs
        ctx.save_for_backward(inverse)
        ctx.rows = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        copies = inverse.shape[0] // max(ctx.rows, 1)
        home = grad.index_select(0, inverse)
        return (home if copies == 1 else home.view(ctx.rows, copies, grad.shape[1]).sum(dim=1)), None, None
