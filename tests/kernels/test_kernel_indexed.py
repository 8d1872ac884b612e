"""Gather and unpermute: right for any index list, and a bad index is named instead of followed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_views import ROUNDING, gather, strided, unpermute

pytestmark = pytest.mark.usefixtures("isa")

GOOD = -1


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]))
def test_gather_takes_the_rows_named(data, dtype):
    x_rows, cols = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 40))
    index = torch.tensor(data.draw(st.lists(st.integers(0, x_rows - 1), max_size=12)), dtype=torch.int32)
    x = strided(torch.arange(x_rows * cols).view(x_rows, cols).to(dtype), data.draw(st.integers(0, 3)))
    out, bad = gather(x, index, padding=data.draw(st.integers(0, 3)))
    assert bad == GOOD
    assert torch.equal(out, x[index.long()])


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, -(2**31)])
def test_gather_names_the_first_bad_index_and_writes_nothing(wrong):
    x = torch.ones(4, 6)
    out, bad = gather(x, torch.tensor([0, 3, wrong, 1, wrong], dtype=torch.int32))
    assert bad == 2
    assert (out == 77).all()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 5),
    k=st.integers(0, 4),
    cols=st.integers(0, 70) | st.sampled_from([128, 150]),
    y_rows=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 1000),
)
def test_unpermute_is_the_weighted_sum(tokens, k, cols, y_rows, dtype, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    y = strided(torch.randn(y_rows, cols, generator=generator).to(dtype), padding[0])
    index = torch.randint(y_rows, (tokens, k), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, k, generator=generator)
    out, bad = unpermute(y, index, weights, padding=padding[1])
    assert bad == GOOD
    terms = weights.double()[:, :, None] * y.double()[index.long()]
    expected = terms.sum(1)
    bound = (k + 1) * 2.0**-24 * terms.abs().sum(1)
    if dtype in ROUNDING:
        relative, absolute = ROUNDING[dtype]
        bound += relative * (expected.abs() + bound) + absolute
    assert ((out.double() - expected).abs() <= bound).all()


def test_unpermute_adds_in_the_order_given():
    y = torch.tensor([[2.0**60], [1.0], [-(2.0**60)]]).expand(3, 40).contiguous()
    weights = torch.ones(2, 3)
    out, _ = unpermute(y, torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32), weights)
    assert torch.equal(out, torch.tensor([[0.0], [1.0]]).expand(2, 40))


def test_unpermute_rounds_bf16_once():
    # 1 + 2^-8 + 2^-8: rounding after each addition would give 1, rounding once gives 1 + 2^-7.
    y = torch.tensor([[1.0], [2.0**-8]]).bfloat16()
    out, _ = unpermute(y, torch.tensor([[0, 1, 1]], dtype=torch.int32), torch.ones(1, 3))
    assert out.item() == 1.0 + 2.0**-7


def test_unpermute_propagates_nan_and_infinity():
    y = torch.tensor([[float("nan"), float("inf"), 1.0], [1.0, 1.0, 1.0]])
    out, _ = unpermute(y, torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2))
    assert out[0, 0].isnan()
    assert out[0, 1] == float("inf")
    assert out[0, 2] == 2.0


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_unpermute_names_the_first_bad_index_and_writes_nothing(wrong):
    index = torch.tensor([[0, 1], [2, wrong], [wrong, 0]], dtype=torch.int32)
    out, bad = unpermute(torch.ones(4, 6), index, torch.ones(3, 2))
    assert bad == 3
    assert (out == 77).all()
