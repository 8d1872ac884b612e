"""One matmul a group of rows, in one call, where the device has such a call.

Two backends: torch's grouped matmul (CUDA and CPU) and torch_npu's (Ascend). The NPU one has been run against a
stand-in with torch_npu's signature only, never on a device.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from hyper_mpmd.expert_parallel.errors import ExpertParallelError

_INT32_MAX = 2**31 - 1
# torch's kernels want rows that start on this boundary.
_ROW_ALIGNMENT_BYTES = 16


def missing_for(x: torch.Tensor, *weights: torch.Tensor) -> str | None:
    """Why a grouped matmul of x [N, A] and weights [E, B, A] cannot run here, or None when it can."""
    if x.device.type == "npu":
        return None
    if x.device.type not in ("cpu", "cuda"):
        return f"device type {x.device.type!r} has no grouped matmul"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    supported = (torch.float32, torch.bfloat16, torch.float16)
    if x.dtype not in supported:
        return f"torch's grouped matmul does not take {x.dtype}"
    for width in sorted({size for weight in weights for size in weight.shape[1:]}):
        if width * x.element_size() % _ROW_ALIGNMENT_BYTES:
            return (
                f"a row of {width} x {x.dtype} is not a multiple of {_ROW_ALIGNMENT_BYTES} bytes, as torch's grouped "
                "matmul needs"
            )
    return None


def group_ends(counts: torch.Tensor, num_groups: int, num_rows: int) -> torch.Tensor:
    """Cumulative row ends of the groups, [num_groups] int32, summed in int64 and checked.

    Rows past the last end would come out of a grouped matmul uninitialised, so the counts must add up to num_rows. On a
    device other than the CPU that check runs there, without stopping the host.
    """
    if counts.shape != (num_groups,):
        raise ExpertParallelError(f"num_tokens_per_expert must be [{num_groups}], got {list(counts.shape)}")
    if num_rows > _INT32_MAX:
        raise ExpertParallelError(
            f"a grouped matmul counts rows in int32, at most {_INT32_MAX}, got {num_rows}: split the batch"
        )
    ends = counts.long().cumsum(0)
    good = (ends[-1] == num_rows) & (counts >= 0).all()
    if counts.device.type == "cpu":
        if not good:
            raise counts_error(counts, num_rows)
    else:
        torch._assert_async(good, f"num_tokens_per_expert does not add up to {num_rows} rows")
    return ends.int()


def counts_error(counts: torch.Tensor, num_rows: int) -> ExpertParallelError:
    """The error for counts that do not describe x."""
    return ExpertParallelError(
        f"num_tokens_per_expert adds up to {int(counts.sum())} (smallest entry {int(counts.min())}), but x has "
        f"{num_rows} rows: counts are >= 0 and add up to the rows"
    )


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [N, A] times weight [E, B, A], transposed, group by group: [N, B]. `ends` as from `group_ends`."""
    if x.device.type == "npu":
        result: torch.Tensor = _NpuGroupedLinear.apply(x, weight, ends)  # type: ignore[no-untyped-call]
        return result
    out = F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    if out.requires_grad:
        # The kernel refuses an expanded gradient, such as that of a plain sum.
        out.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return out


class _NpuGroupedLinear(torch.autograd.Function):
    """torch_npu's operator has no autograd: dX is a grouped matmul with the weight turned, dW one that splits K."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _npu_matmul(x, weight.transpose(1, 2), ends, split_rows=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _npu_matmul(grad, weight, ends, split_rows=True)
        if ctx.needs_input_grad[1]:
            grad_weight = _npu_matmul(grad.t(), x, ends, split_rows=False)
        return grad_x, grad_weight, None


def _npu_matmul(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, *, split_rows: bool) -> torch.Tensor:
    """Rows of a, split by group, times b [E, ., .]; or columns of a times rows of b, both split: one result a group."""
    npu = importlib.import_module("torch_npu")
    (out,) = npu.npu_grouped_matmul(
        [a],
        [b],
        group_list=ends.long(),
        split_item=3,  # one tensor out
        group_type=0 if split_rows else 2,
        group_list_type=0,  # cumulative ends
    )
    result: torch.Tensor = out
    return result
