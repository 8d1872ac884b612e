"""Tensor parallelism for experts: every TP rank holds all experts and 1/TP of each one's hidden width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from hyper_mpmd.expert_parallel.grouped_experts import Compute, GroupedExperts
from hyper_mpmd.expert_parallel.permute import scale_rows
from hyper_mpmd.expert_parallel.style import check_style_inputs, spread_weights


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism for `moe.experts`. All TP ranks must be given the same tokens.

    The output is summed over TP, and so is the gradient of x on its way back, so that everything before and after the
    experts sees the same values on every TP rank.

    Args:
        src_data_rank: see `ExpertParallel`.
    """

    src_data_rank: int | None = 0

    def apply(self, module: GroupedExperts, mesh: DeviceMesh) -> GroupedExperts:
        """Spread w1, w3 as Shard(1) and w2 as Shard(2) over a 1-D mesh ("tp",), in place. Before `fully_shard`.

        Raises:
            ExpertParallelError: I is not a multiple of the mesh's size; another mesh; experts already spread.
            ExpertParallelTypeError: not GroupedExperts, not a DeviceMesh.
        """
        check_style_inputs("TensorParallel", module, mesh, ("tp",))
        spread_weights(module, mesh, ("tp",), self.src_data_rank)
        module.tp_mesh = mesh
        module._runner = SumOverTp(mesh)
        return module


class SumOverTp:
    """Runs a computation whose result is this TP rank's part of a sum, and adds the parts up.

    In forward x enters as it is and the output is all-reduced; in backward the output's gradient, equal on all ranks,
    passes as it is and the gradient of x is all-reduced. Scores multiply the whole sum, so their gradient is whole too.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(
        self, compute: Compute, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        same = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        part = compute(same.to_local(grad_placements=[Partial()]), counts, None)
        total = DTensor.from_local(part, self._mesh, [Partial()], run_check=False).redistribute(
            placements=[Replicate()]
        )
        out = total.to_local()
        return out if scores is None else scale_rows(out, scores)
