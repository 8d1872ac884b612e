"""From torch tensors to a launch: check what the user gave, make the outputs, find every tensor's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from hyper_mpmd.errors import DeviceMismatchError, DTypeError, MissingTensorError, ShapeError, StrideError
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import DTYPES

TORCH_DTYPES = {
    DTYPES["float32"]: torch.float32,
    DTYPES["bfloat16"]: torch.bfloat16,
    DTYPES["int32"]: torch.int32,
    DTYPES["int64"]: torch.int64,
    DTYPES["float16"]: torch.float16,
}


def tensor_index(plan: Plan) -> dict[str, int]:
    """Tensor name -> its number in the plan."""
    return {name: index for index, name in enumerate(plan.graph.tensors)}


def tensor_shape(plan: Plan, name: str) -> tuple[int, ...]:
    """The tensor's shape in this plan, row spaces filled in."""
    tensor = plan.graph.tensors[name]
    rows = int(plan.sections["tensors"]["rows"][tensor_index(plan)[name]])
    return tuple(rows if isinstance(dim, str) else dim for dim in tensor.shape)


def check_inputs(plan: Plan, given: Mapping[str, Any]) -> None:
    """Refuse inputs that the plan cannot read in place, naming tensor, value and what is needed."""
    rank = f"rank {plan.rank}: " if plan.ranks > 1 else ""
    graph = plan.graph
    if unknown := sorted(set(given) - set(graph.inputs)):
        raise MissingTensorError(
            f"{rank}graph {graph.name!r} has no input {unknown[0]!r}; its inputs are {', '.join(graph.inputs)}"
        )
    for name in graph.inputs:
        if name not in given:
            raise MissingTensorError(f"{rank}input {name!r} ({graph.tensors[name].describe()}) is missing")
    for name in graph.inputs:
        _check_tensor(plan, f"{rank}input {name!r}", name, given[name])


def _check_tensor(plan: Plan, where: str, name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise MissingTensorError(f"{where} is a {type(tensor).__name__}; it must be a torch tensor")
    if tensor.device.type != "cpu":
        raise DeviceMismatchError(f"{where} is on {tensor.device}; this plan runs on cpu, so call .cpu() first")
    wanted = TORCH_DTYPES[DTYPES[plan.graph.tensors[name].dtype]]
    if tensor.dtype != wanted:
        raise DTypeError(f"{where} is {tensor.dtype}; the graph declares {wanted}")
    shape = tensor_shape(plan, name)
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            f"{where} has shape {list(tensor.shape)}; under the plan's loads it must be {list(shape)} "
            f"({plan.graph.tensors[name].describe()})"
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        strides = list(tensor.stride()) if tensor.layout == torch.strided else tensor.layout
        raise StrideError(f"{where} has strides {strides}; the engine reads it in place, so call .contiguous() first")


def make_outputs(plan: Plan) -> dict[str, torch.Tensor]:
    """New tensors for the plan's outputs, by output name; two outputs of one tensor share it."""
    made: dict[str, torch.Tensor] = {}
    by_tensor: dict[str, torch.Tensor] = {}
    for output, name in plan.graph.outputs.items():
        if name not in by_tensor:
            dtype = TORCH_DTYPES[DTYPES[plan.graph.tensors[name].dtype]]
            by_tensor[name] = torch.empty(tensor_shape(plan, name), dtype=dtype)
        made[output] = by_tensor[name]
    return made


def memory_view(address: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """A torch view [rows, cols] of memory that the engine owns; valid while its workspace lives."""
    if rows * cols == 0:
        return torch.empty((rows, cols), dtype=dtype)
    buffer = (ctypes.c_char * (rows * cols * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(rows, cols)
