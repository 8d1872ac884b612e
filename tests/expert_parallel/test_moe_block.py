"""The MoE block in one process: values, shapes, dtypes, buffers, recompute, determinism."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_mpmd.expert_parallel import FeedForward, MoE, permutation, unpermutation

from .reference import Model, fill_with_values_of_order_one, moe_by_token, relative_error


def moe_of_order_one(dim=16, hidden_dim=24, num_experts=8, top_k=2, **options):
    return fill_with_values_of_order_one(MoE(dim, hidden_dim, num_experts, top_k, **options))


@pytest.mark.parametrize("score_before_experts", [True, False])
@pytest.mark.parametrize("use_grouped_mm", [True, False])
@pytest.mark.parametrize(
    "router_kwargs",
    [{}, {"score_func": "softmax", "route_norm": True}, {"num_expert_groups": 4, "num_limited_groups": 2}],
)
def test_equals_one_token_at_a_time_in_values_and_gradients(score_before_experts, use_grouped_mm, router_kwargs):
    moe = moe_of_order_one(
        score_before_experts=score_before_experts,
        use_grouped_mm=use_grouped_mm,
        router_kwargs=router_kwargs,
        shared_expert=FeedForward(16, 24, bias=True),
    )
    x = torch.randn(2, 7, 16, requires_grad=True)
    towards = torch.randn(2, 7, 16)
    leaves = [x, *moe.parameters()]
    expected, actual = moe_by_token(moe, x), moe(x)
    assert relative_error(actual, expected) < 1e-5
    ours = torch.autograd.grad((actual * towards).sum(), leaves)
    theirs = torch.autograd.grad((expected * towards).sum(), leaves, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize(("score_before_experts", "expected"), [(True, 0.155615), (False, 0.365529)])
def test_one_number_shows_where_the_score_multiplies(score_before_experts, expected):
    moe = MoE(1, 1, 1, score_before_experts=score_before_experts)
    with torch.no_grad():
        for weight in moe.experts.parameters():
            weight.fill_(1.0)
        moe.router.gate.weight.fill_(0.0)  # sigmoid(0) = 0.5
    assert moe(torch.ones(1, 1, 1)).item() == pytest.approx(expected, abs=1e-6)


def test_feed_forward_is_its_formula():
    dense = fill_with_values_of_order_one(FeedForward(16, 24, bias=True))
    x = torch.randn(2, 3, 4, 16)
    expected = dense.w2(nn.functional.silu(dense.w1(x)) * dense.w3(x))
    assert relative_error(dense(x), expected) < 1e-6
    assert [name for name, _ in FeedForward(4, 8).named_parameters()] == ["w1.weight", "w2.weight", "w3.weight"]
    assert dense.bfloat16()(x).dtype == torch.float32


@pytest.mark.parametrize("score_before_experts", [True, False])
@pytest.mark.parametrize(
    ("shape", "num_experts", "top_k"), [((0, 5), 8, 2), ((1, 1), 8, 2), ((2, 3), 8, 1), ((2, 3), 1, 1), ((4,), 4, 4)]
)
def test_edge_shapes(shape, num_experts, top_k, score_before_experts):
    moe = moe_of_order_one(num_experts=num_experts, top_k=top_k, score_before_experts=score_before_experts)
    x = torch.randn(*shape, 16, requires_grad=True)
    out = moe(x)
    assert out.shape == x.shape
    if x.numel():
        assert relative_error(out, moe_by_token(moe, x)) < 1e-5
    out.sum().backward()
    for parameter in moe.parameters():
        assert parameter.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("shared_expert", [None, FeedForward(16, 24)])
def test_the_output_is_no_view_and_can_be_written_in_place(shared_expert):
    """torch warns of views at the end of a module under fully_shard: written in place, they lose its hook."""
    out = moe_of_order_one(shared_expert=shared_expert)(torch.randn(2, 3, 16))
    assert not out._is_view()
    out += 1.0
    out.sum().backward()


def test_group_limited_routing_of_no_tokens():
    moe = moe_of_order_one(router_kwargs={"num_expert_groups": 4, "num_limited_groups": 2})
    assert moe(torch.randn(0, 3, 16)).shape == (0, 3, 16)


def test_non_contiguous_input():
    moe = moe_of_order_one(use_grouped_mm=True)
    x = torch.randn(16, 5, 2).permute(2, 1, 0)
    assert not x.is_contiguous()
    assert torch.equal(moe(x), moe(x.contiguous()))


@pytest.mark.parametrize("score_before_experts", [True, False])
def test_bf16_module(score_before_experts):
    moe = moe_of_order_one(
        32, 64, score_before_experts=score_before_experts, shared_expert=FeedForward(32, 64), use_grouped_mm=True
    ).bfloat16()
    x = torch.randn(2, 9, 32).bfloat16()
    out = moe(x)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, moe_by_token(copy.deepcopy(moe).float(), x.float())) < 0.03


@pytest.mark.parametrize("score_before_experts", [True, False])
def test_autocast(score_before_experts):
    moe = moe_of_order_one(32, 64, score_before_experts=score_before_experts, shared_expert=FeedForward(32, 64))
    x = torch.randn(2, 9, 32)
    exact = moe_by_token(moe, x)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x)
    assert out.dtype == torch.float32
    assert 1e-5 < relative_error(out, exact) < 0.03
    out.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in moe.parameters())


def to_half_by_type(module):
    module.type(torch.float16)  # casts integers as well


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, to_half_by_type])
def test_buffers_keep_dtype_and_value_under_casts(cast):
    model = nn.Sequential(moe_of_order_one())
    moe = model[0]
    moe.expert_bias.copy_(torch.linspace(-1, 1, 8) / 3)
    moe.tokens_per_expert.fill_(2**40 + 1)
    before = moe.expert_bias.clone()
    cast(model)
    assert moe.experts.w1.dtype != torch.float32
    assert moe.expert_bias.dtype == torch.float32
    assert torch.equal(moe.expert_bias, before)
    assert moe.tokens_per_expert.dtype == torch.int64
    assert (moe.tokens_per_expert == 2**40 + 1).all()
    assert moe.state_dict()["expert_bias"].data_ptr() == moe.expert_bias.data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_a_bf16_checkpoint_does_not_change_the_bias_dtype(assign):
    model = nn.Sequential(moe_of_order_one())
    saved = {name: value.bfloat16() for name, value in model.state_dict().items()}
    saved["0.expert_bias"] = torch.ones(8).bfloat16()
    model.load_state_dict(saved, assign=assign)
    assert model[0].expert_bias.dtype == torch.float32
    assert (model[0].expert_bias == 1).all()


def test_state_dict_names():
    names = list(moe_of_order_one(shared_expert=FeedForward(16, 24)).state_dict())
    assert sorted(names) == sorted(
        [
            "experts.w1",
            "experts.w2",
            "experts.w3",
            "router.gate.weight",
            "shared_expert.w1.weight",
            "shared_expert.w2.weight",
            "shared_expert.w3.weight",
            "expert_bias",
        ]
    )


def test_a_module_made_on_meta_is_whole_after_to_empty_and_reset():
    with torch.device("meta"):
        moe = MoE(16, 24, 8, 2)
    moe.to_empty(device="cpu")
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert (moe.expert_bias == 0).all()
    assert (moe.tokens_per_expert == 0).all()
    x = torch.randn(2, 3, 16)
    assert relative_error(moe(x), moe_by_token(moe, x)) < 1e-5


def test_tokens_are_counted_in_training_only():
    moe, x = moe_of_order_one(), torch.randn(2, 5, 16)
    moe(x)
    moe(x)
    assert moe.tokens_per_expert.sum() == 2 * 2 * 10
    assert torch.equal(moe.tokens_per_expert, 2 * moe.router(x)[2])
    moe.eval()(x)
    assert moe.tokens_per_expert.sum() == 2 * 2 * 10


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_counts_once_and_changes_no_gradient(use_reentrant):
    plain, again = Model(load_balance_coeff=0.1), Model(load_balance_coeff=0.1)
    x = torch.randn(2, 5, 16, requires_grad=True)
    plain(x).square().sum().backward()
    grad, x.grad = x.grad, None
    checkpoint(again, x, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(plain.moe.tokens_per_expert, again.moe.tokens_per_expert)
    assert plain.moe.tokens_per_expert.sum() == 20
    assert torch.equal(x.grad, grad)
    for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_recompute_of_one_micro_batch_leaves_the_loss_of_the_next():
    model = Model(load_balance_coeff=0.1)
    first = checkpoint(model, torch.randn(2, 5, 16), use_reentrant=False)
    model(torch.randn(2, 5, 16))
    kept = model.moe.last_aux_loss
    first.sum().backward()
    assert model.moe.last_aux_loss is kept


def test_runs_are_bitwise_equal():
    x = torch.randn(4, 16, 16)

    def once():
        model = Model(load_balance_coeff=0.1)
        out = model(x)
        out.square().sum().backward()
        return [out, *(parameter.grad for parameter in model.parameters())]

    assert all(torch.equal(one, other) for one, other in zip(once(), once(), strict=True))


@pytest.mark.parametrize("score_before_experts", [True, False])
@pytest.mark.parametrize("use_grouped_mm", [True, False])
def test_a_nan_token_spoils_no_other(use_grouped_mm, score_before_experts):
    moe = moe_of_order_one(score_before_experts=score_before_experts, use_grouped_mm=use_grouped_mm)
    x = torch.randn(1, 6, 16)
    clean = moe(x)
    x[0, 2] = float("nan")
    out = moe(x)
    others = [0, 1, 3, 4, 5]
    assert relative_error(out[0, others], clean[0, others]) < 1e-6
    assert out[0, 2].isnan().all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 7), st.integers(1, 4), st.integers(0, 2**31))
def test_permutation_sorts_by_expert_and_unpermutation_undoes_it(num_tokens, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    selected = torch.rand(num_tokens, 5, generator=generator).argsort(1)[:, :top_k]
    rows, order = permutation(x, selected)
    flat = selected.reshape(-1)[order]
    assert (flat[1:] >= flat[:-1]).all()
    assert torch.equal(rows, x[order // top_k])
    same = flat[1:] == flat[:-1]
    assert (order[1:] > order[:-1])[same].all()  # the tokens of one expert keep their order
    scores = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64, requires_grad=True)
    home = unpermutation(rows, order, top_k, scores)
    expected = x * scores.sum(1, keepdim=True)
    assert torch.allclose(home, expected)
    towards = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((home * towards).sum(), (x, scores))
    theirs = torch.autograd.grad((expected * towards).sum(), (x, scores))
    assert all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="top_k=9 is above the 8 experts"):
        MoE(16, 24, 8, 9)
    with pytest.raises(ValueError, match="load_balance_coeff must be finite and >= 0, got -1"):
        MoE(16, 24, 8, load_balance_coeff=-1)
    with pytest.raises(TypeError, match=r"load_balance_coeff must be a number, got '0\.1'"):
        MoE(16, 24, 8, load_balance_coeff="0.1")
    with pytest.raises(ValueError, match=r"shape of x, \[2, 16\], but returned \[1, 2, 16\]"):
        MoE(16, 24, 8, shared_expert=nn.Unflatten(0, (1, 2)))(torch.randn(2, 16))
    with pytest.raises(TypeError, match="shared_expert must be a module or None, got dict"):
        MoE(16, 24, 8, shared_expert={})
    with pytest.raises(ValueError, match=r"x must be \[..., 16\], got \[2, 3, 15\]"):
        MoE(16, 24, 8)(torch.randn(2, 3, 15))
    rows, order = permutation(torch.randn(3, 4), torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="one T, got"):
        permutation(torch.randn(3, 4), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="top_k must be an int > 0, got 0"):
        unpermutation(rows, order, 0)
    with pytest.raises(ValueError, match="with k=4"):
        unpermutation(rows, order, 4)
    with pytest.raises(ValueError, match=r"scores must be \[3, 2\] like the rows, got \[2, 3\]"):
        unpermutation(rows, order, 2, torch.rand(2, 3))
