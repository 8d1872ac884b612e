"""EP, TP and EP+TP against one process on the whole batch: outputs, all gradients, three optimizer steps."""

import pytest
import torch
import torch.distributed as dist

import hyper_mpmd as hm
from hyper_mpmd.expert_parallel import ExpertParallel, ExpertTensorParallel, GroupedExperts, MoE, TensorParallel

from .reference import Model, fill_with_values_of_order_one, full, relative_error
from .whole_batch import Case, train_beside_the_whole, worst

SOFTMAX = {"router_kwargs": {"score_func": "softmax", "route_norm": True}}
GROUPS = {"router_kwargs": {"num_expert_groups": 4, "num_limited_groups": 2}}
AFTER = {"score_before_experts": False}

CASES = [
    Case({"ep": 2}),
    Case({"ep": 2}, AFTER),
    Case({"ep": 2}, {**GROUPS, **AFTER}),
    Case({"ep": 2}, {"use_grouped_mm": True, "load_balance_coeff": 0.1}, async_combine=True),
    Case({"ep": 2}, {"num_experts": 2, "top_k": 1}),
    Case({"tp": 2}),
    Case({"tp": 2}, {"num_experts": 1, "top_k": 1}),
    Case({"tp": 2}, {**AFTER, "use_grouped_mm": True}),
    Case({"ep": 4}, GROUPS),
    Case({"ep": 4}, {**SOFTMAX, **AFTER}, async_combine=True),
    Case({"tp": 4}, GROUPS),
    Case({"ep": 2, "tp": 2}),
    Case({"ep": 2, "tp": 2}, {**AFTER, "load_balance_coeff": 0.1, "use_grouped_mm": True}),
    Case({"ep": 8}),
    Case({"ep": 4, "tp": 2}, {**GROUPS, **AFTER}),
]


def name_of(case):
    mesh = "x".join(f"{name}{size}" for name, size in case.sizes.items())
    options = [*case.model, *(["async"] if case.async_combine else [])]
    return "-".join([mesh, *(option.split("_")[0] for option in options)])


def world(case):
    size = 1
    for one in case.sizes.values():
        size *= one
    return size


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process_on_the_whole_batch(rank_pools, case):
    error, name, rank = worst(rank_pools[world(case)].run(train_beside_the_whole, case))
    assert error <= 1e-5, f"{name} on rank {rank}"


def placements_job():
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    found = {}
    for style, where in (
        (ExpertParallel(), mesh["ep"]),
        (TensorParallel(), mesh["tp"]),
        (ExpertTensorParallel(), mesh["ep", "tp"]),
    ):
        torch.manual_seed(dist.get_rank())  # ranks start from different weights: those of the mesh's first rank count
        experts = GroupedExperts(8, 12, 4)
        experts.w3.requires_grad_(False)
        before = {name: weight.clone() for name, weight in experts.named_parameters()}
        assert style.apply(experts, where) is experts
        found[type(style).__name__] = {
            name: (tuple(map(str, weight.placements)), tuple(weight.to_local().shape), weight.requires_grad)
            for name, weight in experts.named_parameters()
        }
        whole = {name: full(weight) for name, weight in experts.named_parameters()}
        if dist.get_rank() == 0:
            assert all(torch.equal(whole[name], before[name]) for name in before)
    return found


def test_placements_are_those_of_the_table(rank_pools):
    for found in rank_pools[4].run(placements_job):
        shard0, shard1, shard2 = ("S(0)",), ("S(1)",), ("S(2)",)
        assert found["ExpertParallel"] == {
            "w1": (shard0, (2, 12, 8), True),
            "w2": (shard0, (2, 8, 12), True),
            "w3": (shard0, (2, 12, 8), False),
        }
        assert found["TensorParallel"] == {
            "w1": (shard1, (4, 6, 8), True),
            "w2": (shard2, (4, 8, 6), True),
            "w3": (shard1, (4, 6, 8), False),
        }
        assert found["ExpertTensorParallel"] == {
            "w1": (shard0 + shard1, (2, 6, 8), True),
            "w2": (shard0 + shard2, (2, 8, 6), True),
            "w3": (shard0 + shard1, (2, 6, 8), False),
        }


def scores_job(style_name):
    """Scores given to the experts by keyword, as a caller without MoE does; every row of every rank differs."""
    rank = dist.get_rank()
    sizes = {"ExpertParallel": (4,), "TensorParallel": (4,), "ExpertTensorParallel": (2, 2)}[style_name]
    names = {"ExpertParallel": ("ep",), "TensorParallel": ("tp",), "ExpertTensorParallel": ("ep", "tp")}[style_name]
    mesh = hm.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    data_rank = mesh.get_local_rank("ep") if "ep" in names else 0
    styles = {style.__name__: style for style in (ExpertParallel, TensorParallel, ExpertTensorParallel)}
    plain = fill_with_values_of_order_one(GroupedExperts(8, 12, 4))
    spread = styles[style_name]().apply(fill_with_values_of_order_one(GroupedExperts(8, 12, 4)), mesh)
    generator = torch.Generator().manual_seed(data_rank)
    counts = torch.randint(0, 5, (4,), generator=generator)
    x = torch.randn(int(counts.sum()), 8, generator=generator)
    scores = torch.rand(len(x), generator=generator) + 0.1
    towards = torch.randn(len(x), 8, generator=generator)
    values = []
    for experts in (spread, plain):
        leaves = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        out = experts(leaves[0], counts, scores=leaves[1])
        values.append((out, *torch.autograd.grad((out * towards).sum(), leaves)))
    return {f"{name} on rank {rank}": relative_error(*pair) for name, *pair in zip("oxs", *values, strict=True)}


@pytest.mark.parametrize("style", ["ExpertParallel", "TensorParallel", "ExpertTensorParallel"])
def test_keyword_scores_and_their_gradients(rank_pools, style):
    assert worst(rank_pools[4].run(scores_job, style))[0] <= 1e-5


def lopsided_job(style_name, score_before_experts, use_grouped_mm):
    """EP rank 0 has no tokens; every token wants expert 0 or 1, so EP rank 1 receives nothing."""
    mesh = hm.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ep", "tp"))
    options = {"score_before_experts": score_before_experts, "use_grouped_mm": use_grouped_mm}
    whole, ours = Model(num_experts=4, **options), Model(num_experts=4, **options)
    for model in (whole, ours):
        model.moe.expert_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    if style_name == "EP":
        ExpertParallel().apply(ours.moe.experts, mesh["ep"])
    else:
        ExpertTensorParallel().apply(ours.moe.experts, mesh["ep", "tp"])
    x = torch.randn(3, 5, 16)
    mine = x[:0] if mesh.get_local_rank("ep") == 0 else x
    whole(x).square().sum().backward()
    out = ours(mine)
    assert out.shape == mine.shape
    out.square().sum().backward()
    errors = {}
    for (name, parameter), other in zip(ours.named_parameters(), whole.named_parameters(), strict=True):
        assert parameter.grad is not None, name
        if "experts.w" in name:
            other_grad = other[1].grad
            assert (other_grad[2:] == 0).all()
            assert (full(parameter.grad)[2:] == 0).all(), "an expert without rows gets exact zeros"
            errors[name] = relative_error(parameter.grad, other_grad)
    return errors


@pytest.mark.parametrize("style", ["EP", "EP+TP"])
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_a_rank_without_tokens_and_a_rank_without_rows_take_part(rank_pools, style, score_before_experts):
    results = rank_pools[2 if style == "EP" else 4].run(lopsided_job, style, score_before_experts, style == "EP")
    assert worst(results)[0] <= 1e-5


def low_precision_job(sizes, autocast):
    mesh = hm.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    exact, ours = Model(32, 64), Model(32, 64)
    style, where = {
        ("ep",): (ExpertParallel(), mesh),
        ("tp",): (TensorParallel(), mesh),
        ("ep", "tp"): (ExpertTensorParallel(), mesh),
    }[tuple(sizes)]
    x = torch.randn(2, 9, 32)
    if not autocast:
        ours, x = ours.bfloat16(), x.bfloat16()
    style.apply(ours.moe.experts, where)
    x.requires_grad_()
    # The block alone: in its bf16 surroundings the same tokens may be routed elsewhere.
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = ours.moe(x)
    assert out.dtype == x.dtype
    out.float().square().mean().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in ours.moe.parameters())
    if not autocast:
        exact = exact.bfloat16().float()
    expected = exact.moe(x.detach().float())
    return {"output": relative_error(out, expected)}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_bf16_and_autocast(rank_pools, sizes, autocast):
    results = rank_pools[2 ** len(sizes)].run(low_precision_job, sizes, autocast)
    error = worst(results)[0]
    assert 1e-5 < error < 0.04


def determinism_job():
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    x = torch.randn(4, 9, 16) + mesh.get_local_rank("ep")
    runs = []
    for _ in range(2):
        model = Model(load_balance_coeff=0.1, use_grouped_mm=True)
        ExpertTensorParallel().apply(model.moe.experts, mesh)
        out = model(x)
        out.square().mean().backward()
        runs.append([out.detach(), *(full(parameter.grad) for parameter in model.parameters())])
    return all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_runs_are_bitwise_equal(rank_pools):
    assert all(rank_pools[4].run(determinism_job))


def meta_job():
    """Weights made on meta are spread first and drawn after: no rank ever holds them all."""
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with torch.device("meta"):
        moe = MoE(16, 24, 4, 2)
    ExpertParallel().apply(moe.experts, mesh)
    moe.to_empty(device="cpu")
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    local = moe.experts.w2.to_local()
    bound = 24**-0.5
    assert local.shape == (2, 16, 24)
    assert 0.9 * bound < local.abs().max() <= bound
    parts = full(moe.experts.w2)
    return not torch.equal(parts[:2], parts[2:])


def test_meta_initialisation(rank_pools):
    assert all(rank_pools[2].run(meta_job))


def refusals_job():
    """(message, built-in class) of each refusal, at apply."""
    ep_tp = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    dp_ep = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    ep, tp = ep_tp["ep"], ep_tp["tp"]
    done = ExpertParallel().apply(GroupedExperts(8, 12, 4), ep)
    sharded = GroupedExperts(8, 12, 4)
    hm.fully_shard(sharded, mesh=dp_ep["dp"])
    with torch.device("meta"):
        on_meta = GroupedExperts(8, 12, 4)
    attempts = {
        "E % ep": lambda: ExpertParallel().apply(GroupedExperts(8, 12, 3), ep),
        "I % tp": lambda: TensorParallel().apply(GroupedExperts(8, 13, 4), tp),
        "E % ep, 2-D": lambda: ExpertTensorParallel().apply(GroupedExperts(8, 12, 5), ep_tp),
        "I % tp, 2-D": lambda: ExpertTensorParallel().apply(GroupedExperts(8, 7, 4), ep_tp),
        "2-D for EP": lambda: ExpertParallel().apply(GroupedExperts(8, 12, 4), ep_tp),
        "tp for EP": lambda: ExpertParallel().apply(GroupedExperts(8, 12, 4), tp),
        "ep for TP": lambda: TensorParallel().apply(GroupedExperts(8, 12, 4), ep),
        "1-D for EP+TP": lambda: ExpertTensorParallel().apply(GroupedExperts(8, 12, 4), ep),
        "dp, ep for EP+TP": lambda: ExpertTensorParallel().apply(GroupedExperts(8, 12, 4), dp_ep),
        "twice": lambda: TensorParallel().apply(done, tp),
        "after fully_shard": lambda: ExpertParallel().apply(sharded, dp_ep["ep"]),
        "the whole MoE": lambda: ExpertParallel().apply(MoE(8, 12, 4), ep),
        "no mesh": lambda: ExpertParallel().apply(GroupedExperts(8, 12, 4), dist.group.WORLD),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except hm.HyperMpmdError as error:
            found[name] = (str(error), isinstance(error, ValueError), isinstance(error, TypeError))
    unnamed = hm.init_device_mesh("cpu", (4,))
    ExpertParallel().apply(on_meta, unnamed)  # a 1-D mesh needs no name
    return found


def test_refusals_at_apply_name_both_sides(rank_pools):
    (found, *_) = rank_pools[4].run(refusals_job)
    expected = {
        "E % ep": ("num_experts=3 is not a multiple of ep=2", "ValueError"),
        "I % tp": ("hidden_dim=13 is not a multiple of tp=2", "ValueError"),
        "E % ep, 2-D": ("num_experts=5 is not a multiple of ep=2", "ValueError"),
        "I % tp, 2-D": ("hidden_dim=7 is not a multiple of tp=2", "ValueError"),
        "2-D for EP": (
            "1-D mesh with dimensions ('ep',), got a 2-D mesh of shape (2, 2) with ('ep', 'tp')",
            "ValueError",
        ),
        "tp for EP": ("dimensions ('ep',), got a 1-D mesh of shape (2,) with ('tp',): pass mesh[\"ep\"]", "ValueError"),
        "ep for TP": ("dimensions ('tp',), got a 1-D mesh of shape (2,) with ('ep',)", "ValueError"),
        "1-D for EP+TP": ("2-D mesh with dimensions ('ep', 'tp'), got a 1-D mesh of shape (2,)", "ValueError"),
        "dp, ep for EP+TP": ("got a 2-D mesh of shape (2, 2) with ('dp', 'ep')", "ValueError"),
        "twice": ("already spread over ep=", "ValueError"),
        "after fully_shard": ("apply the style before fully_shard", "ValueError"),
        "the whole MoE": ("applies to GroupedExperts, got MoE: pass moe.experts", "TypeError"),
        "no mesh": ("takes a DeviceMesh, got", "TypeError"),
    }
    assert found.keys() == expected.keys()
    for name, (text, kind) in expected.items():
        message, is_value_error, is_type_error = found[name]
        assert text in message
        assert is_value_error == (kind == "ValueError")
        assert is_type_error == (kind == "TypeError")
