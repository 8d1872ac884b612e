"""Gradients equal to those of one process on the whole batch, however the parameters are spread.

Which gradient is averaged over what, when every rank's loss is the mean over its own tokens (docs/expert-parallel.md
has the same table):

| parameter | over dp, after backward | over ep, after backward | what is left to do |
|---|---|---|---|
| expert weight | averaged by fully_shard, or not | summed by all-to-all | divide by ep; average over dp if not yet |
| everything else | averaged by fully_shard, or not | nothing | average over ep, and over dp if not yet |

Tensor-parallel ranks see equal tokens and get equal gradients: nothing to do over tp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, ExpertParallelTypeError, check_finite
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts


@torch.no_grad()
def reduce_gradients(module: nn.Module, data_mesh: DeviceMesh, reduction: Literal["mean", "sum"] = "mean") -> None:
    """Finish the gradients of `module` after the last backward of a step, before clipping and the optimizer.

    For each trainable parameter and each dimension of `data_mesh`: where the all-to-all has summed, divide; where
    fully_shard has averaged, leave; elsewhere all-reduce. Every rank of the mesh must call it, once a step. A parameter
    without a gradient counts as zero, since another rank may have one for it.

    Args:
        module: the whole model, or this pipeline stage's part of it.
        data_mesh: the dimensions along which tokens differ: mesh["dp", "ep"], mesh["ep"], ...; never tp or pp.
        reduction: "mean" if each rank's loss is a mean over its own (equally many) tokens; "sum" if the losses of all
            ranks add up to the loss, as with loss_sum / tokens_of_all_ranks.
    """
    if reduction not in ("mean", "sum"):
        raise ExpertParallelError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not isinstance(data_mesh, DeviceMesh):
        raise ExpertParallelTypeError(f"data_mesh must be a DeviceMesh, got {type(data_mesh).__name__}")
    ep_peers = {
        id(weight): _peers(experts.ep_mesh, 0)
        for experts in module.modules()
        if isinstance(experts, GroupedExperts) and experts.ep_mesh is not None
        for weight in experts.parameters()
    }
    dims = [(data_mesh.get_group(dim), _peers(data_mesh, dim)) for dim in range(data_mesh.ndim)]
    pending: list[Any] = []
    factors: list[tuple[torch.Tensor, float]] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        spread_over = set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()
        summed_over = ep_peers.get(id(parameter), set())
        factor = float(data_mesh.size()) if reduction == "sum" else 1.0
        for group, peers in dims:
            if len(peers) == 1:
                continue
            if peers == summed_over:
                factor /= len(peers)
            elif peers <= summed_over or (peers & summed_over) - {dist.get_rank()}:
                raise ExpertParallelError(
                    f"{name} is expert-parallel over ranks {sorted(summed_over)}, of which data_mesh "
                    f"{data_mesh.mesh_dim_names} has {sorted(peers)} in one dimension: give ep a dimension of its own"
                )
            elif not peers <= spread_over:
                factor /= len(peers)
                pending.append(dist.all_reduce(grad, group=group, async_op=True))
                pending[-1].wait()
        factors.append((grad, factor))
    for grad, factor in factors:
        if factor != 1.0:
            grad.mul_(factor)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Like `torch.nn.utils.clip_grad_norm_`, for parameters of which some are spread, over different meshes.

    Args:
        parameters: all trainable parameters of this rank; those without a gradient are skipped.
        max_norm: the norm to clip to.
        norm_type: p, or inf.
        pp_mesh: 1-D mesh of the pipeline stages, each of which holds other parameters.

    Returns:
        The norm of all gradients before clipping, 0-dim, the same on every rank.
    """
    check_finite("max_norm", max_norm, above_zero=False)
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in with_grad:
        mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = (
        torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), norm_type) if norms else torch.zeros(())
    )
    if pp_mesh is not None:
        if norm_type == float("inf"):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=pp_mesh.get_group())
        else:
            total = total**norm_type
            dist.all_reduce(total, group=pp_mesh.get_group())
            total = total ** (1 / norm_type)
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _peers(mesh: DeviceMesh, dim: int) -> set[int]:
    return set(dist.get_process_group_ranks(mesh.get_group(dim)))
