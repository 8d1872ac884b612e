"""What the tests of MegaMoeExperts over an ep x tp grid run in each rank."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_mpmd import MegaMoeExperts
from hyper_mpmd.modules.tensor_parallel import shard_down, shard_gate_up

from .jobs import HEAP, tokens_of, told_by
from .reference import EXPERTS, SIZES, all_weights, batch, leaves, plain, rel


def grid(ep: int, tp: int) -> DeviceMesh:
    os.environ.update(HEAP)
    return init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))


def groups(mesh: DeviceMesh) -> dict[str, Any]:
    """Constructor arguments of a layer on this mesh."""
    ep, tp = mesh.shape
    given = {"ep_size": ep, "ep_group": mesh["ep"].get_group()} if ep > 1 else {}
    return {**given, "tp_group": mesh["tp"].get_group()} if tp > 1 else given


def shards(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of `all_weights`."""
    (ep, tp), (expert, place) = mesh.shape, mesh.get_coordinate()
    own = EXPERTS // ep
    w1, w2 = (w[expert * own : (expert + 1) * own] for w in all_weights(dtype))
    return shard_gate_up(w1, tp, place), shard_down(w2, tp, place)


def tp_layer(mesh: DeviceMesh, **kwargs: Any) -> MegaMoeExperts:
    if "local_num_tokens" not in kwargs:
        kwargs.setdefault("max_local_num_tokens", 64)
    made = MegaMoeExperts(**{**SIZES, **groups(mesh), **kwargs})
    with torch.no_grad():
        for weight, own in zip(made.parameters(), shards(mesh), strict=True):
            weight.copy_(own)
    return made


def gradients_job(ep: int, tp: int, tokens: Any, pattern: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of this rank's results, and of its weights after a step, against one process on all batches."""
    mesh = grid(ep, tp)
    expert, place = mesh.get_coordinate()
    module = tp_layer(mesh, dtype=dtype)
    batches = [batch(tokens_of(r, tokens), seed=r, pattern=pattern, dtype=dtype) for r in range(ep)]
    made = torch.Generator().manual_seed(5)
    dys = [torch.randn(x.shape, generator=made).to(dtype) for x, _, _ in batches]
    x, ids, weights = batches[expert]
    y = module(x, ids, weights)
    y.backward(dys[expert])
    w1, w2 = leaves(*all_weights(dtype))
    errors = {}
    for other, (one, dy) in enumerate(zip(batches, dys, strict=True)):
        own_x, own_weights = leaves(one[0], one[2])
        expected = plain(own_x, one[1], own_weights, w1, w2)
        expected.backward(dy.double())
        if other == expert:
            errors["y"] = rel(y, expected)
            errors["dx"] = rel(x.grad, own_x.grad)
            errors["dweights"] = rel(weights.grad, own_weights.grad)
    own = EXPERTS // ep
    mine = slice(expert * own, (expert + 1) * own)
    wanted = (shard_gate_up(w1.grad[mine], tp, place), shard_down(w2.grad[mine], tp, place))
    for name, have, want, whole in zip(
        ("dw1", "dw2"), (module.gate_up_weight, module.down_weight), wanted, (w1, w2), strict=True
    ):
        scale = float(whole.grad.abs().max()) or 1.0
        errors[name] = float((have.grad.double() - want.double()).abs().max()) / scale
        for number in range(own):
            if not any((ids == expert * own + number).any() for _, ids, _ in batches):
                assert have.grad[number].count_nonzero() == 0
    module.close()
    return errors


def bits_job(ep: int, tp: int) -> list[bytes]:
    """The bytes of output and gradients of three runs of one call on this rank: the same team, the same bits."""
    mesh = grid(ep, tp)
    made = []
    for _ in range(3):
        module = tp_layer(mesh)
        x, ids, weights = batch(33, seed=mesh.get_coordinate()[0])
        y = module(x, ids, weights)
        y.square().sum().backward()
        tensors = (y, x.grad, weights.grad)
        made.append(b"".join(t.detach().numpy().tobytes() for t in tensors))
        made.append(b"".join(p.grad.numpy().tobytes() for p in module.parameters()))
        module.close()
    assert made[:2] == made[2:4] == made[4:]
    return made[:1]


def team_job(ep: int, tp: int, what: str, bad_rank: int) -> tuple[str, str]:
    """One rank brings something else than its team; then a good call works."""
    mesh = grid(ep, tp)
    module = tp_layer(mesh)
    bad = dist.get_rank() == bad_rank
    x, ids, weights = batch(9, seed=mesh.get_coordinate()[0])
    arguments = (x, ids, weights)
    if bad and what == "tokens":
        arguments = batch(8)
    elif bad and what == "ids":
        arguments = (x, ids.flip(0), weights)
    elif bad and what == "refused":
        arguments = (x, ids - 9, weights)
    told = told_by(lambda: module(*arguments))
    module(x, ids, weights).sum().backward()
    module.close()
    return told


def grid_refusal_job(case: str) -> tuple[str, str]:
    """Groups that cannot be those of one layer."""
    os.environ.update(HEAP)
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    side, far = pairs[rank // 2], pairs[2 + rank % 2]
    given: dict[str, Any] = {
        "the same group twice": {"ep_size": 2, "ep_group": side, "tp_group": side},
        "tp_group first": {"ep_size": 2, "ep_group": side, "tp_group": far},
        "all ranks as ep_group": {"ep_size": 2, "tp_group": side},
        "an intermediate size that does not divide": {"tp_group": None, "intermediate_size": 25},
        "a group of others": {"tp_group": pairs[1 - rank // 2]},
        "no group": {"tp_group": [0, 1]},
    }[case]
    if case == "an intermediate size that does not divide":
        given["tp_group"] = side
    return told_by(lambda: MegaMoeExperts(**{**SIZES, "max_local_num_tokens": 8, **given}))


def two_grids_job() -> float:
    """Two grids of 1 x 2 and of 2 x 2 side by side on other ranks: the largest relative error of this rank."""
    os.environ.update(HEAP)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    own = mesh["ep", "tp"]
    errors = []
    for _ in range(2):  # the second layer finds the group that the first one made
        module = tp_layer(own)
        x, ids, weights = batch(11 + rank // 2, seed=rank // 2)
        y = module(x, ids, weights)
        y.sum().backward()
        errors.append(rel(y, plain(x, ids, weights, *all_weights())))
        module.close()
    return max(errors)


def save_job(ep: int, tp: int, path: str) -> None:
    """A distributed checkpoint of the layer and of an optimizer's moment of each parameter."""
    import torch.distributed.checkpoint as dcp

    mesh = grid(ep, tp)
    module = tp_layer(mesh)
    moments = {name: module.global_view(p.detach() * 2) for name, p in module.named_parameters()}
    dcp.save({"model": module.state_dict(), "moments": moments}, checkpoint_id=path)
    module.close()


def load_job(ep: int, tp: int, path: str) -> bool:
    """Load it on another grid: whether this rank's weights and moments are bit for bit its shards."""
    import torch.distributed.checkpoint as dcp

    mesh = grid(ep, tp)
    module = MegaMoeExperts(**{**SIZES, **groups(mesh)}, max_local_num_tokens=64)
    moments = {name: torch.zeros_like(p.detach()) for name, p in module.named_parameters()}
    views = {name: module.global_view(moment) for name, moment in moments.items()}
    state = {"model": module.state_dict(), "moments": views}
    assert [tuple(entry.shape) for entry in state["model"].values()] == [tuple(w.shape) for w in all_weights()]
    dcp.load(state, checkpoint_id=path)
    module.load_state_dict(state["model"])
    want = shards(mesh)
    same = all(torch.equal(a, b) for a, b in zip(module.parameters(), want, strict=True))
    return same and all(torch.equal(a, 2 * b) for a, b in zip(moments.values(), want, strict=True))


def stack_job(shared: bool) -> list[torch.Tensor]:
    """Two layers on a 2 x 2 grid, two microbatches outstanding, backwards in reverse: the weights after four steps."""
    mesh = grid(2, 2)
    layers = [tp_layer(mesh) for _ in range(2)]
    if shared:
        MegaMoeExperts.share_execution_resources(layers)
    steps = torch.optim.SGD([p for member in layers for p in member.parameters()], lr=0.05)
    expert = mesh.get_coordinate()[0]
    for step in range(4):
        losses = []
        for microbatch in range(2):
            h, ids, weights = batch(10 + 3 * expert + step, seed=100 * expert + 2 * step + microbatch)
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
    return made


def data_parallel_job() -> float:
    """DDP over a 2 x 2 grid: largest relative error of the weights after two steps of mean losses."""
    from torch.nn.parallel import DistributedDataParallel

    from hyper_mpmd.modules.mega_parallel import expert_parameters

    from .jobs import Routed
    from .reference import layer

    mesh = grid(2, 2)
    expert, place = mesh.get_coordinate()
    model, whole = Routed(tp_layer(mesh)), Routed(layer())
    experts = expert_parameters(model)
    assert experts.divisor == 2
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts.names)
    wrapped = DistributedDataParallel(model)
    steps, all_steps = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole))
    for step in range(2):
        xs = [batch(16, seed=10 * step + r)[0].detach() for r in range(2)]
        wrapped(xs[expert]).square().mean().backward()
        experts.divide_gradients()
        torch.stack([whole(x).square().mean() for x in xs]).mean().backward()
        for one in (steps, all_steps):
            one.step()
            one.zero_grad()
    mine = slice(expert * EXPERTS // 2, (expert + 1) * EXPERTS // 2)
    errors = [rel(a, b) for a, b in zip(model.router.parameters(), whole.router.parameters(), strict=True)]
    errors.append(rel(model.experts.gate_up_weight, shard_gate_up(whole.experts.gate_up_weight[mine], 2, place)))
    errors.append(rel(model.experts.down_weight, shard_down(whole.experts.down_weight[mine], 2, place)))
    model.experts.close()
    return max(errors)


def copies_job() -> tuple[bool, str, str]:
    """A deep copy computes the same; a pickle, and gathering gate_up by its placements, are refused."""
    import copy
    import pickle

    module = tp_layer(grid(2, 2))
    x, ids, weights = batch(9)
    again = copy.deepcopy(module)
    same = torch.equal(module(x, ids, weights), again(x, ids, weights))
    pickled, gathered = (
        told_by(call)[1] for call in (lambda: pickle.dumps(module), module.state_dict()["gate_up_weight"].full_tensor)
    )
    whole = module.state_dict()["down_weight"].full_tensor()
    module.close()
    again.close()
    return same and torch.equal(whole, all_weights()[1]), pickled, gathered
