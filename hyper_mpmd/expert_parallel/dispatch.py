"""Rows to the ranks that hold their experts, and back, as two explicit steps.

Everything a step needs to know of the other travels in the `DispatchContext` that the first returns and the second
takes. Neither the dispatcher nor a module keeps any of it, so micro-batches of a pipeline may be under way in any
order, layers may share a dispatcher, and recompute or another thread cannot disturb a forward.

Layouts: at the source, rows are expert-major over all E experts. Received rows are local expert first, then source
    rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_mpmd.expert_parallel.errors import (
    ExpertParallelError,
    ExpertParallelTypeError,
    check_divides,
    check_size,
)
from hyper_mpmd.expert_parallel.grouped_matmul import counts_error
from hyper_mpmd.expert_parallel.permute import inverse_order, take_rows

# In place of counts: this rank refuses its own input. No count is negative.
_REFUSED = -1


@dataclass(frozen=True, eq=False)
class DispatchContext:
    """What combine must know of the dispatch it undoes. Belongs to one call.

    Attributes:
        send_rows: rows this rank sent to each EP rank.
        receive_rows: rows it got from each.
        to_expert_major: [received] int64, row r of the expert-major layout is received row to_expert_major[r].
        to_source_major: the inverse.
    """

    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    to_expert_major: torch.Tensor
    to_source_major: torch.Tensor


class Dispatched(NamedTuple):
    """What `AllToAllTokenDispatcher.dispatch` returns.

    rows: [received, H], local expert first, then source rank.
    num_tokens_per_expert: [E / EP] int64 for the local experts.
    scores: [received] in the order of rows, or None where none were given.
    context: for `combine`.
    """

    rows: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    scores: torch.Tensor | None
    context: DispatchContext


class AllToAllTokenDispatcher:
    """Uneven all-to-all over the ranks of `group`, rank r of which holds experts [r · E/EP, (r + 1) · E/EP).

    Args:
        group: the EP process group, or a 1-D mesh.
        num_experts: E, a multiple of the group's size.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh, num_experts: int) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ExpertParallelError(
                    f"the dispatcher works over a 1-D mesh, got {group.ndim}-D {group.mesh_dim_names}: pass mesh['ep']"
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise ExpertParallelTypeError(f"group must be a process group or a 1-D DeviceMesh, got {type(group)}")
        self.group = group
        self.num_experts = check_size("num_experts", num_experts)
        self.ep_size = group.size()
        check_divides("num_experts", num_experts, "ep", self.ep_size, "choose an EP size that divides the experts")

    def __deepcopy__(self, memo: dict[int, object]) -> AllToAllTokenDispatcher:
        return self  # holds no state of any call, and a process group cannot be copied

    def dispatch(
        self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor, scores: torch.Tensor | None = None
    ) -> Dispatched:
        """Send each row to its expert's rank. Every rank of the group calls this, also one without rows.

        Args:
            x: [N, H] expert-major, differentiable. N may be 0 and differ between ranks.
            num_tokens_per_expert: [E] integers that add up to N.
            scores: [N], sent with their rows, differentiable; on all ranks or on none.

        The host waits for the exchanged counts once: the sizes of what arrives follow from them.

        Raises:
            ExpertParallelError: counts or scores that do not describe x. Every rank of the group raises it, so that
                none waits for rows that never come; only the wrong shape of the counts concerns its own rank alone.
        """
        counts = num_tokens_per_expert.long()
        if counts.shape != (self.num_experts,):
            raise ExpertParallelError(f"num_tokens_per_expert must be [{self.num_experts}], got {list(counts.shape)}")
        scores_fit = scores is None or scores.shape == x.shape[:1]
        good = (counts >= 0).all() & (counts.sum() == x.shape[0]) & scores_fit
        counts = torch.where(good, counts, _REFUSED)
        sent = counts.view(self.ep_size, -1)
        with torch.no_grad():
            received = _arrived(all_to_all_single_autograd(counts, None, None, self.group)).view(self.ep_size, -1)
        per_rank = torch.stack([sent.sum(dim=1), received.sum(dim=1)]).tolist()
        to_send, to_receive = per_rank
        if to_send[0] < 0:
            if scores is not None and not scores_fit:
                raise ExpertParallelError(f"scores must be [{x.shape[0]}], one a row of x, got {list(scores.shape)}")
            raise counts_error(num_tokens_per_expert, x.shape[0])
        refused = [rank for rank, rows in enumerate(to_receive) if rows < 0]
        if refused:
            raise ExpertParallelError(
                f"ranks {refused} of the {self.ep_size} in the EP group refused their own counts or scores, so nothing "
                "was exchanged: see their errors"
            )
        to_expert_major = _expert_major_order(received, sum(to_receive))
        to_source_major = inverse_order(to_expert_major)
        context = DispatchContext(tuple(to_send), tuple(to_receive), to_expert_major, to_source_major)
        rows = take_rows(self._exchange(x, to_receive, to_send), to_expert_major, to_source_major)
        moved = None
        if scores is not None:
            column = self._exchange(scores.unsqueeze(1), to_receive, to_send)
            moved = take_rows(column, to_expert_major, to_source_major).squeeze(1)
        return Dispatched(rows, received.sum(dim=0), moved, context)

    def combine(self, rows: torch.Tensor, context: DispatchContext, *, wait: bool = True) -> torch.Tensor:
        """Send rows back where they came from: [N, H] in the order that `dispatch` got them. Every rank calls this.

        Args:
            rows: [received, H] in the order of `Dispatched.rows`, differentiable.
            context: of the same dispatch.
            wait: False returns a tensor that waits at its first use, so that other work can run in between.
        """
        if rows.shape[0] != sum(context.receive_rows):
            raise ExpertParallelError(
                f"combine got {rows.shape[0]} rows for a dispatch that received {sum(context.receive_rows)}: pass the "
                "context of the same dispatch"
            )
        home = take_rows(rows, context.to_source_major, context.to_expert_major)
        out = all_to_all_single_autograd(
            home.contiguous(), list(context.send_rows), list(context.receive_rows), self.group
        )
        return _arrived(out) if wait else out

    def _exchange(self, x: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
        return _arrived(all_to_all_single_autograd(x.contiguous(), receive, send, self.group))


def _arrived(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, AsyncCollectiveTensor):
        # Not x.wait(), which leaves the autograd graph.
        x = wait_tensor(x)  # type: ignore[no-untyped-call]
    return x


def _expert_major_order(received: torch.Tensor, num_rows: int) -> torch.Tensor:
    """From (source, local expert) blocks of rows, sizes [EP, E/EP] int64, to (local expert, source): row r of the
    result is row order[r] of what arrived."""
    sizes = received.reshape(-1)
    starts = (sizes.cumsum(0) - sizes).view_as(received).t().reshape(-1)
    sizes = received.t().reshape(-1)
    new_starts = sizes.cumsum(0) - sizes
    moved_by = torch.repeat_interleave(starts - new_starts, sizes, output_size=num_rows)
    return torch.arange(num_rows, device=received.device) + moved_by
