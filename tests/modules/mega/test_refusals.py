"""What MegaMoeExperts refuses on one rank: the class, the value, the limit; and it works after."""

import math
import re

import pytest
import torch

from hyper_mpmd import HyperMpmdError, MegaMoeExperts

from .reference import EXPERTS, HIDDEN, SIZES, TOP_K, batch, layer


@pytest.mark.parametrize("name", [*SIZES, "ep_size", "local_num_tokens", "max_local_num_tokens"])
@pytest.mark.parametrize("value", [-1, 0, True, 2.0, "8"])
def test_sizes_that_are_no_positive_ints_are_refused_by_name(name, value):
    tokens = {} if name.endswith("tokens") else {"local_num_tokens": 8}
    if name.endswith("tokens") and value == 0 and value is not False:
        MegaMoeExperts(**{**SIZES, name: 0})
        return
    with pytest.raises(ValueError, match=f"{name}={value!r}") as info:
        MegaMoeExperts(**{**SIZES, **tokens, name: value})
    assert isinstance(info.value, HyperMpmdError)


@pytest.mark.parametrize("kwargs", [{}, {"local_num_tokens": 8, "max_local_num_tokens": 8}])
def test_exactly_one_number_of_tokens_is_needed(kwargs):
    with pytest.raises(ValueError, match="exactly one of local_num_tokens"):
        MegaMoeExperts(**SIZES, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"top_k": 9}, "top_k=9 is more than num_experts=8"),
        ({"ep_size": 3}, "num_experts=8 is not a multiple of ep_size=3"),
        ({"ep_size": 2}, "ep_size=2 needs torch.distributed"),
        ({"dispatch_mode": "Pull"}, "dispatch_mode='Pull'; it must be 'push' or 'pull'"),
        ({"dispatch_mode": None}, "dispatch_mode=None; it must be 'push' or 'pull'"),
        *(
            ({"expert_capacity_factor": factor}, f"expert_capacity_factor={factor!r}")
            for factor in (0.999, math.nan, math.inf, -math.inf, True, "1")
        ),
        *(
            ({"swiglu_limit": limit}, f"swiglu_limit={limit!r}")
            for limit in (0, -7.0, math.nan, math.inf, True, "7", 1e-50, 1e39)
        ),
    ],
)
def test_values_that_cannot_be_are_refused_at_construction(kwargs, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        MegaMoeExperts(**{**SIZES, "local_num_tokens": 8, **kwargs})


def bad_calls():
    x, ids, weights = (t.detach() for t in batch(8))
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    negative, wrong = counts.clone(), counts.clone()
    negative[0], negative[1] = -1, counts[0] + counts[1] + 1
    wrong[3] += 1
    low, high = ids.clone(), ids.clone()
    low[2, 1], high[7, 0] = -1, EXPERTS
    meta = torch.empty(8, TOP_K, device="meta")
    return [
        (ValueError, "its last dimension must be 48", (x[:, :-1], ids, weights)),
        (ValueError, "has 7 tokens, local_num_tokens is 8", (x[:7], ids[:7], weights[:7])),
        (ValueError, r"topk_ids has shape \[8\]", (x, ids[:, 0], weights)),
        (ValueError, r"topk_weights has shape \[8, 1\]; it must be \[8, 2\]", (x, ids, weights[:, :1])),
        (ValueError, r"tokens_per_expert has shape \[7\]", (x, ids, weights, counts[:7])),
        (TypeError, "topk_ids is torch.int16", (x, ids.short(), weights)),
        (TypeError, "topk_ids is torch.float32", (x, ids.float(), weights)),
        (TypeError, "topk_weights is torch.int64", (x, ids, weights.long())),
        (TypeError, "tokens_per_expert is torch.float32", (x, ids, weights, counts.float())),
        (TypeError, "hidden_states is torch.bfloat16, gate_up_weight is torch.float32", (x.bfloat16(), ids, weights)),
        (TypeError, "hidden_states is torch.float16", (x.half(), ids, weights)),
        (TypeError, "hidden_states is a list", (x.tolist(), ids, weights)),
        (ValueError, "hidden_states is on cpu, topk_weights on meta", (x, ids, meta)),
        (ValueError, r"topk_ids\[2, 1\] is -1; .* from 0 to 7", (x, low, weights)),
        (ValueError, r"topk_ids\[7, 0\] is 8", (x, high, weights)),
        (ValueError, r"tokens_per_expert\[0\] is -1", (x, ids, weights, negative)),
        (ValueError, "adds up to 17; the 8 tokens have 16 choices", (x, ids, weights, wrong)),
    ]


@pytest.mark.parametrize("number", range(len(bad_calls())))
def test_calls_that_cannot_be_are_refused_and_the_module_works_after(number):
    kind, text, arguments = bad_calls()[number]
    module = layer(local_num_tokens=8)
    with pytest.raises(kind, match=text) as info:
        module(*arguments)
    assert isinstance(info.value, HyperMpmdError)
    x, ids, weights = batch(8)
    module(x, ids, weights).sum().backward()
    assert x.grad.shape == (8, HIDDEN)


def test_more_tokens_than_the_largest_t_are_refused():
    with pytest.raises(ValueError, match="has 65 tokens, max_local_num_tokens is 64"):
        layer()(*batch(65))


def test_an_expert_twice_in_one_token_is_legal():
    module = layer()
    x, _, weights = batch(3)
    module(x, torch.ones(3, TOP_K, dtype=torch.int64), weights).sum().backward()


def test_a_histogram_is_compared_with_the_ids_on_request(monkeypatch):
    module = layer()
    x, ids, weights = batch(8)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS).roll(1)
    monkeypatch.setenv("HYPER_MPMD_CHECK_HISTOGRAM", "1")
    with pytest.raises(ValueError, match="topk_ids names that expert"):
        module(x, ids, weights, counts)


def test_rows_past_the_capacity_are_told_with_both_numbers():
    module = layer(max_local_num_tokens=100, expert_capacity_factor=1.0)
    assert module.config.capacity == 256
    module(*batch(100))
    module.config.__dict__["expert_capacity_factor"] = 0.4  # what one rank alone cannot reach by itself
    with pytest.raises(RuntimeError, match="capacity overflow: rank 0 would receive 200 rows, the capacity is 128"):
        module(*batch(100))


def test_layers_that_cannot_share_are_refused():
    share = MegaMoeExperts.share_execution_resources
    one, two = layer(), layer()
    closed, used, other = layer(), layer(), layer(max_local_num_tokens=63)
    closed.close()
    used(*batch(2))
    with pytest.raises(ValueError, match="no modules"):
        share([])
    with pytest.raises(ValueError, match="one module twice"):
        share([one, two, one])
    with pytest.raises(TypeError, match="module 1 is a Linear"):
        share([one, torch.nn.Linear(1, 1)])
    with pytest.raises(RuntimeError, match="module 1 is closed"):
        share([one, closed])
    with pytest.raises(ValueError, match="module 1 has max_local_num_tokens=63, module 0 has 64"):
        share([one, other])
    with pytest.raises(RuntimeError, match="module 1 was called already"):
        share([one, used])
    share([one, two])
    with pytest.raises(RuntimeError, match="module 1 shares resources already"):
        share([layer(), two])
