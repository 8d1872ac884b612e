"""The four uses of the expert-parallel guide, each checked against the unsharded module on the whole batch.

    torchrun --nproc-per-node 4 examples/expert_parallel.py                  # 2, 4 or 8 CPU ranks
    torchrun --nproc-per-node 8 examples/expert_parallel.py --device cuda    # the same on GPUs

Prints one line a use, with the largest relative error of outputs and of gradients over all ranks, and fails above 1e-5
(on a GPU matmuls round otherwise in other shapes; the limit is then 1e-3).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_mpmd import fully_shard, init_device_mesh
from hyper_mpmd.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    FeedForward,
    MoE,
    reduce_gradients,
    update_expert_bias,
)

DIM, HIDDEN, EXPERTS, TOP_K = 64, 128, 8, 2
BATCH, SEQ = 4, 16  # of each rank that has tokens of its own


def build(device: str, **options: object) -> MoE:
    """The same weights on every rank, of a size that keeps outputs near 1."""
    torch.manual_seed(0)
    moe = MoE(DIM, HIDDEN, EXPERTS, TOP_K, shared_expert=FeedForward(DIM, HIDDEN), **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return moe.to(device)


def whole_batch(parts: int, device: str, seed: int = 1) -> torch.Tensor:
    """Tokens for `parts` ranks, equal on every rank: [parts * BATCH, SEQ, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parts * BATCH, SEQ, DIM, generator=generator).to(device)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |actual - expected| / max |expected|, of whole tensors; infinite where nothing was there to compare with, and
    for a NaN, which Python's max() would pass over."""
    actual = actual.detach()
    if isinstance(actual, DTensor):
        actual = actual.full_tensor()
    largest = expected.detach().abs().max().item()
    error = (actual - expected.detach()).abs().max().item()
    return error / largest if math.isfinite(error) and largest > 0 else float("inf")


def gradient_error(model: nn.Module, unsharded: nn.Module) -> float:
    """The largest of all parameters."""
    pairs: Iterable[tuple[nn.Parameter, nn.Parameter]] = zip(model.parameters(), unsharded.parameters(), strict=True)
    errors = []
    for ours, theirs in pairs:
        assert ours.grad is not None
        assert theirs.grad is not None
        errors.append(relative_error(ours.grad, theirs.grad))
    return max(errors)


def standard_ep(device: str) -> tuple[float, float]:
    """1. All-to-all expert parallelism over every rank."""
    moe, unsharded = build(device), build(device)
    ep_mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))

    ExpertParallel().apply(moe.experts, ep_mesh)

    batch = whole_batch(ep_mesh.size(), device)
    x = batch.chunk(ep_mesh.size())[ep_mesh.get_local_rank()]
    output = moe(x)
    output.square().mean().backward()
    reduce_gradients(moe, ep_mesh)

    expected = unsharded(batch)
    expected.square().mean().backward()
    mine = expected.chunk(ep_mesh.size())[ep_mesh.get_local_rank()]
    return relative_error(output, mine), gradient_error(moe, unsharded)


def ep_and_tp(device: str) -> tuple[float, float]:
    """2. EP and TP in two dimensions: TP ranks share tokens, EP ranks have their own."""
    moe, unsharded = build(device), build(device)
    tp_size = 2
    ep_size = dist.get_world_size() // tp_size
    mesh = init_device_mesh(device, (ep_size, tp_size), mesh_dim_names=("ep", "tp"))

    ExpertTensorParallel().apply(moe.experts, mesh["ep", "tp"])

    batch = whole_batch(ep_size, device)
    x = batch.chunk(ep_size)[mesh.get_local_rank("ep")]
    output = moe(x)
    output.square().mean().backward()
    reduce_gradients(moe, mesh["ep"])

    expected = unsharded(batch)
    expected.square().mean().backward()
    return relative_error(output, expected.chunk(ep_size)[mesh.get_local_rank("ep")]), gradient_error(moe, unsharded)


def load_balancing(device: str, steps: int = 3) -> tuple[float, float]:
    """3. Auxiliary loss and bias update, over a few steps; the bias is compared bit for bit."""
    moe, unsharded = build(device, load_balance_coeff=0.01), build(device, load_balance_coeff=0.01)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))
    ExpertParallel().apply(moe.experts, mesh)
    moe.aux_loss_group = mesh  # balance the tokens of all ranks, not each rank's own
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (moe, unsharded)]

    output_error = grad_error = 0.0
    for step in range(steps):
        batch = whole_batch(mesh.size(), device, seed=step)
        output = moe(batch.chunk(mesh.size())[mesh.get_local_rank()])
        output.square().mean().backward()
        reduce_gradients(moe, mesh)
        expected = unsharded(batch)
        expected.square().mean().backward()
        # The loss of each rank is its tokens' share of the whole; their mean is the loss of the whole batch.
        loss_value = output._load_balance_loss.clone()
        dist.all_reduce(loss_value)
        loss_value /= mesh.size()
        mine = expected.chunk(mesh.size())[mesh.get_local_rank()]
        output_error = max(
            output_error, relative_error(output, mine), relative_error(loss_value, expected._load_balance_loss)
        )
        grad_error = max(grad_error, gradient_error(moe, unsharded))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update_expert_bias(moe, lr=1e-3, num_recomputations=1, group=mesh)
        update_expert_bias(unsharded, lr=1e-3)
        if not torch.equal(moe.expert_bias, unsharded.expert_bias):
            raise AssertionError("expert_bias differs from the unsharded module's")
    return output_error, grad_error


def dp_ep_tp(device: str) -> tuple[float, float]:
    """4. EP and TP for the experts, fully_shard over dp for everything."""
    world = dist.get_world_size()
    dp_size, ep_size, tp_size = {2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}[world]
    mesh = init_device_mesh(device, (dp_size, ep_size, tp_size), mesh_dim_names=("dp", "ep", "tp"))
    model = nn.Sequential(build(device), build(device))
    unsharded = nn.Sequential(build(device), build(device))

    for moe in model:
        ExpertTensorParallel().apply(moe.experts, mesh["ep", "tp"])
    fully_shard(model, mesh=mesh["dp"])

    parts = dp_size * ep_size
    part = mesh.get_local_rank("dp") * ep_size + mesh.get_local_rank("ep")
    batch = whole_batch(parts, device)
    output = model(batch.chunk(parts)[part])
    output.square().mean().backward()
    reduce_gradients(model, mesh["dp", "ep"])

    expected = unsharded(batch)
    expected.square().mean().backward()
    return relative_error(output, expected.chunk(parts)[part]), gradient_error(model, unsharded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu")
    device = parser.parse_args().device
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    # torch advises on the speed of gathering whole tensors, which is done here only to compare them.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group()
    if dist.get_world_size() not in (2, 4, 8):
        raise SystemExit(f"run this on 2, 4 or 8 ranks, not {dist.get_world_size()}")
    limit = 1e-5 if device == "cpu" else 1e-3
    worst = 0.0
    for use in (standard_ep, ep_and_tp, load_balancing, dp_ep_tp):
        errors = torch.tensor(use(device), device=device)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        output, gradients = errors.tolist()
        worst = max(worst, output, gradients)
        if dist.get_rank() == 0:
            print(f"{use.__name__:15} {dist.get_world_size()} ranks: output {output:.1e}, gradients {gradients:.1e}")
    dist.destroy_process_group()
    if not worst <= limit:
        raise SystemExit(f"relative error {worst:.1e} is above {limit:.0e}")


if __name__ == "__main__":
    main()
    # torch's gloo threads may still hold the last tensors, and DTensor's caches keep their groups beyond
    # destroy_process_group(). A thread that frees a tensor while the interpreter shuts down aborts the process (torch
    # 2.13), so leave without that.
    sys.stdout.flush()
    os._exit(0)
