"""gemm against float64, at every corner of its blocking; and a row's bits depend on nothing around it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_views import ROUNDING, K, gemm, strided

from hyper_mpmd.engine import torch_gemm

pytestmark = pytest.mark.usefixtures("isa")

# One to three panels of any instruction set, and more rows than one block.
ROWS = st.integers(0, 45) | st.sampled_from([60, 61, 140, 141, 150])
COLUMNS = st.integers(0, 140) | st.sampled_from([511, 512, 513, 530])
DEPTHS = st.integers(0, 40) | st.sampled_from([255, 256, 257, 520])


def stored(rows, cols, dtype, padding, transpose, generator):
    shape = (cols, rows) if transpose else (rows, cols)
    return strided(torch.randn(shape, generator=generator).to(dtype), padding)


def reference(x, w, transpose_x, transpose_w):
    """The product in float64, and the sum of absolute products that its error is measured against."""
    left = (x.T if transpose_x else x).double()
    right = (w.T if transpose_w else w).double()
    return left @ right, left.abs() @ right.abs()


@settings(max_examples=60, deadline=None)
@given(
    m=ROWS,
    n=COLUMNS,
    k=DEPTHS,
    transpose_x=st.booleans(),
    transpose_w=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_product_is_within_the_error_of_fp32_accumulation(m, n, k, transpose_x, transpose_w, dtype, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    x = stored(m, k, dtype, padding[0], transpose_x, generator)
    w = stored(k, n, dtype, padding[1], transpose_w, generator)
    y = gemm(x, w, transpose_x=transpose_x, transpose_w=transpose_w, padding=padding[2])
    expected, magnitude = reference(x, w, transpose_x, transpose_w)
    bound = (k + 1) * 2.0**-24 * magnitude
    if dtype in ROUNDING:
        relative, absolute = ROUNDING[dtype]
        bound += relative * (expected.abs() + bound) + absolute
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("m", [1, 5, 14, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_product_is_the_fp32_product_rounded_once(dtype, m, transpose_w):
    generator = torch.Generator().manual_seed(m)
    x = stored(m, 300, dtype, 0, False, generator)
    w = stored(300, 75, dtype, 0, transpose_w, generator)
    y = gemm(x, w, transpose_w=transpose_w, way=K.GemmWay.own)
    y32 = gemm(x.float(), w.float(), transpose_w=transpose_w, way=K.GemmWay.own)
    assert torch.equal(y, y32.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_a_row_has_the_same_bits_in_any_company(dtype, transpose_w):
    generator = torch.Generator().manual_seed(0)
    x = stored(300, 530, dtype, 0, False, generator)
    w = stored(530, 150, dtype, 0, transpose_w, generator)
    whole = gemm(x, w, transpose_w=transpose_w, way=K.GemmWay.own)
    for m in (1, 2, 3, 6, 7, 14, 15, 29, 56, 57, 141):
        assert torch.equal(gemm(x[:m], w, transpose_w=transpose_w, way=K.GemmWay.own), whole[:m])


def test_transposes_change_no_bit():
    generator = torch.Generator().manual_seed(1)
    x = stored(37, 400, torch.float32, 0, False, generator)
    w = stored(400, 90, torch.float32, 0, False, generator)
    plain = gemm(x, w, way=K.GemmWay.own)
    xt, wt = x.T.contiguous(), w.T.contiguous()
    for tx, tw in ((False, True), (True, False), (True, True)):
        again = gemm(xt if tx else x, wt if tw else w, transpose_x=tx, transpose_w=tw, way=K.GemmWay.own)
        assert torch.equal(again, plain)


@pytest.mark.parametrize("offset", range(1, 16, 3))
def test_alignment_changes_no_bit(offset):
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(9, 64, generator=generator), torch.randn(64, 40, generator=generator)
    store = torch.empty(64 * 40 + 16)
    moved = store[offset : offset + 64 * 40].view(64, 40).copy_(w)
    assert torch.equal(gemm(x, moved), gemm(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_reach_their_row_and_column_only(dtype):
    x, w = torch.ones(20, 33, dtype=dtype), torch.ones(33, 50, dtype=dtype)
    x[3, 7] = float("nan")
    x[5, 1] = float("inf")
    w[2, 49] = float("-inf")
    y = gemm(x, w)
    expected = x.float() @ w.float()
    torch.testing.assert_close(y, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_depth_zero_writes_zeros_and_no_rows_write_nothing():
    y = gemm(torch.empty(3, 0), torch.empty(0, 5), padding=2)
    assert torch.equal(y, torch.zeros(3, 5))
    assert gemm(torch.empty(0, 4), torch.empty(4, 5)).shape == (0, 5)
    assert gemm(torch.empty(4, 4), torch.empty(4, 0)).shape == (4, 0)


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(0, 40),
    n=st.integers(0, 60),
    k=st.integers(0, 70),
    transpose_x=st.booleans(),
    transpose_w=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.integers(0, 3),
)
def test_the_lent_gemm_agrees(m, n, k, transpose_x, transpose_w, dtype, padding):
    assert torch_gemm.lend().lent
    generator = torch.Generator().manual_seed(m * n + k)
    x = stored(m, k, dtype, padding, transpose_x, generator)
    w = stored(k, n, dtype, padding, transpose_w, generator)
    y = gemm(x, w, transpose_x=transpose_x, transpose_w=transpose_w, padding=padding, way=K.GemmWay.lent)
    expected, magnitude = reference(x, w, transpose_x, transpose_w)
    bound = (k + 1) * 2.0**-24 * magnitude
    if dtype in ROUNDING:
        relative, absolute = ROUNDING[dtype]
        bound += relative * (expected.abs() + bound) + absolute
    assert ((y.double() - expected).abs() <= bound).all()
