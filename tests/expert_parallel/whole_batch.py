"""A job for the ranks: train a model spread over a mesh and, beside it, the same model in one piece on the whole batch,
and report how far apart they are.

The batch differs between dp and ep ranks and is equal on tp ranks. Compared after each of three steps: outputs, the
gradient of the input, every parameter's gradient (experts, router, dense, shared expert), the norm that clipping uses,
the parameters, and the router's bias, which must agree in every bit.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_ as clip_in_one_process
from torch.utils.checkpoint import checkpoint

import hyper_mpmd as hm
from hyper_mpmd.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    TensorParallel,
    clip_grad_norm_,
    reduce_gradients,
    update_expert_bias,
)

from .reference import Model, relative_error


@dataclass
class Case:
    """How the model is spread, and what else is switched on. `sizes` are those of the mesh, by name."""

    sizes: dict[str, int]
    model: dict[str, Any] = field(default_factory=dict)
    async_combine: bool = False
    shard: str | None = None  # "model" or "blocks": fully_shard over dp
    micro_batches: int = 1
    recompute: bool = False
    max_norm: float | None = None
    reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    engine: str = "torch"

    @property
    def data_dims(self):
        return tuple(name for name in self.sizes if name in ("dp", "ep"))


def make_mesh(case):
    return hm.init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes))


def spread(model, case, mesh):
    """Apply the styles and fully_shard that the case asks for."""
    experts = model.moe.experts
    if "ep" in case.sizes and "tp" in case.sizes:
        ExpertTensorParallel(engine=case.engine).apply(experts, mesh["ep", "tp"])
    elif "ep" in case.sizes:
        ExpertParallel(async_combine=case.async_combine, engine=case.engine).apply(experts, mesh["ep"])
    elif "tp" in case.sizes:
        TensorParallel(engine=case.engine).apply(experts, mesh["tp"])
    if case.shard is not None:
        if case.shard == "blocks":
            hm.fully_shard(model.moe.experts, mesh=mesh["dp"])
            hm.fully_shard(model.moe, mesh=mesh["dp"])
        hm.fully_shard(model, mesh=mesh["dp"])
    return model


def data_position(case, mesh):
    """Which part of the batch this rank has, and how many parts there are."""
    position, parts = 0, 1
    for name in case.data_dims:
        position = position * case.sizes[name] + mesh.get_local_rank(name)
        parts *= case.sizes[name]
    return position, parts


def train_beside_the_whole(case, steps=3, batch=4, seq=5, dim=16):
    """The errors by name, on this rank."""
    mesh = make_mesh(case)
    position, parts = data_position(case, mesh)
    data_mesh = mesh[case.data_dims] if case.data_dims else None
    whole = Model(**case.model).to(case.dtype)
    ours = spread(Model(**case.model).to(case.dtype), case, mesh)
    ours.moe.aux_loss_group = data_mesh
    ours.moe.aux_loss_scale = 1 / case.micro_batches / (parts if case.reduction == "sum" else 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (whole, ours)]
    generator = torch.Generator().manual_seed(7)
    errors = {}

    def note(name, actual, expected, **options):
        errors[name] = max(errors.get(name, 0.0), relative_error(actual, expected, **options))

    for _ in range(steps):
        x = torch.randn(parts * batch, seq, dim, generator=generator).to(case.dtype)
        # A skewed target: each rank's tokens pull in their own direction.
        target = torch.randn(parts * batch, seq, dim, generator=generator).to(case.dtype)
        x_all = x.clone().requires_grad_()
        expected = whole(x_all)
        loss_of(expected, target).backward()

        mine = slice(position * batch, (position + 1) * batch)
        outputs, input_grads = [], []
        for x_part, target_part in zip(
            x[mine].chunk(case.micro_batches), target[mine].chunk(case.micro_batches), strict=True
        ):
            x_part = x_part.clone().requires_grad_()
            out = checkpoint(ours, x_part, use_reentrant=False) if case.recompute else ours(x_part)
            loss = loss_of(out, target_part) / case.micro_batches
            (loss / parts if case.reduction == "sum" else loss).backward()
            outputs.append(out)
            input_grads.append(x_part.grad)
        note("output", torch.cat(outputs), expected[mine])
        scale = 1.0 if case.reduction == "sum" else 1 / parts
        note("input gradient", torch.cat(input_grads) * scale, x_all.grad[mine], floor=1e-5)
        if data_mesh is not None:
            reduce_gradients(ours, data_mesh, case.reduction)
        for (name, parameter), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
            note(f"gradient of {name}", parameter.grad, other.grad, floor=1e-4)
        if case.max_norm is not None:
            norm = clip_in_one_process(whole.parameters(), case.max_norm)
            assert norm > case.max_norm, "nothing is clipped"
            note("norm", clip_grad_norm_(ours.parameters(), case.max_norm), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, parameter), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
            note(name, parameter, other)
        update_expert_bias(whole, lr=0.01)
        update_expert_bias(ours, lr=0.01, group=data_mesh)
        assert torch.equal(ours.moe.expert_bias, whole.moe.expert_bias)
        assert whole.moe.expert_bias.abs().max() > 1e-3 or len(whole.moe.expert_bias) == 1
    ours.moe.experts.close()
    return errors


def loss_of(out, target):
    return (out - target).square().mean()


def worst(results):
    """(error, what, rank) of the largest error that any rank reported."""
    return max((error, name, rank) for rank, errors in enumerate(results) for name, error in errors.items())
