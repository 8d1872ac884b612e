"""Strided matrices with guarded padding, and the kernels called on them as on torch tensors."""

import math

import torch

from hyper_mpmd import _native

K = _native.kernels
DTYPES = {
    torch.float32: K.DType.float32,
    torch.bfloat16: K.DType.bfloat16,
    torch.float16: K.DType.float16,
    torch.int32: K.DType.int32,
    torch.int64: K.DType.int64,
}
ISAS = [isa for isa in K.Isa if K.isa_available(isa)]
# What one rounding to a 16-bit type may cost: half a step, relative, or where numbers are subnormal absolute.
ROUNDING = {torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25)}
_GUARD = 77


def strided(values: torch.Tensor, padding: int) -> torch.Tensor:
    """A copy of `values` [rows, cols] whose rows lie `padding` elements further apart than they need to."""
    rows, cols = values.shape
    store = torch.full((rows, cols + padding), _GUARD, dtype=values.dtype)
    view = store[:, :cols]
    view.copy_(values)
    return view


def output(rows: int, cols: int, dtype: torch.dtype, padding: int) -> torch.Tensor:
    return strided(torch.full((rows, cols), _GUARD, dtype=dtype), padding)


def padding_is_intact(view: torch.Tensor) -> bool:
    return bool((view._base[:, view.shape[1] :] == _GUARD).all())


def _at(view: torch.Tensor) -> tuple[int, int]:
    """Address and leading dimension. torch may report any stride for fewer than two rows, ours come from `strided`."""
    return view.data_ptr(), view.stride(0)


def gemm(x, w, *, transpose_x=False, transpose_w=False, padding=0, way=None):
    """x · w by the native kernel; x and w as stored, that is before any transposition."""
    m, k = reversed(x.shape) if transpose_x else x.shape
    n = w.shape[0] if transpose_w else w.shape[1]
    y = output(m, n, x.dtype, padding)
    arguments = (DTYPES[x.dtype], m, n, k, *_at(x), *_at(w), *_at(y), transpose_x, transpose_w)
    if way is None:
        K.gemm(*arguments)
    else:
        K.gemm_by(way, *arguments)
    assert padding_is_intact(y)
    return y


def swiglu(gate, up, *, padding=0, limit=math.inf):
    out = output(*gate.shape, gate.dtype, padding)
    K.swiglu(DTYPES[gate.dtype], *gate.shape, *_at(gate), *_at(up), *_at(out), limit)
    assert padding_is_intact(out)
    return out


def gather(x, index, *, padding=0):
    """The gathered rows, and what the kernel returned."""
    out = output(len(index), x.shape[1], x.dtype, padding)
    bad = K.gather_rows(DTYPES[x.dtype], *out.shape, *_at(x), x.shape[0], index.data_ptr(), *_at(out))
    assert padding_is_intact(out)
    return out, bad


def unpermute(y, index, weights, *, padding=0):
    tokens, k = index.shape
    out = output(tokens, y.shape[1], y.dtype, padding)
    bad = K.unpermute(
        DTYPES[y.dtype], tokens, k, y.shape[1], *_at(y), y.shape[0], index.data_ptr(), weights.data_ptr(), *_at(out)
    )
    assert padding_is_intact(out)
    return out, bad


def convert(x, dtype, *, padding=0):
    out = output(*x.shape, dtype, padding)
    K.convert(*x.shape, DTYPES[x.dtype], *_at(x), DTYPES[dtype], *_at(out))
    assert padding_is_intact(out)
    return out


def copy(x, *, padding=0):
    out = output(*x.shape, x.dtype, padding)
    K.copy_rows(DTYPES[x.dtype], *x.shape, *_at(x), *_at(out))
    assert padding_is_intact(out)
    return out
