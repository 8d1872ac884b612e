"""What the three parallel styles share: which mesh and module they take, and how weights are spread over a mesh."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, ExpertParallelTypeError, check_divides
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts

# Which dimension of a weight each mesh dimension splits: w1, w3 [E, I, H] and w2 [E, H, I].
_SHARD_DIM = {
    "ep": {"w1": 0, "w2": 0, "w3": 0},
    "tp": {"w1": 1, "w2": 2, "w3": 1},
}


def check_style_inputs(style: str, experts: Any, mesh: Any, dims: tuple[str, ...]) -> None:
    """Refuses a module or a mesh that `style` cannot use, and sizes that do not divide. `dims` names the mesh
    dimensions the style wants, in order; a 1-D mesh may also have no name."""
    if not isinstance(experts, GroupedExperts):
        fix = ": pass moe.experts" if isinstance(getattr(experts, "experts", None), GroupedExperts) else ""
        raise ExpertParallelTypeError(f"{style} applies to GroupedExperts, got {type(experts).__name__}{fix}")
    if not isinstance(mesh, DeviceMesh):
        raise ExpertParallelTypeError(f"{style} takes a DeviceMesh, got {type(mesh).__name__}")
    unnamed = len(dims) == 1 and mesh.mesh_dim_names is None
    if mesh.ndim != len(dims) or not (unnamed or mesh.mesh_dim_names == dims):
        wanted = ", ".join(f'"{dim}"' for dim in dims)
        raise ExpertParallelError(
            f"{style} takes a {len(dims)}-D mesh with dimensions {dims}, got a {mesh.ndim}-D mesh of shape "
            f"{tuple(mesh.shape)} with {mesh.mesh_dim_names}: pass mesh[{wanted}]"
        )
    if experts.ep_mesh is not None or experts.tp_mesh is not None:
        raise ExpertParallelError(
            f"{style}: these experts are already spread over ep={experts.ep_mesh}, tp={experts.tp_mesh}: apply one "
            "style, once"
        )
    for name, weight in experts.named_parameters():
        if isinstance(experts, FSDPModule) or isinstance(weight, DTensor):
            raise ExpertParallelError(f"{style}: {name} is already a DTensor: apply the style before fully_shard")
        if weight.device.type not in (mesh.device_type, "meta"):
            raise ExpertParallelError(
                f"{style}: {name} is on {weight.device.type!r} but the mesh on {mesh.device_type!r}: move the "
                "module first"
            )
    if "ep" in dims:
        fix = "choose an EP size that divides the experts"
        check_divides("num_experts", experts.num_experts, "ep", mesh.size(dims.index("ep")), fix)
    if "tp" in dims:
        fix = "choose a TP size that divides the hidden width"
        check_divides("hidden_dim", experts.hidden_dim, "tp", mesh.size(dims.index("tp")), fix)


def spread_weights(experts: GroupedExperts, mesh: DeviceMesh, dims: tuple[str, ...], src_data_rank: int | None) -> None:
    """Turn the three weights into DTensors on `mesh`, under their names, keeping `requires_grad`."""
    for name, weight in list(experts.named_parameters()):
        placements: list[Placement] = [Shard(_SHARD_DIM[dim][name]) for dim in dims]
        spread = distribute_tensor(weight.detach(), mesh, placements, src_data_rank=src_data_rank)
        setattr(experts, name, nn.Parameter(spread, requires_grad=weight.requires_grad))
