"""MegaMoeExperts beside other parallelism: what DDP must leave alone, and checkpoints that know the global experts.

A rank's experts, or its shards of them, are its own: two ranks hold different weights under one name. DDP would average
them, and a distributed checkpoint of plain local tensors would keep one rank's and lose the others'.

Over a tp_group a rank's part of gate_up is no one block of the whole: it holds columns of the gate half and columns of
the up half. Its DTensor says so by holding both as shards of their own, which distributed checkpoints understand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_mpmd.modules.mega_config import Config
from hyper_mpmd.modules.mega_errors import MegaMoeValueError
from hyper_mpmd.modules.mega_groups import Grid


@dataclass(frozen=True)
class ExpertParameters:
    """The parameters of a model that are spread over ranks: experts shared out, experts cut, or both.

    names, parameters: as in `model.named_parameters()`; the names are what DDP has to ignore.
    divisor: their gradients are sums over the losses of the EP ranks; divided by this they are those of the mean of the
    losses, as DDP and FSDP make all others. The ranks of a tp_group have one loss between them. Divide after the last
    backward of a step and before clipping.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    divisor: int

    def divide_gradients(self) -> None:
        """Divide the gradients in place, once a step."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.divisor)


def expert_parameters(model: nn.Module) -> ExpertParameters:
    """Those of all MegaMoeExperts over more than one rank in the model; before it is wrapped:

        experts = expert_parameters(model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts.names)

    MegaMoeValueError where layers have different ep_size, and so no one divisor.
    """
    from hyper_mpmd.modules.mega_moe import MegaMoeExperts

    found: dict[str, nn.Parameter] = {}
    divisors = set()
    for prefix, module in model.named_modules():
        if isinstance(module, MegaMoeExperts) and module.config.ranks > 1:
            divisors.add(module.config.ep_size)
            found.update(module.named_parameters(prefix=prefix, recurse=False))
    if len(divisors) > 1:
        raise MegaMoeValueError(f"layers have ep_size {sorted(divisors)}; give each its own expert_parameters call")
    return ExpertParameters(tuple(found), tuple(found.values()), divisors.pop() if divisors else 1)


def as_global(tensor: torch.Tensor, config: Config, grid: Grid) -> Any:
    """This rank's part of a parameter, or of a tensor like it, as a part of all experts': a DTensor on the grid of
    ranks that shares its memory, [E, H, 2I] or [E, I, H]."""
    if config.ranks == 1:
        return tensor
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh(grid, tensor.device.type)
    experts = [Shard(0)] if config.ep_size > 1 else []
    if config.tp_size == 1:
        return DTensor.from_local(tensor, mesh, experts, run_check=False)
    inner = config.local_intermediate
    if tuple(tensor.shape[1:]) == (inner, config.hidden_size):
        return DTensor.from_local(tensor, mesh, [*experts, Shard(1)], run_check=False)
    from hyper_mpmd.modules.column_halves import ColumnHalves

    place = grid.ranks.index(dist.get_rank())
    first = place // config.tp_size * config.local_experts
    column = place % config.tp_size * inner
    halves = ColumnHalves.of(tensor, first, (column, config.intermediate_size + column))
    whole = (config.num_experts, config.hidden_size, 2 * config.intermediate_size)
    strides = (whole[1] * whole[2], whole[2], 1)
    return DTensor.from_local(
        halves, mesh, [*experts, Shard(2)], run_check=False, shape=torch.Size(whole), stride=strides
    )


def as_local(tensor: Any) -> Any:
    """This rank's part of what `as_global` made; anything else as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    from hyper_mpmd.modules.column_halves import ColumnHalves

    local = tensor.to_local()
    return local.joined() if isinstance(local, ColumnHalves) else local


def _mesh(grid: Grid, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if grid.tp_size == 1 or grid.ep_size == 1:
        group = grid.tp_group if grid.tp_size > 1 else grid.ep_group
        return DeviceMesh.from_group(group or dist.group.WORLD, device)  # type: ignore[arg-type]
    ranks = torch.tensor(grid.ranks).view(grid.ep_size, grid.tp_size)
    return DeviceMesh.from_group([grid.ep_group, grid.tp_group], device, mesh=ranks, mesh_dim_names=("ep", "tp"))
