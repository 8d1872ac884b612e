"""Kernels written in Python: the engine calls back, task by task, with the GIL; they get torch views of their boxes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyper_mpmd.engine.bindings import TORCH_DTYPES, memory_view, tensor_index
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import ROLES
from hyper_mpmd.tasks.op import Tile

_inside: set[int] = set()  # threads that run a Python kernel now


def interrupt_kernels() -> None:
    """Raise SystemExit in every Python kernel that runs now, as soon as it comes to its next bytecode."""
    for thread in list(_inside):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


class PythonKernels:
    """The callback of one launch: (rank, task) -> whether it went well. `error` keeps the first failure."""

    def __init__(
        self,
        plans: Sequence[Plan],
        prepared: Sequence[Any],
        workspaces: Sequence[Any],
        inputs: Sequence[Mapping[str, torch.Tensor]],
        outputs: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        self.plans, self.inputs, self.outputs = plans, inputs, outputs
        self.prepared, self.workspaces = prepared, workspaces
        self.error: BaseException | None = None
        # Between processes the only plan here is this rank's.
        self.index = {plan.rank: index for index, plan in enumerate(plans)}
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, rank: int, task: int) -> bool:
        thread = threading.get_ident()
        try:
            _inside.add(thread)
            self._run(rank, task)
        except BaseException as error:
            if self.error is None:
                self.error = error
            return False
        finally:
            _inside.discard(thread)
        return True

    def _run(self, rank: int, number: int) -> None:
        plan = self.plans[self.index[rank]]
        task = plan.tasks[number]
        begin, count = int(task["access_begin"]), int(task["access_count"])
        views = []
        for box in plan.sections["accesses"][begin : begin + count].tolist():
            tensor, owner, row, rows, col, cols = box
            views.append(self._matrix(owner, tensor)[row : row + rows, col : col + cols])
        op = plan.graph.nodes[int(task["op"])].op
        with torch.no_grad():
            op.kernel(Tile(plan.task_name(number), int(task["number"]), int(task["group"])), *views)

    def _matrix(self, rank: int, tensor: int) -> torch.Tensor:
        """The whole tensor as a matrix."""
        view = self._views.get((rank, tensor))
        if view is None:
            view = self._views[rank, tensor] = self._find(rank, tensor)
        return view

    def _find(self, rank: int, tensor: int) -> torch.Tensor:
        here = self.index[rank]
        plan = self.plans[here]
        record = plan.sections["tensors"][tensor]
        rows, cols = int(record["rows"]), int(record["cols"])
        if record["role"] in (ROLES["workspace"], ROLES["symmetric"]):
            address = self.workspaces[here].address(self.prepared[here], tensor)
            return memory_view(address, rows, cols, TORCH_DTYPES[int(record["dtype"])])
        index = tensor_index(plan)
        storage = int(record["storage"])
        for name, given in self.inputs[here].items():
            if index[name] == tensor:
                return given.detach().view(rows, cols)
        for output, name in plan.graph.outputs.items():
            if int(plan.sections["tensors"]["storage"][index[name]]) == storage:
                return self.outputs[here][output].view(rows, cols)
        raise AssertionError(f"tensor {tensor} of rank {rank} has no memory")
