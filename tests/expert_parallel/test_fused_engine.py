"""engine="mega": the styles on the fused engine, against one process on the whole batch and against torch's way."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import hyper_mpmd as hm
from hyper_mpmd.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    FeedForward,
    GroupedExperts,
    MoE,
    TensorParallel,
)

from .reference import Model, fill_with_values_of_order_one, full, relative_error
from .whole_batch import Case, train_beside_the_whole, worst

AFTER = {"score_before_experts": False}
BALANCED = {"load_balance_coeff": 0.1, "router_kwargs": {"num_expert_groups": 4, "num_limited_groups": 2}}
MEGA = {"engine": "mega"}
STYLES = {("ep",): ExpertParallel, ("tp",): TensorParallel, ("ep", "tp"): ExpertTensorParallel}

CASES = [
    Case({"ep": 2}, **MEGA),
    Case({"ep": 2}, {**AFTER, **BALANCED}, **MEGA),
    Case({"ep": 2}, {"num_experts": 2, "top_k": 1}, recompute=True, **MEGA),
    Case({"tp": 2}, **MEGA),
    Case({"tp": 2}, {**AFTER, "num_experts": 1, "top_k": 1}, **MEGA),
    Case({"ep": 4}, micro_batches=2, max_norm=0.01, **MEGA),
    Case({"ep": 2, "tp": 2}, AFTER, **MEGA),
    Case({"dp": 2, "ep": 2}, BALANCED, shard="blocks", **MEGA),
]


def name_of(case):
    mesh = "x".join(f"{name}{size}" for name, size in case.sizes.items())
    return "-".join([mesh, *(option.split("_")[0] for option in case.model)])


def ranks(sizes):
    return torch.Size(sizes.values()).numel()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process_on_the_whole_batch(rank_pools, case):
    error, name, rank = worst(rank_pools[ranks(case.sizes)].run(train_beside_the_whole, case))
    assert error <= 1e-5, f"{name} on rank {rank}"


def engines_job(sizes, dtype, autocast):
    """One layer with each engine: how far their outputs and gradients are apart, one rank without tokens."""
    mesh = hm.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    place = mesh.get_local_rank("ep") if "ep" in sizes else 1
    generator = torch.Generator().manual_seed(place)
    x = torch.randn(0 if place == 0 else 7, 3, 16, generator=generator).to(torch.float32 if autocast else dtype)
    towards = torch.randn(x.shape, generator=generator)
    values, placements = [], []
    for engine in ("torch", "mega"):
        torch.manual_seed(3)
        moe = fill_with_values_of_order_one(MoE(16, 24, 4, 2, shared_expert=FeedForward(16, 24)))
        moe = moe if autocast else moe.to(dtype)
        STYLES[tuple(sizes)](engine=engine).apply(moe.experts, mesh)
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast):
            out = moe(given)
        (out * towards).sum().backward()
        assert out.dtype == x.dtype
        placements.append([weight.placements for weight in moe.experts.parameters()])
        experts = [weight.grad for weight in moe.experts.parameters()]
        others = [moe.router.gate.weight.grad, moe.shared_expert.w1.weight.grad, moe.tokens_per_expert]
        values.append(experts if place == 0 else [*experts, out, given.grad, *others])
        moe.experts.close()
        moe.experts.close()
    assert placements[0] == placements[1]
    return {str(number): relative_error(*pair) for number, pair in enumerate(zip(*values, strict=True))}


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"ep": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "autocast", "limit"),
    [
        (torch.float32, False, 1e-5),
        (torch.bfloat16, False, 0.03),
        (torch.float16, False, 4e-3),
        (torch.bfloat16, True, 0.03),
    ],
    ids=["float32", "bfloat16", "float16", "autocast"],
)
def test_equals_the_collectives(rank_pools, sizes, dtype, autocast, limit):
    assert worst(rank_pools[ranks(sizes)].run(engines_job, sizes, dtype, autocast))[0] <= limit


def scores_job():
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    generator = torch.Generator().manual_seed(dist.get_rank())
    counts = torch.tensor([3, 0, 2, 4], dtype=torch.int32)
    x, scores = torch.randn(9, 8, generator=generator), torch.rand(9, generator=generator) + 0.1
    values = []
    for style in (None, ExpertParallel(engine="mega")):
        experts = fill_with_values_of_order_one(GroupedExperts(8, 12, 4))
        if style is not None:
            style.apply(experts, mesh)
        leaves = [x.t().contiguous().t().requires_grad_(), scores.clone().requires_grad_()]
        out = experts(leaves[0], counts, scores=leaves[1])
        values.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        experts.close()
    return {name: relative_error(*pair) for name, *pair in zip("oxs", *values, strict=True)}


def test_scores_given_to_the_experts_and_their_gradient(rank_pools):
    assert worst(rank_pools[2].run(scores_job))[0] <= 1e-5


def copies_job(folder):
    """A copied layer and one loaded from a checkpoint give the same; the files are those of engine="torch"."""
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    x = torch.randn(6, 16)
    first, plain = Model(), Model()
    ExpertParallel(engine="mega").apply(first.moe.experts, mesh)
    ExpertParallel().apply(plain.moe.experts, mesh)
    assert first.state_dict().keys() == plain.state_dict().keys()
    expected = first(x)
    second = copy.deepcopy(first)
    dcp.save(first.state_dict(), checkpoint_id=folder)
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder)
    plain.load_state_dict(state)
    assert all(torch.equal(full(a), full(b)) for a, b in zip(first.parameters(), plain.parameters(), strict=True))
    same = torch.equal(second(x), expected)
    first.moe.experts.close()
    second.moe.experts.close()
    return same


def test_copies_and_checkpoints(rank_pools, tmp_path):
    assert all(rank_pools[2].run(copies_job, str(tmp_path)))


def refusals_job():
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    bad_counts = ExpertParallel(engine="mega").apply(GroupedExperts(8, 12, 4), mesh)
    wrong = torch.tensor([1, 2, 3, 4 + dist.get_rank()])
    attempts = {
        "engine": lambda: ExpertParallel(engine="fused").apply(GroupedExperts(8, 12, 4), mesh),
        "async": lambda: ExpertParallel(async_combine=True, engine="mega").apply(GroupedExperts(8, 12, 4), mesh),
        "dtype": lambda: ExpertParallel(engine="mega").apply(GroupedExperts(8, 12, 4).double(), mesh),
        "counts": lambda: bad_counts(torch.randn(10, 8), wrong),
    }
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises(hm.HyperMpmdError) as caught:
            attempt()
        found[name] = str(caught.value)
    good = bad_counts(torch.ones(10, 8), torch.tensor([1, 2, 3, 4]))
    bad_counts.close()
    return found, bool(good.isfinite().all())


def test_refusals_name_values_and_fix_and_the_layer_works_after(rank_pools):
    for found, works in rank_pools[2].run(refusals_job):
        assert "engine='fused'; known: 'torch', 'mega'" in found["engine"]
        assert "async_combine=True" in found["async"]
        assert "w1 is torch.float64" in found["dtype"]
        assert "rank 1" in found["counts"]  # also on rank 0
        assert works
