"""Expert parallelism beside fully_shard, pipelines, recompute, accumulation, clipping and distributed checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import hyper_mpmd as hm
from hyper_mpmd.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    MoE,
    clip_grad_norm_,
    reduce_gradients,
    update_expert_bias,
)

from .reference import Model, fill_with_values_of_order_one, full, relative_error
from .test_styles_over_ranks import world
from .whole_batch import Case, loss_of, train_beside_the_whole, worst

AUX = {"load_balance_coeff": 0.1, "score_before_experts": False}

CASES = {
    "data parallel by hand": Case({"dp": 2, "ep": 2}, AUX),
    "fully_shard the model": Case({"dp": 2, "ep": 2}, AUX, shard="model"),
    "fully_shard each block": Case({"dp": 2, "ep": 2}, AUX, shard="blocks", async_combine=True),
    "fully_shard alone": Case({"dp": 2}, AUX, shard="blocks"),
    "fully_shard and tp": Case({"dp": 2, "tp": 2}, AUX, shard="blocks", max_norm=0.05),
    "clipping, ep": Case({"ep": 4}, max_norm=0.05),
    "clipping, ep and tp": Case({"ep": 2, "tp": 2}, max_norm=0.05),
    "accumulation": Case({"ep": 2}, {"score_before_experts": False}, micro_batches=4),
    "recompute": Case({"ep": 2}, AUX, recompute=True, async_combine=True),
    "recompute, accumulation, fully_shard": Case(
        {"dp": 2, "ep": 2}, shard="blocks", recompute=True, micro_batches=2, max_norm=0.05
    ),
    "losses that add up": Case({"dp": 2, "ep": 2}, AUX, shard="model", reduction="sum", max_norm=0.05),
    "everything": Case({"dp": 2, "ep": 2, "tp": 2}, AUX, shard="blocks", recompute=True, max_norm=0.05),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_one_process_on_the_whole_batch(rank_pools, case):
    error, name, rank = worst(rank_pools[world(case)].run(train_beside_the_whole, case))
    assert error <= 1e-5, f"{name} on rank {rank}"


def without_the_helper_job():
    """What is off, and by how much, when reduce_gradients is left out."""
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    whole, ours = Model(), Model()
    ExpertParallel().apply(ours.moe.experts, mesh)
    x = torch.randn(4, 5, 16)
    whole(x).square().mean().backward()
    ours(x.chunk(2)[dist.get_rank()]).square().mean().backward()
    reference = dict(whole.named_parameters())
    experts, router = "moe.experts.w1", "moe.router.gate.weight"
    grads = {name: parameter.grad for name, parameter in ours.named_parameters()}
    before = (
        relative_error(full(grads[experts]), 2 * reference[experts].grad),
        relative_error(grads[router], reference[router].grad),
    )
    reduce_gradients(ours, mesh)
    after = max(relative_error(grads[name], reference[name].grad) for name in (experts, router))
    return before, after


def test_the_style_divides_by_nothing_and_the_helper_does(rank_pools):
    for (experts_against_sum, router), after in rank_pools[2].run(without_the_helper_job):
        assert experts_against_sum <= 1e-5
        assert router > 0.05
        assert after <= 1e-5


def helper_edges_job():
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "frozen": nn.Linear(4, 4), "model": Model(num_experts=4)})
    model["frozen"].requires_grad_(False)
    ExpertParallel().apply(model["model"].moe.experts, mesh["ep"])
    if dist.get_rank() == 3:  # the other ranks have no gradient for it
        model["used"].weight.grad = torch.full((4, 4), 8.0)
    reduce_gradients(model, mesh)
    assert (model["used"].weight.grad == 2.0).all()
    assert model["frozen"].weight.grad is None
    messages = []
    whole_world = hm.init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    for arguments in ((model, whole_world), (model, mesh, "max"), (model, "ep"), (model, mesh["dp"])):
        try:
            reduce_gradients(*arguments)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_helper_fills_missing_gradients_and_refuses_a_mesh_that_mixes_or_lacks_ep(rank_pools):
    (messages, *_) = rank_pools[4].run(helper_edges_job)
    assert len(messages) == 4
    assert "of which data_mesh ('data',) has [0, 1, 2, 3] in one dimension" in messages[0]
    assert "got 'max'" in messages[1]
    assert "must be a DeviceMesh, got str" in messages[2]
    assert "over ranks [0, 1], but data_mesh ('dp',) of shape (2,) has no such dimension" in messages[3]


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_one_parameter_can_be_clipped_alone(norm_type):
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for parameter in (ours, theirs):
        parameter.grad = torch.tensor([1.0, -2.0, 4.0])
    norm = clip_grad_norm_(ours, 1.0, norm_type)
    assert norm == torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    assert torch.equal(ours.grad, theirs.grad)
    assert ours.grad[2] < 1.0


def mixed_precision_job():
    """fully_shard computes in bf16; the router's buffers and the score's product stay wide, the masters fp32."""
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    exact, ours = Model(32, 64, score_before_experts=False), Model(32, 64, score_before_experts=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ExpertParallel(async_combine=True).apply(ours.moe.experts, mesh["ep"])
    for module in (ours.moe.experts, ours.moe, ours):
        hm.fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    seen = []
    ours.moe.router.register_forward_hook(lambda _, arguments, out: seen.append((arguments[1].dtype, out[0].dtype)))
    x = torch.randn(2, 9, 32)
    out = ours.moe(x)
    out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16
    assert seen == [(torch.float32, torch.float32)]
    assert (ours.moe.expert_bias.dtype, ours.moe.tokens_per_expert.dtype) == (torch.float32, torch.int64)
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.moe.parameters())
    expected = exact.bfloat16().float().moe(x.bfloat16().float())
    return {"output": relative_error(out, expected)}


def test_fully_shard_in_mixed_precision(rank_pools):
    assert 1e-5 < worst(rank_pools[4].run(mixed_precision_job))[0] < 0.04


def copy_job():
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model = Model()
    ExpertParallel().apply(model.moe.experts, mesh)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 16)
    expected = model(x)
    with torch.no_grad():
        model.moe.experts.w2.zero_()
    return relative_error(twin(x), expected)


def test_a_spread_model_can_be_copied(rank_pools):
    assert rank_pools[2].run(copy_job) == [0.0, 0.0]


def flattened_job():
    """Dense parameters sharded over dp and ep as one dimension, experts over dp: nothing may be averaged twice."""
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every = mesh["dp", "ep"]._flatten("dp_ep")
    whole, ours = Model(), Model()
    ExpertParallel().apply(ours.moe.experts, mesh["ep"])
    hm.fully_shard(ours.moe.experts, mesh=mesh["dp"])
    hm.fully_shard(ours, mesh=every)
    x = torch.randn(8, 5, 16)
    whole(x).square().mean().backward()
    ours(x.chunk(4)[dist.get_rank()]).square().mean().backward()
    reduce_gradients(ours, mesh)
    pairs = zip(ours.named_parameters(), whole.parameters(), strict=True)
    return {name: relative_error(one.grad, other.grad, floor=1e-4) for (name, one), other in pairs}


def test_dense_parameters_sharded_over_dp_and_ep_together(rank_pools):
    assert worst(rank_pools[4].run(flattened_job))[0] <= 1e-5


def synced_bias_job():
    """Counts differ by rank; every way of naming the groups gives the bias of the whole batch, bit for bit."""
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    per_rank = torch.tensor([[100, 10, 50, 40], [0, 0, 7, 1], [3, 90, 0, 0], [11, 12, 13, 14]])
    biases = []
    for group in (mesh, [mesh["dp"], mesh["ep"]], [mesh["ep"].get_group(), mesh["dp"]], dist.group.WORLD):
        moe = MoE(4, 4, 4)
        moe.tokens_per_expert.copy_(per_rank[dist.get_rank()])
        update_expert_bias(moe, lr=0.01, group=group)
        assert moe.tokens_per_expert.sum() == 0
        biases.append(moe.expert_bias)
    with pytest.raises(ValueError, match="same ranks twice"):
        update_expert_bias(moe, group=[mesh["dp"], mesh["dp"]])
    whole = MoE(4, 4, 4)
    whole.tokens_per_expert.copy_(per_rank.sum(0))
    update_expert_bias(whole, lr=0.01)
    assert whole.expert_bias.abs().max() > 1e-3
    return all(torch.equal(bias, whole.expert_bias) for bias in biases)


def test_bias_is_bitwise_equal_over_groups(rank_pools):
    assert all(rank_pools[4].run(synced_bias_job))


def pipeline_job():
    """Two stages of one block each, EP over two ranks a stage, 1F1B over four micro-batches."""
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage_index, ep_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    whole = nn.Sequential(Model(), Model())
    fill_with_values_of_order_one(whole)
    ours = nn.Sequential(Model(), Model())
    fill_with_values_of_order_one(ours)
    block = ours[stage_index]
    ExpertParallel().apply(block.moe.experts, mesh["ep"])
    x = torch.randn(2, 8, 5, 16)  # by EP rank
    target = torch.randn(2, 8, 5, 16)
    sample = torch.empty(2, 5, 16, requires_grad=True)
    stage = PipelineStage(
        block,
        stage_index,
        2,
        torch.device("cpu"),
        input_args=(sample,),
        output_args=(sample,),
        group=mesh["pp"].get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    if stage_index == 0:
        schedule.step(x[ep_rank])
        out = None
    else:
        out = schedule.step(target=target[ep_rank])
    expected = whole(x.flatten(0, 1))
    loss_of(expected, target.flatten(0, 1)).backward()
    errors = {}
    if out is not None:
        errors["output"] = relative_error(out, expected.view(2, 8, 5, 16)[ep_rank])
    reduce_gradients(block, mesh["ep"])
    for (name, one), other in zip(block.named_parameters(), whole[stage_index].parameters(), strict=True):
        errors[f"stage {stage_index} {name}"] = relative_error(one.grad, other.grad, floor=1e-4)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()])
    ours_norm = clip_grad_norm_(block.parameters(), 0.01, pp_mesh=mesh["pp"])
    errors["norm"] = relative_error(ours_norm, norm)
    errors["clipped"] = relative_error(
        full(block.moe.experts.w1.grad), whole[stage_index].moe.experts.w1.grad * (0.01 / norm), floor=1e-6
    )
    assert block.moe.tokens_per_expert.sum() == 8 * 5 * 2
    return errors


def test_1f1b_pipeline(rank_pools):
    results = rank_pools[4].run(pipeline_job)
    assert any("output" in errors for errors in results)
    assert worst(results)[0] <= 1e-5


def infinity_norm_job():
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage = mesh.get_local_rank("pp")
    blocks = [Model(num_experts=4), Model(num_experts=4)]
    for n, block in enumerate(blocks):
        block(torch.randn(2, 3, 16)).square().mean().mul(n + 1).backward()
    mine = Model(num_experts=4)
    ExpertParallel().apply(mine.moe.experts, mesh["ep"])
    for (_, one), other in zip(mine.named_parameters(), blocks[stage].parameters(), strict=True):
        one.grad = (
            torch.distributed.tensor.distribute_tensor(other.grad, one.device_mesh, one.placements)
            if hasattr(one, "device_mesh")
            else other.grad.clone()
        )
    everything = [parameter.grad for block in blocks for parameter in block.parameters()]
    return {
        f"p={p}": relative_error(
            clip_grad_norm_(mine.parameters(), 1e9, p, pp_mesh=mesh["pp"]), torch.nn.utils.get_total_norm(everything, p)
        )
        for p in (float("inf"), 1.0, 3.0)
    }


def test_other_norms_over_stages(rank_pools):
    assert worst(rank_pools[4].run(infinity_norm_job))[0] <= 1e-5


def trained_model(style, mesh):
    model = Model(load_balance_coeff=0.1)
    model.moe.expert_bias.copy_(torch.linspace(-1, 1, 8) / 3)
    if style is not None:
        style.apply(model.moe.experts, mesh)
    return model


def save_job(path):
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dcp.save(get_model_state_dict(trained_model(ExpertParallel(), mesh)), checkpoint_id=path)


def load_job(path, sizes):
    """Whether every value that was saved is here again, bit for bit, in another layout."""
    mesh = hm.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    expected = trained_model(None, None).state_dict()
    model = Model(load_balance_coeff=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    (ExpertTensorParallel() if "tp" in sizes else ExpertParallel()).apply(model.moe.experts, mesh)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state)
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert "moe.tokens_per_expert" not in loaded
    assert loaded["moe.expert_bias"].dtype == torch.float32
    return all(torch.equal(full(loaded[name]), expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is what loading in one process means
@pytest.mark.parametrize("sizes", [{"ep": 1}, {"ep": 4}, {"ep": 2, "tp": 2}], ids=str)
def test_a_checkpoint_of_two_ep_ranks_loads_in_other_layouts(rank_pools, tmp_path, sizes):
    rank_pools[2].run(save_job, str(tmp_path))
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if ranks == 1:
        model = Model(load_balance_coeff=0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        state = model.state_dict()
        dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
        model.load_state_dict(state)
        expected = trained_model(None, None).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    else:
        assert all(rank_pools[ranks].run(load_job, str(tmp_path), sizes))
