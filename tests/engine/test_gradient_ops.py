"""The gradient ops are legal to cut and compute what autograd gives, at any tile size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.errors import DTypeError, OpParameterError, ShapeError, TaskFailedError
from hyper_mpmd.testing.ops import assert_op_legal

from .graphs import relative_error

LIMITS = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}  # 16 bits: each result rounded once
sizes = st.integers(1, 40)
counts = st.lists(st.integers(0, 30), min_size=1, max_size=4)
tiles = st.none() | st.tuples(st.integers(1, 40), st.integers(1, 40))
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])


def run_op(core, op, loads, shapes, dtype, values, tile):
    g = hm.TaskGraph("one")
    rows = g.rows("rows", groups=len(loads))
    inputs = [
        g.input(name, [rows if dim is None else dim for dim in shape], "float32" if name == "scores" else dtype)
        for name, shape in shapes.items()
    ]
    made = getattr(g, core)("op", op, *inputs)
    for index, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
        g.output(f"out{index}", tensor)
    plan = hm.compile(g, loads=loads, tiles=None if tile is None else {"op": tile})
    return list(plan.run(**values, timeout=30).values())


@settings(max_examples=60, deadline=None)
@given(loads=counts, k=sizes, n=sizes, dtype=dtypes, tile=tiles)
def test_both_gradients_of_a_grouped_matmul_are_those_of_autograd(loads, k, n, dtype, tile):
    kind = getattr(torch, dtype)
    x, dy = torch.randn(sum(loads), k).to(kind), torch.randn(sum(loads), n).to(kind)
    w = torch.randn(len(loads), k, n).to(kind)
    want, terms = ((x.double(), w.double(), dy.double()), (x.double().abs(), w.double().abs(), dy.double().abs()))
    for x64, w64, dy64 in (want, terms):
        parts = [rows @ w64.requires_grad_()[group] for group, rows in enumerate(x64.requires_grad_().split(loads))]
        torch.cat(parts).backward(dy64)
    shapes = {"dy": (None, n), "w": (len(loads), k, n)}
    (dx,) = run_op("cube", hm.ops.GroupedMatmulT(), loads, shapes, dtype, {"dy": dy, "w": w}, tile)
    shapes = {"x": (None, k), "dy": (None, n)}
    op = hm.ops.GroupedMatmulDW(groups=len(loads))
    (dw,) = run_op("cube", op, loads, shapes, dtype, {"x": x, "dy": dy}, tile)
    assert dx.dtype == dw.dtype == kind
    if sum(loads):  # sums of both signs: measured against what they sum
        for have, exact, summed in zip((dx, dw), want[:2], terms[:2], strict=True):
            assert float((have.double() - exact.grad).abs().max() / summed.grad.max()) <= LIMITS[dtype]
    assert all(dw[group].count_nonzero() == 0 for group, rows in enumerate(loads) if rows == 0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60), half=st.integers(1, 70), dtype=dtypes, tile=tiles, limit=st.sampled_from([None, 0.5, 3.0])
)
def test_the_gradient_of_a_weighted_swiglu_is_that_of_autograd(rows, half, dtype, tile, limit):
    kind = getattr(torch, dtype)
    h, grad = (3 * torch.randn(rows, 2 * half)).to(kind), torch.randn(rows, half).to(kind)
    scores = torch.randn(rows)
    h64, scores64 = h.double().requires_grad_(), scores.double().requires_grad_()
    gate, up = h64.chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    act = scores64[:, None] * torch.nn.functional.silu(gate) * up
    act.backward(grad.double())
    shapes = {"h": (None, 2 * half), "grad": (None, half), "scores": (None,)}
    values = {"h": h, "grad": grad, "scores": scores}
    dh, dscores = run_op("vector", hm.ops.SwiGLUGrad(limit=limit), [rows], shapes, dtype, values, tile)
    assert relative_error(dh, h64.grad) <= LIMITS[dtype]
    # A sum of both signs: measured against what it sums.
    parts = (torch.nn.functional.silu(gate) * up * grad.double()).abs().sum(dim=1).detach()
    assert float(((dscores - scores64.grad).abs() / parts.clamp(min=1e-30)).max()) <= 1e-5
    shapes, values = {"h": (None, 2 * half), "scores": (None,)}, {"h": h, "scores": scores}
    (made,) = run_op("vector", hm.ops.WeightedSwiGLU(limit=limit), [rows], shapes, dtype, values, tile)
    assert relative_error(made, act.detach()) <= LIMITS[dtype]
    (made,) = run_op("vector", hm.ops.SwiGLU(limit=limit), [rows], {"h": (None, 2 * half)}, dtype, {"h": h}, tile)
    assert relative_error(made, (act / scores64[:, None]).detach()) <= LIMITS[dtype]


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 20), top_k=st.integers(1, 5), cols=st.integers(1, 150), dtype=dtypes)
def test_gather_sum_is_the_gradient_of_permute(tokens, top_k, cols, dtype):
    back = torch.randperm(tokens * top_k).view(tokens, top_k)
    y = torch.randn(tokens * top_k, cols).to(getattr(torch, dtype))
    g = hm.TaskGraph("sum")
    rows = g.input("y", (tokens * top_k, cols), dtype)
    g.output("out", g.vector("sum", hm.ops.GatherSum(), rows, g.input("back", (tokens, top_k), "int32")))
    plan = hm.compile(g)
    out = plan.run(y=y, back=back.int(), timeout=30)["out"]
    assert relative_error(out, y.double()[back].sum(dim=1)) <= LIMITS[dtype]
    with pytest.raises(TaskFailedError, match=r"index -1 at row 0 of the tile is not in \[0, "):
        plan.run(y=y, back=torch.full((tokens, top_k), -1, dtype=torch.int32), timeout=30)


@pytest.mark.parametrize("gate", [0.0, -0.0, 1e-30, 88.0, -88.0, -104.0, 1e30, -1e30])
def test_saturated_gates_have_the_gradients_of_torch(gate):
    h = torch.tensor([[gate, 2.0]]).requires_grad_()
    (torch.nn.functional.silu(h[:, 0]) * h[:, 1]).backward(torch.ones(1))
    shapes = {"h": (None, 2), "grad": (None, 1), "scores": (None,)}
    values = {"h": h.detach(), "grad": torch.ones(1, 1), "scores": torch.ones(1)}
    dh, _ = run_op("vector", hm.ops.SwiGLUGrad(), [1], shapes, "float32", values, None)
    torch.testing.assert_close(dh, h.grad, rtol=2e-6, atol=1e-36)


def test_no_gradient_flows_to_what_was_clamped_and_nan_is_never_clamped():
    nan, limit = float("nan"), 2.0
    h = torch.tensor([[2.0, 2.5, nan, -9.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 2.0, -2.5, nan]]).T.contiguous()
    shapes = {"h": (None, 2), "grad": (None, 1), "scores": (None,)}
    values = {"h": h, "grad": torch.ones(7, 1), "scores": torch.ones(7)}
    dh, dscores = run_op("vector", hm.ops.SwiGLUGrad(limit=limit), [7], shapes, "float32", values, None)
    own = h.clone().requires_grad_()
    (torch.nn.functional.silu(own[:, 0].clamp(max=limit)) * own[:, 1].clamp(-limit, limit)).sum().backward()
    # To torch a NaN has been clamped: its gradient is 0, which hides a fault. Here it is as without a limit.
    free = h.clone().requires_grad_()
    (torch.nn.functional.silu(free[:, 0]) * free[:, 1]).sum().backward()
    expected = torch.where(h.isnan(), free.grad, own.grad)
    torch.testing.assert_close(dh, expected, rtol=2e-6, atol=0, equal_nan=True)
    assert dh[0].count_nonzero() == 2
    assert dh[1, 0] == 0
    assert dh[5, 1] == 0
    assert dscores.isnan().tolist() == [False, False, True, False, False, False, True]
    (act,) = run_op("vector", hm.ops.SwiGLU(limit=limit), [7], {"h": (None, 2)}, "float32", {"h": h}, None)
    assert act.isnan().flatten().tolist() == [False, False, True, False, False, False, True]


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), 1e-50, 1e39, "seven"])
def test_limits_that_are_no_positive_float32_are_refused(limit):
    for op in (hm.ops.SwiGLU, hm.ops.WeightedSwiGLU, hm.ops.SwiGLUGrad):
        with pytest.raises(OpParameterError, match="limit"):
            op(limit=limit)


def test_the_gradient_ops_may_be_cut_anywhere():
    loads = {"rows": [7, 0, 30]}
    assert_op_legal(hm.ops.GroupedMatmulT(), [("rows", 24), (3, 40, 24)], loads=loads)
    assert_op_legal(hm.ops.GroupedMatmulDW(groups=3), [("rows", 24), ("rows", 40)], loads=loads)
    scalars = ["float32", "float32", "float32"]
    assert_op_legal(hm.ops.SwiGLUGrad(), [("rows", 48), ("rows", 24), ("rows",)], dtypes=scalars, loads=loads)
    assert_op_legal(hm.ops.WeightedSwiGLU(), [("rows", 48), ("rows",)], loads=loads)


def test_tensors_that_do_not_fit_are_refused_where_the_task_is_added():
    g = hm.TaskGraph("wrong")
    rows = g.rows("rows", groups=2)
    odd, h, flat = g.input("odd", (rows, 7)), g.input("h", (rows, 8)), g.input("flat", (rows,), "bfloat16")
    grad, narrow = g.input("grad", (rows, 4)), g.input("narrow", (rows, 3))
    scores = g.input("scores", (rows,))
    with pytest.raises(ShapeError, match=r"odd\[rows, 7\] float32 is not that"):
        g.vector("a", hm.ops.SwiGLUGrad(), odd, grad, scores)
    with pytest.raises(DTypeError, match="takes float32 weights"):
        g.vector("b", hm.ops.SwiGLUGrad(), h, grad, flat)
    with pytest.raises(ShapeError, match=r"h\[rows, 8\] float32 has 8 columns"):
        g.vector("c", hm.ops.SwiGLUGrad(), h, narrow, scores)
    with pytest.raises(ShapeError, match="one weight a row"):
        g.vector("d", hm.ops.WeightedSwiGLU(), h, grad)
    with pytest.raises(ShapeError, match=r"takes w \[G, K, N\]"):
        g.cube("e", hm.ops.GroupedMatmulT(), h, g.input("flat_w", (4, 8)))
    with pytest.raises(DTypeError, match="int32 index"):
        g.vector("f", hm.ops.GatherSum(), h, grad)
