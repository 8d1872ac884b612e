"""SwiGLU and the conversions, over all 65,536 values of each 16-bit type and over fp32 values of every magnitude."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_views import convert, copy, strided, swiglu

pytestmark = pytest.mark.usefixtures("isa")

ALL_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(256, 256)
HALVES = [torch.bfloat16, torch.float16]
SMALLEST = 2.0**-149


def any_floats(count: int, seed: int) -> torch.Tensor:
    """Random bit patterns: every exponent, subnormals, infinities and NaN included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def exact_silu(gate: torch.Tensor) -> torch.Tensor:
    g = gate.double()
    return g / (1.0 + torch.exp(-g))


def assert_within_ulps(got: torch.Tensor, expected: torch.Tensor, ulps: float):
    """fp32 results against float64 ones; overflow, NaN and infinity where and only where they belong."""
    assert torch.equal(got.isnan(), expected.isnan())
    rounded = expected.float()
    settled = expected.isnan() | rounded.isinf() | got.isinf()
    assert torch.equal(got[settled & ~expected.isnan()], rounded[settled & ~expected.isnan()])
    error = (got.double() - expected)[~settled].abs()
    # An ulp lies between 2^-24 and 2^-23 of the value.
    bound = ulps * torch.clamp(expected[~settled].abs() * 2.0**-23, min=SMALLEST)
    assert (error <= bound).all(), f"worst: {(error / bound).max().item() * ulps} ulp"


def test_silu_of_every_magnitude_is_within_three_ulps():
    # Out of range values dominate random bits, so most of the sample is where silu is neither 0 nor the identity.
    wide = any_floats(200_000, seed=1)
    narrow = torch.from_numpy(np.random.default_rng(2).uniform(-110, 20, 400_000).astype(np.float32))
    gate = torch.cat([wide, narrow]).view(-1, 1000)
    assert_within_ulps(swiglu(gate, torch.ones_like(gate)), exact_silu(gate), ulps=3)


def test_swiglu_of_extremes_is_what_torch_gives():
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[inf, -inf, nan, 0.0, -0.0, 3e38, -3e38, 100.0, -104.0, 1e-45, -1e-45]])
    expected = torch.nn.functional.silu(gate.double())
    got = swiglu(gate, torch.ones_like(gate))
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-37, equal_nan=True)
    assert swiglu(torch.ones(1, 1), torch.tensor([[nan]])).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_limit_clamps_the_gate_from_above_and_up_on_both_sides(dtype):
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([nan, inf, -inf, 7.0, -7.0, 7.0625, -7.0625, 0.0, 3.25, -100.0, 3e38]).to(dtype)
    gate, up = values.repeat_interleave(11).view(1, -1), values.repeat(11).view(1, -1)
    expected = torch.nn.functional.silu(gate.double().clamp(max=7)) * up.double().clamp(-7, 7)
    got = swiglu(gate, up, limit=7.0)
    near = {"rtol": 1e-6 if dtype == torch.float32 else 2.0**-8, "atol": 1e-7 if dtype == torch.float16 else 1e-30}
    torch.testing.assert_close(got.double(), expected, **near, equal_nan=True)
    assert torch.equal(swiglu(gate, up, limit=inf).nan_to_num(), swiglu(gate, up).nan_to_num())


@pytest.mark.parametrize("dtype", HALVES)
def test_swiglu_of_every_16_bit_gate_is_the_fp32_result_rounded_once(dtype):
    gate = ALL_BITS.view(dtype)
    up = torch.full_like(gate, 1.7109375)
    got = swiglu(gate, up)
    fp32 = swiglu(gate.float(), up.float())
    assert torch.equal(got.isnan(), fp32.isnan())
    assert torch.equal(got[~got.isnan()], fp32.to(dtype)[~got.isnan()])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    cols=st.integers(0, 70),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    dtype=st.sampled_from([torch.float32, *HALVES]),
)
def test_swiglu_of_any_shape(rows, cols, padding, dtype):
    generator = torch.Generator().manual_seed(rows * 100 + cols)
    gate = strided((4 * torch.randn(rows, cols, generator=generator)).to(dtype), padding[0])
    up = strided(torch.randn(rows, cols, generator=generator).to(dtype), padding[1])
    expected = exact_silu(gate) * up.double()
    got = swiglu(gate, up, padding=padding[2])
    near = {"rtol": 1e-6 if dtype == torch.float32 else 2.0**-8, "atol": 1e-7 if dtype == torch.float16 else 1e-30}
    torch.testing.assert_close(got.double(), expected, **near)


def test_an_element_has_the_same_bits_in_the_body_and_in_the_tail():
    gate = torch.randn(1, 67, generator=torch.Generator().manual_seed(3))
    whole = swiglu(gate, gate)
    for start in range(0, 67, 5):
        part = gate[:, start:].clone()
        assert torch.equal(swiglu(part, part), whole[:, start:])


@pytest.mark.parametrize("dtype", HALVES)
def test_widening_is_exact_for_every_value(dtype):
    values = ALL_BITS.view(dtype)
    got, expected = convert(strided(values, 3), torch.float32, padding=1).contiguous(), values.float()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.signbit(), expected.signbit())
    keep = ~got.isnan()
    assert torch.equal(got[keep].view(torch.int32), expected[keep].view(torch.int32))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_comes_back_from_fp32_as_it_was(dtype):
    values = ALL_BITS.view(dtype)
    back = convert(convert(values, torch.float32), dtype)
    assert torch.equal(back.isnan(), values.isnan())
    assert torch.equal(back[~back.isnan()].view(torch.int16), values[~back.isnan()].view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
def test_narrowing_rounds_to_nearest_even(dtype):
    values = any_floats(300_000, seed=4)
    # The middle between neighbours, and its neighbours: where rounding is decided.
    wide = ALL_BITS.view(dtype).float().flatten()
    wide = wide[wide.isfinite()].sort().values
    ties = (wide[1:] + wide[:-1]) / 2
    x = torch.cat([values, ties, ties.nextafter(ties - 1e30), ties.nextafter(ties + 1e30)]).view(1, -1)
    edges = [65504.0, 65519.996, 65520.0, 65536.0, 1e30, -65520.0, 2.0**-25, 2.0**-25 * 1.0001, 0.0, -0.0]
    for sample in (x, torch.tensor([edges])):
        got, expected = convert(sample, dtype), sample.to(dtype)
        assert torch.equal(got.isnan(), sample.isnan())
        keep = ~sample.isnan()
        assert torch.equal(got[keep].view(torch.int16), expected[keep].view(torch.int16))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 4),
    cols=st.integers(0, 40),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dtype=st.sampled_from([torch.float32, *HALVES, torch.int32, torch.int64]),
)
def test_copies_are_exact_for_any_dtype_and_stride(rows, cols, padding, dtype):
    x = strided((torch.arange(rows * cols) - 5).view(rows, cols).to(dtype), padding[0])
    assert torch.equal(copy(x, padding=padding[1]), x)
    assert torch.equal(convert(x, dtype, padding=padding[1]), x)
