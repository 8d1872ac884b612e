"""What the tests of MegaMoeExperts over ranks run in each rank."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hyper_mpmd import MegaMoeExperts

from .reference import EXPERTS, HIDDEN, SIZES, all_weights, batch, fill_weights, layer, leaves, plain, rel

HEAP = {"HYPER_PARALLEL_SHMEM_HEAP_SIZE": str(64 << 20), "HYPER_PARALLEL_SHMEM_TIMEOUT_SEC": "20"}


def ep_layer(**kwargs: Any) -> MegaMoeExperts:
    """A layer over all ranks, with this rank's share of the weights."""
    os.environ.update(HEAP)
    made = layer(**{"ep_size": dist.get_world_size(), **kwargs})
    fill_weights(made, dist.get_rank())
    return made


def tokens_of(rank: int, tokens: Any) -> int:
    return tokens if isinstance(tokens, int) else tokens[rank]


def gradients_job(
    tokens: Any, pattern: str, dtype: torch.dtype, optimizer: str | None = None, **kwargs: Any
) -> dict[str, float]:
    """Relative errors of this rank's results against plain torch on the batches of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = ep_layer(dtype=dtype, **kwargs)
    batches = [batch(tokens_of(r, tokens), seed=r, pattern=pattern, dtype=dtype) for r in range(world)]
    made = torch.Generator().manual_seed(5)
    dys = [torch.randn(x.shape, generator=made).to(dtype) for x, _, _ in batches]
    x, ids, weights = batches[rank]
    lr = 1e-4 if optimizer == "AdamW" else 0.1
    steps = None if optimizer is None else getattr(torch.optim, optimizer)(module.parameters(), lr=lr)
    y = module(x, ids, weights)
    y.backward(dys[rank])
    w1, w2 = leaves(*all_weights(dtype))
    whole = None if optimizer is None else getattr(torch.optim, optimizer)([w1, w2], lr=lr)
    errors = {}
    for other, (one, dy) in enumerate(zip(batches, dys, strict=True)):
        own_x, own_weights = leaves(one[0], one[2])
        expected = plain(own_x, one[1], own_weights, w1, w2, kwargs.get("swiglu_limit"))
        expected.backward(dy.double())
        if other == rank:
            errors = {
                "y": rel(y, expected),
                "dx": rel(x.grad, own_x.grad),
                "dweights": rel(weights.grad, own_weights.grad),
            }
    own = EXPERTS // world
    mine = slice(rank * own, (rank + 1) * own)
    for name, have, want in (("dw1", module.gate_up_weight, w1), ("dw2", module.down_weight, w2)):
        scale = float(want.grad.abs().max()) or 1.0  # of all ranks: one without rows has nothing to compare with
        errors[name] = float((have.grad.double() - want.grad[mine].double()).abs().max()) / scale
        for expert in range(own):
            if not any((ids == rank * own + expert).any() for _, ids, _ in batches):
                assert have.grad[expert].count_nonzero() == 0
    if steps is not None and whole is not None:
        steps.step()
        whole.step()
        errors["w1"], errors["w2"] = rel(module.gate_up_weight, w1[mine]), rel(module.down_weight, w2[mine])
    module.close()
    return errors


def refusal_job(bad_rank: int, number: int) -> tuple[str, list[str], str]:
    """One rank calls with something that is refused: (error class, its bases, text), and a good call after it works."""
    from .test_refusals import bad_calls

    module = ep_layer(local_num_tokens=8)
    x, ids, weights = batch(8)
    arguments = bad_calls()[number][2] if dist.get_rank() == bad_rank else (x, ids, weights)
    told = ("", [""], "")
    try:
        module(*arguments)
    except Exception as error:
        told = (type(error).__name__, [base.__name__ for base in type(error).__mro__], str(error))
    module(x, ids, weights).sum().backward()
    module.close()
    return told


def told_by(function: Any) -> tuple[str, str]:
    """The class and text of what the function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def differing_job(name: str, values: list[Any]) -> tuple[str, str]:
    """Ranks construct with values that differ."""
    os.environ.update(HEAP)
    sizes = {**SIZES, "max_local_num_tokens": 64, "ep_size": dist.get_world_size()}
    module = MegaMoeExperts(**{**sizes, name: values[dist.get_rank()]})
    told = told_by(lambda: module(*batch(4)))
    module.close()
    return told


def overflow_job() -> list[tuple[str, str]]:
    """All tokens to one rank, past its capacity, then balanced ones."""
    module = ep_layer(max_local_num_tokens=128, expert_capacity_factor=1.0)
    told = [told_by(lambda: module(*batch(128, pattern="single destination")))]
    told.append(told_by(lambda: module(*batch(128, pattern="balanced")).sum().backward()))
    module.close()
    return told


def mixed_no_grad_job() -> tuple[str, str]:
    """Only rank 0 will come to the backward pass."""
    module = ep_layer()
    with torch.set_grad_enabled(dist.get_rank() == 0):
        told = told_by(lambda: module(*batch(4)))
    module(*batch(4)).sum().backward()
    module.close()
    return told


def stack_job(shared: bool, **kwargs: Any) -> list[torch.Tensor]:
    """Three layers, two microbatches outstanding, backwards in reverse, eight steps of SGD: the weights at the end."""
    rank = dist.get_rank()
    layers = [ep_layer(**kwargs) for _ in range(3)]
    if shared:
        MegaMoeExperts.share_execution_resources(layers)
    steps = torch.optim.SGD([p for member in layers for p in member.parameters()], lr=0.05)
    for step in range(8):
        losses = []
        for microbatch in range(2):
            x, ids, weights = batch(10 + 3 * rank + step, seed=100 * rank + 2 * step + microbatch)
            h = x
            for member in layers:
                h = h + 0.1 * member(h, ids, weights)
            losses.append(h.square().mean())
        for loss in reversed(losses):
            loss.backward()
        steps.step()
        steps.zero_grad()
    made = [p.detach().clone() for member in layers for p in member.parameters()]
    for member in layers:
        member.close()
        member.close()
    return made


def subgroup_job() -> float:
    """EP 2 twice in a world of four: the largest relative error of this rank."""
    os.environ.update(HEAP)
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    module = layer(ep_size=2, ep_group=group)
    fill_weights(module, dist.get_rank(group))
    x, ids, weights = batch(20 + rank, seed=rank)
    y = module(x, ids, weights)
    y.sum().backward()
    module.close()
    return rel(y, plain(x, ids, weights, *all_weights()))


def checkpoint_job() -> bool:
    """Recomputation over ranks gives the same gradients."""
    from torch.utils.checkpoint import checkpoint

    module = ep_layer()
    x, ids, weights = batch(20, seed=dist.get_rank())
    module(x, ids, weights).square().sum().backward()
    want = [t.grad.clone() for t in (x, weights, *module.parameters())]
    for t in (x, weights, *module.parameters()):
        t.grad = None
    checkpoint(module, x, ids, weights, use_reentrant=False).square().sum().backward()
    have = [t.grad for t in (x, weights, *module.parameters())]
    module.close()
    return all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def frozen_job(frozen: list[list[str]]) -> list[bool]:
    """Each rank freezes other tensors; which of x, weights, w1, w2 got a gradient."""
    module = ep_layer()
    x, ids, weights = batch(20, seed=dist.get_rank())
    tensors = {"x": x, "weights": weights, "w1": module.gate_up_weight, "w2": module.down_weight}
    for name in frozen[dist.get_rank()]:
        tensors[name].requires_grad_(False)
    module(x, ids, weights).sum().backward()
    module.close()
    return [tensor.grad is not None for tensor in tensors.values()]


def many_steps_job(steps: int) -> tuple[int, int, int]:
    """Growth of memory (bytes), descriptors and threads over the last steps, T changing all the time."""
    import threading

    module = ep_layer()

    def state() -> tuple[int, int, int]:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * 4096
        return resident, len(os.listdir("/proc/self/fd")), threading.active_count() + len(os.listdir("/proc/self/task"))

    before = (0, 0, 0)
    for step in range(steps):
        if step == steps // 3:
            before = state()
        module(*batch((7 * step + dist.get_rank()) % 24, seed=step)).sum().backward()
    after = state()
    module.close()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


class Routed(torch.nn.Module):
    """A router and experts."""

    def __init__(self, experts: MegaMoeExperts) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.experts(x, ids, weights)


def data_parallel_job(kind: str) -> float:
    """Largest relative error of the weights after two steps of mean losses, against one process on the whole batch.

    kind: "ddp" or "fsdp" around experts over all ranks; "fsdp experts": over experts that every rank has.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hyper_mpmd.modules.mega_parallel import expert_parameters

    rank, world = dist.get_rank(), dist.get_world_size()
    model, whole = Routed(layer() if kind == "fsdp experts" else ep_layer()), Routed(layer())
    experts = expert_parameters(model)
    wrapped: torch.nn.Module = model
    if kind == "ddp":
        assert experts.names == ("experts.gate_up_weight", "experts.down_weight")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts.names)
        wrapped = DistributedDataParallel(model)
    else:
        fully_shard(model, ignored_params=set(experts.parameters))
    steps, all_steps = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole))
    for step in range(2):
        xs = [batch(16, seed=10 * step + r)[0].detach() for r in range(world)]
        wrapped(xs[rank]).square().mean().backward()
        experts.divide_gradients()
        torch.stack([whole(x).square().mean() for x in xs]).mean().backward()
        for one in (steps, all_steps):
            one.step()
            one.zero_grad()
    errors = []
    for have, want in zip(model.parameters(), whole.parameters(), strict=True):
        full = have.full_tensor() if isinstance(have, DTensor) else have
        own = len(full) if len(full) < len(want) else 0
        errors.append(rel(full, want[rank * own : (rank + 1) * own] if own else want))
    model.experts.close()
    return max(errors)


def save_job(path: str) -> None:
    """A distributed checkpoint of the layer."""
    import torch.distributed.checkpoint as dcp

    module = ep_layer()
    dcp.save({"model": module.state_dict()}, checkpoint_id=path)
    module.close()


def load_job(path: str) -> bool:
    """Load it, at any number of ranks: whether this rank's weights are bit for bit its share."""
    import torch.distributed.checkpoint as dcp

    module = MegaMoeExperts(**SIZES, max_local_num_tokens=64, ep_size=dist.get_world_size())
    state = {"model": module.state_dict()}
    dcp.load(state, checkpoint_id=path)
    module.load_state_dict(state["model"])
    want = ep_layer()
    same = all(torch.equal(a, b) for a, b in zip(module.parameters(), want.parameters(), strict=True))
    keys = list(module.state_dict()) == ["gate_up_weight", "down_weight"]
    return same and keys


def example_job(dtype: torch.dtype) -> float:
    """The two-rank example of the guide, on the CPU."""
    experts = MegaMoeExperts(
        local_num_tokens=1024,
        hidden_size=512,
        intermediate_size=128,
        num_experts=4,
        top_k=2,
        ep_size=dist.get_world_size(),
        ep_group=dist.group.WORLD,
    ).to(device="cpu", dtype=dtype)
    made = torch.Generator().manual_seed(dist.get_rank())
    hidden_states = torch.randn(1024, 512, generator=made).to(dtype).requires_grad_()
    scores, topk_ids = torch.randn(1024, 4, generator=made).softmax(-1).topk(2)
    topk_weights = scores.to(dtype).requires_grad_()
    output = experts(hidden_states, topk_ids, topk_weights)
    output.sum().backward()
    experts.close()
    gathered = [[torch.empty_like(p) for _ in range(2)] for p in experts.parameters()]
    for pieces, weight in zip(gathered, experts.parameters(), strict=True):
        dist.all_gather(pieces, weight.detach())
    return rel(output, plain(hidden_states, topk_ids, topk_weights, *(torch.cat(pieces) for pieces in gathered)))
