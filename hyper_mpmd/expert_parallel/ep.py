"""Expert parallelism: every EP rank holds E/EP experts, and rows travel to them by all-to-all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_mpmd.expert_parallel.dispatch import AllToAllTokenDispatcher
from hyper_mpmd.expert_parallel.grouped_experts import Compute, GroupedExperts
from hyper_mpmd.expert_parallel.permute import scale_rows
from hyper_mpmd.expert_parallel.style import check_style_inputs, spread_weights


@dataclass(frozen=True)
class ExpertParallel:
    """All-to-all expert parallelism for `moe.experts`. One style may serve any number of layers.

    Tokens may differ between EP ranks. An expert's gradient is then the sum over the ranks that fed it, divided by
    nothing; see `reduce_gradients`.

    Args:
        async_combine: return from the experts while the rows are still on their way home. MoE runs its shared expert
            meanwhile.
        src_data_rank: the rank of the mesh whose weights are spread to the others, or None to take each rank's own part
            of what it has, without communication (all ranks must then hold equal weights).
    """

    async_combine: bool = False
    src_data_rank: int | None = 0

    def apply(self, module: GroupedExperts, mesh: DeviceMesh) -> GroupedExperts:
        """Spread the weights, Shard(0), over a 1-D mesh ("ep",), in place. Before `fully_shard`.

        Raises:
            ExpertParallelError: E is not a multiple of the mesh's size; another mesh; experts already spread.
            ExpertParallelTypeError: not GroupedExperts, not a DeviceMesh.
        """
        check_style_inputs("ExpertParallel", module, mesh, ("ep",))
        spread_weights(module, mesh, ("ep",), self.src_data_rank)
        module.ep_mesh = mesh
        module._runner = AllToAllRunner(AllToAllTokenDispatcher(mesh, module.num_experts), self.async_combine)
        return module


class AllToAllRunner:
    """dispatch, compute, combine; what combine must know stays in this call's frame."""

    def __init__(self, dispatcher: AllToAllTokenDispatcher, async_combine: bool) -> None:
        self._dispatcher = dispatcher
        self._async_combine = async_combine

    def __call__(
        self, compute: Compute, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        rows, local_counts, _, context = self._dispatcher.dispatch(x, counts)
        out = self._dispatcher.combine(compute(rows, local_counts, None), context, wait=not self._async_combine)
        # Scores stay here and meet their rows when these are back: exact, and nothing more to send.
        return out if scores is None else scale_rows(out, scores)
