"""Expert parallelism: every EP rank holds E/EP experts, and rows travel to them by all-to-all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_mpmd.expert_parallel.dispatch import AllToAllTokenDispatcher
from hyper_mpmd.expert_parallel.errors import ExpertParallelError
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts, Runner
from hyper_mpmd.expert_parallel.mega import MegaRunner, check_engine
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
        engine: "torch", collectives around this rank's experts; or "mega", dispatch, experts and combine as one fused
            run of the CPU engine (see `MegaMoeExperts`), for float32, bfloat16 and float16, ranks on one host. Same
            results.
    """

    async_combine: bool = False
    src_data_rank: int | None = 0
    engine: str = "torch"

    def apply(self, module: GroupedExperts, mesh: DeviceMesh) -> GroupedExperts:
        """Spread the weights, Shard(0), over a 1-D mesh ("ep",), in place. Before `fully_shard`.

        Raises:
            ExpertParallelError: E is not a multiple of the mesh's size; another mesh; experts already spread; an engine
                that there is not, or not for this device.
            ExpertParallelTypeError: not GroupedExperts, not a DeviceMesh, a dtype that the engine does not run.
        """
        check_style_inputs("ExpertParallel", module, mesh, ("ep",))
        check_engine("ExpertParallel", self.engine, module, mesh)
        if self.engine == "mega" and self.async_combine:
            raise ExpertParallelError(
                "ExpertParallel: async_combine=True has nothing to act on with engine='mega', where combine is a part "
                "of the fused run: leave one of them out"
            )
        runner: Runner
        if self.engine == "mega":
            runner = MegaRunner(module, mesh, None)
        else:
            runner = AllToAllRunner(AllToAllTokenDispatcher(mesh, module.num_experts), self.async_combine)
        spread_weights(module, mesh, ("ep",), self.src_data_rank)
        module.ep_mesh, module._runner = mesh, runner
        return module


class AllToAllRunner(Runner):
    """dispatch, compute, combine; what combine must know stays in this call's frame."""

    def __init__(self, dispatcher: AllToAllTokenDispatcher, async_combine: bool) -> None:
        self._dispatcher = dispatcher
        self._async_combine = async_combine

    def __call__(
        self, experts: GroupedExperts, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        rows, local_counts, _, context = self._dispatcher.dispatch(x, counts)
        out = self._dispatcher.combine(experts.compute(rows, local_counts, None), context, wait=not self._async_combine)
        # Scores stay here and meet their rows when these are back: exact, and nothing more to send.
        return out if scores is None else scale_rows(out, scores)
