"""MegaMoeExperts beside other parallelism: what DDP must leave alone, and checkpoints that know the global experts.

A rank's experts are its own: two ranks hold different weights under one name. DDP would average them, and a distributed
checkpoint of plain local tensors would keep one rank's and lose the others'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_mpmd.modules.mega_errors import MegaMoeValueError


@dataclass(frozen=True)
class ExpertParameters:
    """The parameters of a model that are spread over expert-parallel ranks.

    names, parameters: as in `model.named_parameters()`; the names are what DDP has to ignore.
    divisor: their gradients are sums over the ranks' losses; divided by this they are those of the mean of the losses,
    as DDP and FSDP make all others. Divide after the last backward of a step and before clipping.
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
    """Those of all MegaMoeExperts with ep_size > 1 in the model; before it is wrapped:

        experts = expert_parameters(model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts.names)

    MegaMoeValueError where layers have different ep_size, and so no one divisor.
    """
    from hyper_mpmd.modules.mega_moe import MegaMoeExperts

    found: dict[str, nn.Parameter] = {}
    divisors = set()
    for prefix, module in model.named_modules():
        if isinstance(module, MegaMoeExperts) and module.config.ep_size > 1:
            divisors.add(module.config.ep_size)
            found.update(module.named_parameters(prefix=prefix, recurse=False))
    if len(divisors) > 1:
        raise MegaMoeValueError(f"layers have ep_size {sorted(divisors)}; give each its own expert_parameters call")
    return ExpertParameters(tuple(found), tuple(found.values()), divisors.pop() if divisors else 1)


def as_global(tensor: torch.Tensor, ep_size: int, group: dist.ProcessGroup | None) -> Any:
    """This rank's part [E / EP, ...] as a part of all experts' [E, ...]: a DTensor, Shard(0), sharing its memory."""
    if ep_size == 1:
        return tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group or dist.group.WORLD, tensor.device.type)  # type: ignore[arg-type]
    return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)


def as_local(tensor: Any) -> Any:
    """This rank's part of what `as_global` made; anything else as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
