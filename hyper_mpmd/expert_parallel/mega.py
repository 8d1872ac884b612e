"""`engine="mega"`: the parallel styles on the fused engine of `MegaMoeExperts` instead of collectives around a loop.

Dispatch, experts and combine of a layer become one plan, forward and one backward; everything around the experts stays
torch. Each row is a token of its own with one choice, since the rows come here after top-k.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, ExpertParallelTypeError
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts, Runner
from hyper_mpmd.scheduler.records import MAX_INDEX

ENGINES = ("torch", "mega")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_engine(style: str, engine: str, experts: GroupedExperts, mesh: DeviceMesh) -> None:
    """Refuses engines there are none of, and devices and dtypes that the fused one does not run."""
    if engine not in ENGINES:
        raise ExpertParallelError(f"{style}: engine={engine!r}; known: {', '.join(map(repr, ENGINES))}")
    if engine == "torch":
        return
    if mesh.device_type != "cpu":
        raise ExpertParallelError(
            f"{style}: engine='mega' runs on 'cpu', but the mesh is on {mesh.device_type!r}: use engine='torch'"
        )
    for name, weight in experts.named_parameters():
        if weight.dtype not in _DTYPES:
            raise ExpertParallelTypeError(
                f"{style}: engine='mega' runs float32, bfloat16 and float16, but {name} is {weight.dtype}: convert the "
                "module, or use engine='torch'"
            )


class MegaRunner(Runner):
    """One layer's fused engine, over the ranks of the meshes that it is given.

    The engine takes gate and up side by side with H before I, [E, H, 2I], and w2 as [E, I, H]: each forward copies this
    rank's weights into that order, and each backward their gradients out of it.
    """

    def __init__(self, experts: GroupedExperts, ep_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> None:
        from hyper_mpmd.modules.mega_moe import MegaMoeExperts

        self._mega = MegaMoeExperts(
            # Buffers are as large as a step's rows need, whatever the most is.
            max_local_num_tokens=MAX_INDEX,
            hidden_size=experts.dim,
            intermediate_size=experts.hidden_dim,
            num_experts=experts.num_experts,
            top_k=1,
            ep_size=1 if ep_mesh is None else ep_mesh.size(),
            ep_group=None if ep_mesh is None else ep_mesh.get_group(),
            tp_group=None if tp_mesh is None else tp_mesh.get_group(),
            create_parameters=False,
        )

    def __call__(
        self, experts: GroupedExperts, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        dtype = experts.compute_dtype(x)
        w1, w2, w3 = (weight.to(dtype) for weight in experts.local_weights())
        gate_up = torch.cat([w1.transpose(1, 2), w3.transpose(1, 2)], dim=2)
        # Counts that do not describe x are refused by the engine, on all ranks alike.
        ids = torch.repeat_interleave(counts.clamp(min=0).long())
        if len(ids) != len(x):
            ids = ids.new_zeros(len(x))
        weights = x.new_ones(len(x), dtype=torch.float32) if scores is None else scores
        with torch.autocast(x.device.type, enabled=False):
            out: torch.Tensor = self._mega(
                x.to(dtype),
                ids.unsqueeze(1),
                weights.unsqueeze(1),
                counts,
                expert_weights=(gate_up, w2.transpose(1, 2).contiguous()),
            )
        return out.to(x.dtype)

    def close(self) -> None:
        """See `MegaMoeExperts.close`."""
        self._mega.close()
