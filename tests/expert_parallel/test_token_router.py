"""TokenChoiceTopKRouter: scores, ties, NaN, groups, and what single model families add."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_mpmd.expert_parallel import TokenChoiceTopKRouter

from .reference import fill_with_values_of_order_one, relative_error


def router_with_logits(num_experts, top_k, **options):
    """A router whose logits are its input."""
    router = TokenChoiceTopKRouter(num_experts, num_experts, top_k, **options)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(num_experts))
    return router


def choose_by_hand(scores, bias, top_k, groups=None, limited=None, top2_sum=False):
    """Ids for one token, by sorting lists: best first, lower id first among equals, NaN last."""
    never = float("-inf")
    unbiased = [never if s != s else s for s in scores]
    biased = [never if s != s or b != b else s + b for s, b in zip(scores, bias, strict=True)]
    allowed = list(range(len(scores)))
    if groups is not None:
        size = len(scores) // groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        if top2_sum:
            value = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in members]
        else:
            value = [max(unbiased[e] for e in group) for group in members]
        kept = sorted(range(groups), key=lambda g: (-value[g], g))[:limited]
        allowed = [e for g in kept for e in members[g]]
    return sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]


@pytest.mark.parametrize("score_func", ["sigmoid", "softmax"])
def test_scores_are_fp32_scaled_and_best_first(score_func):
    router = fill_with_values_of_order_one(TokenChoiceTopKRouter(16, 8, 3, score_func, route_scale=2.5))
    x = torch.randn(5, 16)
    scores, selected, counts = router(x)
    logits = x @ router.gate.weight.T
    every = 2.5 * (logits.sigmoid() if score_func == "sigmoid" else logits.softmax(1))
    expected, ids = every.topk(3)
    assert (scores.dtype, selected.dtype, counts.dtype) == (torch.float32, torch.int64, torch.int64)
    assert torch.equal(selected, ids)
    assert relative_error(scores, expected) < 1e-6
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=8))


def test_gate_is_fp32_in_a_bf16_module_and_under_autocast():
    router = fill_with_values_of_order_one(TokenChoiceTopKRouter(64, 8, 2)).bfloat16()
    x = torch.randn(32, 64).bfloat16()
    expected = (x.float() @ router.gate.weight.float().T).sigmoid().topk(2)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scores, selected, _ = router(x)
        assert scores.dtype == torch.float32
        assert torch.equal(selected, expected.indices)
        assert relative_error(scores, expected.values) < 1e-6


def test_ties_go_to_the_lower_id():
    router = router_with_logits(64, 5)
    _, selected, _ = router(torch.zeros(3, 64))
    assert selected.tolist() == [[0, 1, 2, 3, 4]] * 3
    logits = torch.zeros(1, 64)
    logits[0, 40] = 1.0
    assert router(logits)[1].tolist() == [[40, 0, 1, 2, 3]]


def test_nan_is_never_preferred_and_touches_no_other_row():
    router = router_with_logits(4, 2)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [1.0, 0.0, 3.0, 2.0]])
    clean = router(logits)
    router.gate.bias = None
    with torch.no_grad():
        router.gate.weight[1, :] = float("nan")  # expert 1 of every token
    scores, selected, counts = router(logits)
    assert selected.tolist() == [[0, 2], [2, 3]]
    assert scores.isfinite().all()
    assert counts.tolist() == [1, 0, 2, 1]
    broken = logits.clone()
    broken[0, 0] = float("nan")  # a whole token
    router = router_with_logits(4, 2)
    scores, selected, _ = router(broken)
    assert selected[0].tolist() == [0, 1]
    assert torch.equal(selected[1], clean[1][1])
    assert torch.equal(scores[1], clean[0][1])


def test_nan_does_not_let_a_token_leave_its_groups():
    router = router_with_logits(6, 2, num_expert_groups=3, num_limited_groups=1)
    with torch.no_grad():
        router.gate.weight[5, :] = float("nan")
    _, selected, _ = router(torch.tensor([[0.0, 1.0, 2.0, 1.0, 9.0, 0.0]]))
    assert selected.tolist() == [[4, 5]]


def test_expert_bias_chooses_but_does_not_weigh():
    router = router_with_logits(4, 1)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    scores, selected, _ = router(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert selected.tolist() == [[3]]
    assert scores.item() == pytest.approx(torch.tensor(-1.0).sigmoid().item())


def test_group_limit_goes_by_the_best_unbiased_score():
    router = router_with_logits(6, 2, num_expert_groups=3, num_limited_groups=1)
    logits = torch.tensor([[1.0, 0.9, 0.0, 0.0, 2.0, -3.0]])
    assert router(logits)[1].tolist() == [[4, 5]]
    # The bias makes group 0 look better, but groups are compared without it.
    assert router(logits, torch.tensor([9.0, 9.0, 0, 0, 0, 0]))[1].tolist() == [[4, 5]]


def test_top2_sum_compares_groups_by_biased_pairs():
    router = router_with_logits(6, 2, num_expert_groups=3, num_limited_groups=1, group_score="top2_sum")
    logits = torch.tensor([[1.0, 0.9, 0.0, 0.0, 2.0, -3.0]])
    assert router(logits)[1].tolist() == [[0, 1]]
    assert router(logits, torch.tensor([0, 0, 9.0, 0, 0, 0]))[1].tolist() == [[2, 3]]


def test_softmax_normalised_over_the_chosen_equals_softmax_over_the_chosen_logits():
    router = fill_with_values_of_order_one(TokenChoiceTopKRouter(16, 8, 3, "softmax", route_norm=True, gate_bias=True))
    x = torch.randn(20, 16)
    scores, selected, _ = router(x)
    logits = router.gate(x).gather(1, selected)
    assert relative_error(scores, logits.softmax(1)) < 1e-6


def test_scale_before_norm_cancels_and_scale_after_norm_stays():
    options = {"route_norm": True, "route_scale": 2.5}
    logits = torch.randn(4, 8)
    before = router_with_logits(8, 2, **options)(logits)[0]
    after = router_with_logits(8, 2, scale_after_norm=True, **options)(logits)[0]
    assert torch.allclose(before.sum(1), torch.ones(4))
    assert torch.allclose(after.sum(1), torch.full((4,), 2.5))


def test_deepseek_v3_routing_matches_its_description():
    router = fill_with_values_of_order_one(
        TokenChoiceTopKRouter(
            16, 16, 3, "sigmoid", 4, 2, 2.5, route_norm=True, group_score="top2_sum", scale_after_norm=True
        )
    )
    x, bias = torch.randn(40, 16), torch.randn(16) * 0.2
    scores, selected, _ = router(x, bias)
    every = (x @ router.gate.weight.T).sigmoid()
    for t in range(40):
        ids = choose_by_hand(every[t].tolist(), bias.tolist(), 3, 4, 2, top2_sum=True)
        assert selected[t].tolist() == ids
        chosen = every[t, ids]
        assert relative_error(scores[t], 2.5 * chosen / (chosen.sum() + 1e-20)) < 1e-6


def test_gradient_reaches_gate_and_input():
    router = fill_with_values_of_order_one(TokenChoiceTopKRouter(16, 8, 2, route_norm=True))
    x = torch.randn(5, 16, requires_grad=True)
    weight = torch.randn(5, 2)
    (router(x)[0] * weight).sum().backward()
    assert x.grad.abs().max() > 1e-3
    assert router.gate.weight.grad.abs().max() > 1e-3


def test_no_tokens_and_one_expert_work():
    router = TokenChoiceTopKRouter(4, 1)
    scores, selected, counts = router(torch.randn(0, 4))
    assert (scores.shape, selected.shape, counts.tolist()) == ((0, 1), (0, 1), [0])
    assert router(torch.randn(2, 3, 4))[2].tolist() == [6]


CASES = st.tuples(
    st.sampled_from([(4, None, None), (6, 3, 1), (6, 3, 2), (8, 2, 1), (8, 4, 2), (8, 4, 4), (1, None, None)]),
    st.integers(1, 4),
    st.booleans(),
    # Few distinct values, so that ties are common; NaN among them.
    st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("nan")]), min_size=8, max_size=8), max_size=5),
    st.lists(st.sampled_from([-0.5, 0.0, 0.25]), min_size=8, max_size=8),
)


def check_against_sorting_by_hand(case):
    (num_experts, groups, limited), top_k, top2_sum, rows, bias = case
    selectable = num_experts if groups is None else limited * num_experts // groups
    top_k = min(top_k, selectable)
    router = TokenChoiceTopKRouter(
        num_experts,
        num_experts,
        top_k,
        num_expert_groups=groups,
        num_limited_groups=limited,
        group_score="top2_sum" if top2_sum and groups else "max",
    )
    scores = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), 8)[:, :num_experts]
    expert_bias = torch.tensor(bias[:num_experts])
    selected = router._choose(scores, expert_bias)
    expected = [choose_by_hand(row, expert_bias.tolist(), top_k, groups, limited, top2_sum) for row in scores.tolist()]
    assert selected.tolist() == expected
    assert all(len(set(row)) == top_k for row in expected)


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_choices_equal_sorting_by_hand(case):
    check_against_sorting_by_hand(case)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(CASES)
def test_choices_equal_sorting_by_hand_at_length(case):
    check_against_sorting_by_hand(case)


REFUSALS = [
    ({"top_k": 9}, "top_k=9 is above the 8 experts"),
    ({"top_k": 5, "num_expert_groups": 4, "num_limited_groups": 2}, "top_k=5 is above the 4 experts"),
    ({"num_expert_groups": 3, "num_limited_groups": 1}, "num_experts=8 is not a multiple of num_expert_groups=3"),
    ({"num_expert_groups": 2, "num_limited_groups": 4}, "num_limited_groups=4 is above num_expert_groups=2"),
    ({"num_expert_groups": 2}, "num_limited_groups=None go together"),
    ({"num_expert_groups": 8, "num_limited_groups": 2, "group_score": "top2_sum"}, "num_expert_groups=8 leaves 1"),
    ({"top_k": 0}, "top_k must be an int > 0, got 0"),
    ({"top_k": True}, "top_k must be an int > 0, got True"),
    ({"score_func": "tanh"}, "got 'tanh'"),
    ({"group_score": "mean"}, "got 'mean'"),
    ({"route_scale": float("nan")}, "route_scale must be finite and > 0, got nan"),
    ({"route_scale": 0.0}, "route_scale must be finite and > 0, got 0.0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_refused_at_construction_with_both_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        TokenChoiceTopKRouter(16, 8, **options)


def test_wrong_width_is_refused():
    with pytest.raises(ValueError, match=r"x must be \[..., 16\], got \[2, 15\]"):
        TokenChoiceTopKRouter(16, 8)(torch.zeros(2, 15))


@pytest.mark.parametrize("length", [1, 7])
def test_a_bias_of_another_length_is_refused_and_not_broadcast(length):
    with pytest.raises(ValueError, match=rf"expert_bias must be \[8\], one an expert, got \[{length}\]"):
        TokenChoiceTopKRouter(16, 8)(torch.zeros(2, 16), torch.zeros(length))
