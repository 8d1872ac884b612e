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
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, ExpertParallelTypeError, check_finite
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts

# What torch.nn.utils.clip_grad_norm_ adds to the norm before dividing by it.
_CLIP_EPS = 1e-6


@torch.no_grad()
def reduce_gradients(module: nn.Module, data_mesh: DeviceMesh, reduction: Literal["mean", "sum"] = "mean") -> None:
    """Finish the gradients of `module` after the last backward of a step, before clipping and the optimizer.

    For each trainable parameter and each dimension of `data_mesh`: where the all-to-all has summed, divide; where
    fully_shard has averaged, leave; elsewhere all-reduce. Every rank of the mesh must call it, once a step. A parameter
    without a gradient counts as zero, since another rank may have one for it.

    Args:
        module: the whole model, or this pipeline stage's part of it.
        data_mesh: the dimensions along which tokens differ: mesh["dp", "ep"], mesh["ep"], ...; ep is always one of
            them where experts are spread over it, tp and pp never are.
        reduction: "mean" if each rank's loss is a mean over its own (equally many) tokens; "sum" if the losses of all
            ranks add up to the loss, as with loss_sum / tokens_of_all_ranks. The auxiliary loss of an MoE is a mean
            over its own tokens: with "sum", set moe.aux_loss_scale to own tokens / tokens of all ranks.

    Raises:
        ExpertParallelError: the ep dimension of an expert is not a dimension of data_mesh; another reduction.
        ExpertParallelTypeError: data_mesh is no DeviceMesh.
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
    peers_by_dim = [_peers(data_mesh, dim) for dim in range(data_mesh.ndim)]
    to_average: list[list[torch.Tensor]] = [[] for _ in peers_by_dim]
    factors: list[tuple[torch.Tensor, float]] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = _local(parameter.grad)
        spread_over = set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()
        summed_over = ep_peers.get(id(parameter), set())
        elsewhere = summed_over - {dist.get_rank()}
        if elsewhere and not any(peers & elsewhere for peers in peers_by_dim):
            raise ExpertParallelError(
                f"{name} is expert-parallel over ranks {sorted(summed_over)}, but data_mesh {data_mesh.mesh_dim_names} "
                f"of shape {tuple(data_mesh.shape)} has no such dimension: pass every dimension along which tokens "
                'differ, such as mesh["dp", "ep"]'
            )
        factor = float(data_mesh.size()) if reduction == "sum" else 1.0
        for peers, tensors in zip(peers_by_dim, to_average, strict=True):
            if len(peers) == 1:
                continue
            if peers == summed_over:
                factor /= len(peers)
            elif len(peers & summed_over) > 1:
                raise ExpertParallelError(
                    f"{name} is expert-parallel over ranks {sorted(summed_over)}, of which data_mesh "
                    f"{data_mesh.mesh_dim_names} has {sorted(peers)} in one dimension: give ep a dimension of its own"
                )
            elif not peers <= spread_over:
                factor /= len(peers)
                tensors.append(grad)
        factors.append((grad, factor))
    for dim, tensors in enumerate(to_average):
        for work in [dist.all_reduce(grad, group=data_mesh.get_group(dim), async_op=True) for grad in tensors]:
            work.wait()
    for grad, factor in factors:
        if factor != 1.0:
            grad.mul_(factor)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Like `torch.nn.utils.clip_grad_norm_`, for parameters of which some are spread, over different meshes.

    Every rank that holds a part of a parameter must call it, after `reduce_gradients`.

    Args:
        parameters: all parameters of this rank, or a single one; those without a gradient are skipped.
        max_norm: the norm to clip to.
        norm_type: p > 0, or inf, also as the text "inf".
        pp_mesh: 1-D mesh of the pipeline stages, each of which holds other parameters.

    Returns:
        The norm of all gradients before clipping, 0-dim, fp32 or wider, the same on every rank.
    """
    check_finite("max_norm", max_norm, above_zero=False)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ExpertParallelError(f"norm_type must be > 0, got {norm_type!r}")
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]  # iterating over it would yield its rows, which have no gradient
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Gradients in parts over the same ranks share one reduction; whole ones, equal on all ranks, need none.
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for grad in grads:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            mesh, placements = grad.device_mesh, grad.placements
            if any(placement.is_partial() for placement in placements):
                placements = tuple(Replicate() if one.is_partial() else one for one in placements)
                grad = grad.redistribute(placements=placements)
            groups = tuple(mesh.get_group(dim) for dim, one in enumerate(placements) if not one.is_replicate())
        parts.setdefault(groups, []).append(_local(grad))
    norms = [_norm_over(groups, _norm(tensors, norm_type), norm_type) for groups, tensors in parts.items()]
    total = _norm(norms, norm_type)
    if pp_mesh is not None:
        total = _norm_over((pp_mesh.get_group(),), total, norm_type)
    scale = torch.clamp(max_norm / (total + _CLIP_EPS), max=1.0)
    for grad in grads:
        local = _local(grad)
        local.mul_(scale.to(local.device))
    return total


def _norm(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not tensors:
        return torch.zeros(())
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    each = [torch.linalg.vector_norm(one, norm_type, dtype=dtype) for one, dtype in zip(tensors, wide, strict=True)]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(each[0].device) for norm in each]), norm_type)
    return total


def _norm_over(groups: tuple[dist.ProcessGroup, ...], norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of what all ranks of `groups` hold together, from the norm of what this one holds."""
    if not groups:
        return norm
    largest = norm_type == float("inf")
    total: torch.Tensor = norm.clone() if largest else norm**norm_type
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return total if largest else torch.pow(total, 1 / norm_type)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _peers(mesh: DeviceMesh, dim: int) -> set[int]:
    return set(dist.get_process_group_ranks(mesh.get_group(dim)))
