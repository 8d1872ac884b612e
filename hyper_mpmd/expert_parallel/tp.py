"""Tensor parallelism for experts: every TP rank holds all experts and 1/TP of each one's hidden width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from hyper_mpmd.expert_parallel.grouped_experts import Compute, GroupedExperts, Runner
from hyper_mpmd.expert_parallel.mega import MegaRunner, check_engine
from hyper_mpmd.expert_parallel.permute import scale_rows
from hyper_mpmd.expert_parallel.style import check_style_inputs, spread_weights


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism for `moe.experts`. All TP ranks must be given the same tokens.

    The output is summed over TP, and so is the gradient of x on its way back, so that everything before and after the
    experts sees the same values on every TP rank.

    Args:
        src_data_rank, engine: see `ExpertParallel`.
    """

    src_data_rank: int | None = 0
    engine: str = "torch"

    def apply(self, module: GroupedExperts, mesh: DeviceMesh) -> GroupedExperts:
        """Spread w1, w3 as Shard(1) and w2 as Shard(2) over a 1-D mesh ("tp",), in place. Before `fully_shard`.

        Raises:
            ExpertParallelError: I is not a multiple of the mesh's size; another mesh; experts already spread; an engine
                that there is not, or not for this device.
            ExpertParallelTypeError: not GroupedExperts, not a DeviceMesh, a dtype that the engine does not run.
        """
        check_style_inputs("TensorParallel", module, mesh, ("tp",))
        check_engine("TensorParallel", self.engine, module, mesh)
        runner = MegaRunner(module, None, mesh) if self.engine == "mega" else SumOverTp(mesh)
        spread_weights(module, mesh, ("tp",), self.src_data_rank)
        module.tp_mesh, module._runner = mesh, runner
        return module


class SumOverTp(Runner):
    """Runs a computation whose result is this TP rank's part of a sum, and adds the parts up.

    In forward x enters as it is and the output is all-reduced; in backward the output's gradient, equal on all ranks,
    passes as it is and the gradient of x is all-reduced. Scores multiply the whole sum, so their gradient is whole too.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(
        self, experts: GroupedExperts, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        return self.add_up(experts.compute, x, counts, scores)

    def add_up(
        self, compute: Compute, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """The whole of what `compute` gives a part of on every rank."""
        same = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        part = compute(same.to_local(grad_placements=[Partial()]), counts, None)
        total = DTensor.from_local(part, self._mesh, [Partial()], run_check=False).redistribute(
            placements=[Replicate()]
        )
        out = total.to_local()
        return out if scores is None else scale_rows(out, scores)
