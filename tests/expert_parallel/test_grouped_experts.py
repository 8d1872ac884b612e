"""GroupedExperts: every path against one row at a time; dtypes, empty groups, fallbacks, refusals."""

import sys
import types
import warnings

import pytest
import torch

from hyper_mpmd.expert_parallel import GroupedExperts, grouped_experts, grouped_matmul
from hyper_mpmd.expert_parallel.grouped_matmul import group_ends

from .reference import experts_by_row, fill_with_values_of_order_one, relative_error

COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [2, 3, 2, 2], [9, 0, 0, 0]]


def experts_of_order_one(dim=16, hidden_dim=24, num_experts=4, **options):
    return fill_with_values_of_order_one(GroupedExperts(dim, hidden_dim, num_experts, **options))


@pytest.fixture(params=["loop", "grouped", "npu"])
def run(request, monkeypatch):
    """Runs GroupedExperts by one path; the NPU one on CPU tensors, through a stand-in with torch_npu's signature."""
    if request.param == "npu":
        stand_in = types.ModuleType("torch_npu")
        stand_in.npu_grouped_matmul = npu_grouped_matmul
        monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
        monkeypatch.setattr(grouped_experts, "grouped_linear", grouped_matmul._NpuGroupedLinear.apply)

    def call(experts, *args):
        experts.use_grouped_mm = request.param != "loop"
        return experts(*args)

    return call


def npu_grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type):
    """What the operator is documented to do for one x and one weight, with its refusals."""
    (a,), (b,) = x, weight
    assert split_item == 3
    assert group_list_type == 0
    assert group_list.dtype == torch.int64
    starts = [0, *group_list.tolist()[:-1]]
    spans = list(zip(starts, group_list.tolist(), strict=True))
    if group_type == 0:
        assert a.ndim == 2
        assert b.ndim == 3
        return [torch.cat([a[lo:hi] @ b[e] for e, (lo, hi) in enumerate(spans)])]
    assert group_type == 2
    assert a.ndim == b.ndim == 2
    return [torch.stack([a[:, lo:hi] @ b[lo:hi] for lo, hi in spans])]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("with_scores", [False, True])
def test_equals_one_row_at_a_time_in_values_and_gradients(run, counts, with_scores):
    experts, counts = experts_of_order_one(), torch.tensor(counts)
    x = torch.randn(9, 16, requires_grad=True)
    scores = torch.rand(9, requires_grad=True) if with_scores else None
    towards = torch.randn(9, 16)
    leaves = [x, experts.w1, experts.w2, experts.w3, *([scores] if with_scores else [])]
    expected = experts_by_row(experts, x, counts, scores)
    expected_grads = torch.autograd.grad((expected * towards).sum(), leaves)
    actual = run(experts, x, counts, scores)
    actual_grads = torch.autograd.grad((actual * towards).sum(), leaves)
    assert relative_error(actual, expected) < 1e-5
    for ours, theirs in zip(actual_grads, expected_grads, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    for weight_grad in actual_grads[1:4]:
        assert (weight_grad[counts == 0] == 0).all()  # exact zero, no uninitialised memory


@pytest.mark.parametrize("use_grouped_mm", [False, True])
def test_a_plain_sum_can_be_differentiated(use_grouped_mm):
    experts = experts_of_order_one(use_grouped_mm=use_grouped_mm)
    experts(torch.randn(4, 16), torch.tensor([1, 0, 3, 0])).sum().backward()
    assert experts.w2.grad.abs().max() > 1e-3


@pytest.mark.parametrize("use_grouped_mm", [False, True])
def test_without_rows_all_weights_still_get_zero_gradients(use_grouped_mm):
    experts = experts_of_order_one(use_grouped_mm=use_grouped_mm)
    x = torch.zeros(0, 16, requires_grad=True)
    out = experts(x, torch.zeros(4, dtype=torch.int64))
    assert out.shape == (0, 16)
    out.sum().backward()
    for weight in experts.parameters():
        assert weight.grad.shape == weight.shape
        assert (weight.grad == 0).all()
    assert x.grad.shape == (0, 16)


@pytest.mark.parametrize("use_grouped_mm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_modules_keep_the_dtype_and_stay_close(use_grouped_mm, dtype):
    experts = experts_of_order_one(dim=32, hidden_dim=64, use_grouped_mm=use_grouped_mm).to(dtype)
    counts, x, scores = torch.tensor([3, 0, 5, 1]), torch.randn(9, 32).to(dtype), torch.rand(9)
    out = experts(x, counts, scores)
    assert out.dtype == dtype
    assert relative_error(out, experts_by_row(experts.float(), x.float(), counts, scores)) < 0.03


@pytest.mark.parametrize("use_grouped_mm", [False, True])
def test_autocast_computes_in_its_dtype_and_returns_the_inputs(use_grouped_mm, monkeypatch):
    experts = experts_of_order_one(dim=32, hidden_dim=64, use_grouped_mm=use_grouped_mm)
    counts, x = torch.tensor([3, 0, 5, 1]), torch.randn(9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x, counts)
    assert out.dtype == torch.float32
    exact = experts_by_row(experts, x, counts)
    assert 1e-5 < relative_error(out, exact) < 0.03  # rounded as bf16 is, not computed in fp32
    out.sum().backward()
    assert experts.w1.grad.dtype == torch.float32


def test_scores_multiply_in_fp32():
    experts = experts_of_order_one(dim=32, hidden_dim=64).bfloat16()
    counts, x, scores = torch.tensor([9, 0, 0, 0]), torch.randn(9, 32).bfloat16(), torch.rand(9)
    plain = experts(x, counts)
    expected = (plain.float() * scores.unsqueeze(1)).bfloat16()
    assert torch.equal(experts(x, counts, scores), expected)
    assert not torch.equal(plain * scores.bfloat16().unsqueeze(1), expected)  # the test can fail


def test_each_experts_slice_is_initialised_by_its_own_fan_in():
    experts = GroupedExperts(64, 256, 8)
    for weight, fan_in in ((experts.w1, 64), (experts.w2, 256), (experts.w3, 64)):
        bound = fan_in**-0.5
        for slice_ in weight:
            assert 0.9 * bound < slice_.abs().max().item() <= bound
            assert slice_.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_strided_input_works(run):
    experts, counts = experts_of_order_one(), torch.tensor([3, 0, 5, 1])
    x = torch.randn(16, 18)[:, ::2].t()
    assert not x.is_contiguous()
    assert relative_error(run(experts, x, counts), experts_by_row(experts, x, counts)) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [((6, 8), torch.float32, "a row of 6 x torch.float32"), ((16, 24), torch.float64, "does not take torch.float64")],
)
def test_what_grouped_matmul_cannot_do_is_said_once_and_looped(sizes, dtype, reason, monkeypatch):
    monkeypatch.setattr(grouped_experts, "_said", set())
    experts = experts_of_order_one(*sizes, use_grouped_mm=True).to(dtype)
    x, counts = torch.randn(9, sizes[0], dtype=dtype), torch.tensor([3, 0, 5, 1])
    with pytest.warns(UserWarning, match=reason) as said:
        first = experts(x, counts)
    assert str(said[0].message).startswith("use_grouped_mm=True, but ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = experts(x, counts)
    assert torch.equal(first, second)
    assert relative_error(first, experts_by_row(experts, x, counts)) < 1e-5


def test_a_device_without_grouped_matmul_is_named():
    assert "device type 'meta' has no grouped matmul" in grouped_matmul.missing_for(torch.empty(4, 16, device="meta"))


def test_group_ends_are_int32_of_length_e_and_checked():
    ends = group_ends(torch.tensor([2, 0, 3]), 3, 5)
    assert (ends.dtype, ends.tolist()) == (torch.int32, [2, 2, 5])
    with pytest.raises(ValueError, match=r"adds up to 5 .* 6 rows"):
        group_ends(torch.tensor([2, 0, 3]), 3, 6)
    with pytest.raises(ValueError, match="adds up to 4294967296 "):  # 0 in int32, which would pass for no rows
        group_ends(torch.full((4,), 2**30, dtype=torch.int32), 4, 0)
    with pytest.raises(ValueError, match=r"must be \[4\], got \[3\]"):
        group_ends(torch.tensor([2, 0, 3]), 4, 5)
    with pytest.raises(ValueError, match="at most 2147483647, got 2147483648"):
        group_ends(torch.tensor([2**31], dtype=torch.int64), 1, 2**31)


@pytest.mark.parametrize("use_grouped_mm", [False, True])
@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [10, -1, 0, 0], [1, 1, 1, 1]])
def test_counts_that_do_not_describe_the_rows_are_refused(use_grouped_mm, counts):
    experts = experts_of_order_one(use_grouped_mm=use_grouped_mm)
    with pytest.raises(ValueError, match=f"adds up to {sum(counts)} .*x has 9 rows"):
        experts(torch.randn(9, 16), torch.tensor(counts))


def test_wrong_inputs_are_refused():
    experts = experts_of_order_one()
    counts = torch.tensor([3, 0, 5, 1])
    with pytest.raises(ValueError, match=r"x must be \[N, 16\], got \[9, 15\]"):
        experts(torch.randn(9, 15), counts)
    with pytest.raises(ValueError, match=r"must be \[4\].*got \[5\]"):
        experts(torch.randn(9, 16), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"int32 or int64, got torch.float32"):
        experts(torch.randn(9, 16), counts.float())
    with pytest.raises(ValueError, match=r"scores must be \[9\].*got \[8\]"):
        experts(torch.randn(9, 16), counts, torch.rand(8))
    for sizes in ((0, 1, 1), (1, -1, 1), (1, 1, True)):
        with pytest.raises(ValueError, match="must be an int > 0"):
            GroupedExperts(*sizes)


def test_npu_tensors_take_the_npu_path(monkeypatch):
    on_npu = types.SimpleNamespace(device=types.SimpleNamespace(type="npu"))
    assert grouped_matmul.missing_for(on_npu) is None
    called = []
    monkeypatch.setattr(grouped_matmul._NpuGroupedLinear, "apply", lambda *args: called.append(args))
    grouped_matmul.grouped_linear(on_npu, None, None)
    assert len(called) == 1
