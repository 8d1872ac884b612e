"""Inputs at random for any graph: numbers of O(1) results, indices that stay in range."""

from __future__ import annotations

from typing import Any

import torch

from hyper_mpmd.engine.bindings import TORCH_DTYPES, tensor_index, tensor_shape
from hyper_mpmd.errors import ShapeError
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import DTYPES


def random_inputs(plans: list[Plan], seed: int) -> list[dict[str, Any]]:
    """Tensors by name for each of these ranks. Floats are normal, weights (no row space) divided by the root of their
    next-to-last dimension. Integers are rows of the tensor that their task gathers from."""
    generator = torch.Generator().manual_seed(seed)
    return [{name: _tensor(plan, name, generator) for name in plan.graph.inputs} for plan in plans]


def _tensor(plan: Plan, name: str, generator: torch.Generator) -> torch.Tensor:
    tensor, shape = plan.graph.tensors[name], tensor_shape(plan, name)
    dtype = TORCH_DTYPES[DTYPES[tensor.dtype]]
    if not dtype.is_floating_point:
        rows = _gathered_rows(plan, name)
        if rows == 0 and 0 not in shape:
            raise ShapeError(f"input {name!r} holds row numbers of a tensor without rows under these loads")
        return torch.randint(0, max(1, rows), shape, generator=generator, dtype=dtype)
    values = torch.randn(shape, generator=generator)
    if tensor.space is None and len(shape) > 1:
        values /= shape[-2] ** 0.5
    return values.to(dtype)


def _gathered_rows(plan: Plan, name: str) -> int:
    """The fewest rows of any tensor that a task reading this one gathers from; 1 where none does."""
    index = tensor_index(plan)
    rows = [
        int(plan.sections["tensors"]["rows"][index[source]])
        for node in plan.graph.nodes
        if name in node.inputs
        for source, accesses in zip(node.inputs, node.op.rule.inputs, strict=True)
        if source != name and any(access.rows == "all" for access in accesses)
    ]
    return min(rows, default=1)
