"""Expert and tensor parallelism together: E/EP experts a rank, 1/TP of each one's hidden width."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_mpmd.expert_parallel.dispatch import AllToAllTokenDispatcher
from hyper_mpmd.expert_parallel.ep import AllToAllRunner
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts, Runner
from hyper_mpmd.expert_parallel.mega import MegaRunner, check_engine
from hyper_mpmd.expert_parallel.style import check_style_inputs, spread_weights
from hyper_mpmd.expert_parallel.tp import SumOverTp


@dataclass(frozen=True)
class ExpertTensorParallel:
    """All-to-all over EP, each expert split over TP. TP ranks of one EP rank must be given the same tokens.

    Args:
        src_data_rank: see `ExpertParallel`; a rank of each mesh dimension.
        engine: see `ExpertParallel`.
    """

    src_data_rank: int | None = 0
    engine: str = "torch"

    def apply(self, module: GroupedExperts, mesh: DeviceMesh) -> GroupedExperts:
        """Spread w1, w3 as (Shard(0), Shard(1)) and w2 as (Shard(0), Shard(2)) over a 2-D mesh ("ep", "tp"), in place.
        Before `fully_shard`.

        Raises:
            ExpertParallelError: E is not a multiple of EP or I of TP; another mesh; experts already spread; an engine
                that there is not, or not for this device.
            ExpertParallelTypeError: not GroupedExperts, not a DeviceMesh, a dtype that the engine does not run.
        """
        check_style_inputs("ExpertTensorParallel", module, mesh, ("ep", "tp"))
        check_engine("ExpertTensorParallel", self.engine, module, mesh)
        ep_mesh, tp_mesh = mesh["ep"], mesh["tp"]
        runner: Runner
        if self.engine == "mega":
            runner = MegaRunner(module, ep_mesh, tp_mesh)
        else:
            runner = _Runner(ep_mesh, tp_mesh, module.num_experts)
        spread_weights(module, mesh, ("ep", "tp"), self.src_data_rank)
        module.ep_mesh, module.tp_mesh, module._runner = ep_mesh, tp_mesh, runner
        return module


class _Runner(Runner):
    """The sum over TP is outside: it then adds the N rows this rank began with, not the uneven number it received."""

    def __init__(self, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, num_experts: int) -> None:
        self._all_to_all = AllToAllRunner(AllToAllTokenDispatcher(ep_mesh, num_experts), async_combine=False)
        self._sum = SumOverTp(tp_mesh)

    def __call__(
        self, experts: GroupedExperts, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        return self._sum.add_up(partial(self._all_to_all, experts), x, counts, scores)
