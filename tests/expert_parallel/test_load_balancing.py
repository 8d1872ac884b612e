"""The auxiliary loss and the bias update: the published numbers, gradients, scale."""

import pytest
import torch
from torch import nn

from hyper_mpmd.expert_parallel import MoE, update_expert_bias
from hyper_mpmd.expert_parallel.load_balance import add_load_balance_loss
from hyper_mpmd.expert_parallel.router import count_tokens

from .reference import Model, fill_with_values_of_order_one, relative_error


def test_bias_moves_against_the_load_by_the_published_numbers():
    moe = MoE(4, 4, 4)
    moe.tokens_per_expert.copy_(torch.tensor([100, 10, 50, 40]))
    update_expert_bias(moe, lr=0.01)
    assert torch.allclose(moe.expert_bias, torch.tensor([-0.0125, 0.0075, -0.0025, 0.0075]), atol=1e-9)
    assert moe.tokens_per_expert.tolist() == [0, 0, 0, 0]


def test_recomputations_change_nothing():
    biases = []
    for factor in (1, 2):
        moe = MoE(4, 4, 4)
        moe.tokens_per_expert.copy_(factor * torch.tensor([100, 10, 50, 40]))
        update_expert_bias(moe, num_recomputations=factor)
        biases.append(moe.expert_bias)
    assert torch.equal(*biases)


def test_a_whole_model_is_updated_block_by_block():
    model = nn.Sequential(MoE(4, 4, 4), MoE(4, 4, 2))
    model[0].tokens_per_expert.copy_(torch.tensor([100, 10, 50, 40]))
    model[1].tokens_per_expert.copy_(torch.tensor([3, 5]))
    update_expert_bias(model, lr=0.01)
    assert torch.allclose(model[0].expert_bias, torch.tensor([-0.0125, 0.0075, -0.0025, 0.0075]), atol=1e-9)
    assert torch.allclose(model[1].expert_bias, torch.tensor([0.01, -0.01]))


def test_counts_too_large_for_floats_are_compared_exactly():
    moe = MoE(4, 4, 2)
    moe.tokens_per_expert.copy_(torch.tensor([2**53, 2**53 + 1]))
    update_expert_bias(moe, lr=0.5)
    assert moe.expert_bias.tolist() == [0.5, -0.5]


def test_repeated_updates_even_out_a_skewed_router():
    moe = fill_with_values_of_order_one(MoE(16, 8, 8, 2))
    x = torch.randn(4, 64, 16) + 2 * moe.router.gate.weight[0]  # expert 0 is everybody's favourite

    def largest_share():
        return (moe.router(x, moe.expert_bias)[2].max() / (4 * 64 * 2)).item()

    before = largest_share()
    for _ in range(50):
        moe(x)
        update_expert_bias(moe, lr=0.04)
    assert before > 0.3
    assert largest_share() < 0.2


def test_wrong_arguments_are_refused():
    moe = MoE(4, 4, 4)
    with pytest.raises(ValueError, match="lr must be finite and >= 0, got nan"):
        update_expert_bias(moe, lr=float("nan"))
    with pytest.raises(ValueError, match="num_recomputations must be an int > 0, got 0"):
        update_expert_bias(moe, num_recomputations=0)
    with pytest.raises(TypeError, match="group must be a process group"):
        update_expert_bias(moe, group="ep")
    with pytest.raises(TypeError, match="needs an MoE or a module that holds one"):
        update_expert_bias(nn.Linear(2, 2))


def loss_of(scores, selected, num_experts, coeff):
    """The formula, differentiable in the scores, counts held constant."""
    total = scores.new_zeros(())
    for expert in range(num_experts):
        chosen = selected == expert
        f = chosen.sum() / selected.numel()
        P = torch.where(chosen, scores, 0.0).sum() / scores.shape[0]
        total = total + f * P
    return coeff * num_experts * total


def test_balanced_scores_give_one_and_a_single_expert_gives_e():
    selected = torch.arange(8).view(4, 2)
    half = torch.full((4, 2), 0.5)
    assert add_load_balance_loss(half, selected, count_tokens(selected, 8), 1.0)[1].item() == pytest.approx(1.0)
    one = torch.zeros(4, 1, dtype=torch.int64)
    assert add_load_balance_loss(torch.ones(4, 1), one, count_tokens(one, 8), 1.0)[1].item() == pytest.approx(8.0)
    assert add_load_balance_loss(torch.ones(4, 1), one, count_tokens(one, 8), 0.25)[1].item() == pytest.approx(2.0)


@pytest.mark.parametrize("scale", [1.0, 0.25, torch.tensor(1024.0)])
def test_gradient_is_that_of_the_formula_times_the_scale(scale):
    scores = torch.rand(6, 2, requires_grad=True)
    selected = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 0], [2, 0], [0, 1]])
    towards = torch.randn(6, 2)
    (expected,) = torch.autograd.grad((scores * towards).sum() + scale * loss_of(scores, selected, 4, 0.3), scores)
    out, loss = add_load_balance_loss(scores, selected, count_tokens(selected, 4), 0.3, scale)
    assert torch.equal(out, scores)
    assert loss.item() == pytest.approx(loss_of(scores, selected, 4, 0.3).item(), rel=1e-6)
    (actual,) = torch.autograd.grad((out * towards).sum(), scores)
    assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize("score_before_experts", [True, False])
def test_moe_adds_the_loss_to_the_gradient_by_itself(score_before_experts):
    with_loss = Model(load_balance_coeff=5.0, score_before_experts=score_before_experts)
    without = Model(score_before_experts=score_before_experts)
    x = torch.randn(2, 9, 16)
    out = with_loss.moe(with_loss.dense(x))
    out.square().mean().backward()
    inner = without.dense(x)
    scores, selected, _ = without.moe.router(inner.reshape(-1, 16))
    loss = loss_of(scores, selected, 8, 5.0)
    (without.moe(inner).square().mean() + loss).backward()
    assert out._load_balance_loss.shape == ()
    assert not out._load_balance_loss.requires_grad
    assert out._load_balance_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert with_loss.moe.last_aux_loss is out._load_balance_loss
    for (name, ours), theirs in zip(with_loss.named_parameters(), without.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-5, name
    plain = Model(score_before_experts=score_before_experts)
    plain.moe(plain.dense(x)).square().mean().backward()
    assert relative_error(plain.moe.router.gate.weight.grad, without.moe.router.gate.weight.grad) > 0.01


def test_scale_makes_accumulated_micro_batches_equal_their_mean():
    once, twice = Model(load_balance_coeff=0.5), Model(load_balance_coeff=0.5)
    x = torch.randn(2, 9, 16)
    twice.moe.aux_loss_scale = 0.5
    once(x).square().mean().backward()
    for _ in range(2):
        (twice(x).square().mean() / 2).backward()
    assert relative_error(twice.moe.router.gate.weight.grad, once.moe.router.gate.weight.grad) < 1e-5


def test_no_gradient_in_eval_and_a_value_of_zero_without_tokens():
    model, plain = Model(load_balance_coeff=0.5).eval(), Model().eval()
    x = torch.randn(2, 9, 16)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(model.moe.router.gate.weight.grad, plain.moe.router.gate.weight.grad)
    assert model.moe.last_aux_loss > 0
    assert model.moe(torch.zeros(0, 3, 16))._load_balance_loss.item() == 0.0
    assert plain.moe.last_aux_loss is None
