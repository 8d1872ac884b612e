"""Run plans on the native engine: one plan, or the plans of a world as groups of threads in this process."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyper_mpmd import _native
from hyper_mpmd.engine.bindings import check_inputs, make_outputs, tensor_index
from hyper_mpmd.engine.launching import DONE, launch, launch_error
from hyper_mpmd.engine.python_kernels import PythonKernels, interrupt_kernels
from hyper_mpmd.engine.reference import run_reference
from hyper_mpmd.engine.torch_gemm import lend
from hyper_mpmd.errors import EngineError, PlanFormatError
from hyper_mpmd.scheduler.device import usable_cores
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import native_sections, proof_of, require_proof
from hyper_mpmd.scheduler.records import ROLES
from hyper_mpmd.scheduler.timeline import TRACE, Timeline, measured
from hyper_mpmd.shmem.config import TIMEOUT, timeout_from

ENGINES = ("native", "reference")

_native.engine.set_processors(usable_cores())
lend()
_LAST_SECONDS = 1.0  # for Python kernels to end once they have been told to


def _close_at_exit() -> None:
    """Join the workers. A Python kernel that went on would meet an interpreter that is no more, and abort."""
    until = time.monotonic() + _LAST_SECONDS
    while not _native.engine.close() and time.monotonic() < until:
        interrupt_kernels()
        time.sleep(0.01)


atexit.register(_close_at_exit)


def run(
    plans: Sequence[Plan],
    inputs: Sequence[Mapping[str, Any]],
    *,
    engine: str = "native",
    workers: int | None = None,
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """Outputs by name of each rank. See `Plan.run`."""
    if engine not in ENGINES:
        raise EngineError(f"no engine is called {engine!r}; known: {', '.join(ENGINES)}")
    check_options(workers, timeout)
    _check(plans, inputs)
    if engine == "reference":
        return run_reference(plans, inputs)
    return _launch(plans, inputs, workers, timeout, [])


def run_measured(
    plans: Sequence[Plan],
    inputs: Sequence[Mapping[str, Any]],
    *,
    workers: int | None = None,
    timeout: float | None = None,
) -> tuple[list[dict[str, Any]], Timeline]:
    """`run` on the native engine, and the timeline of it."""
    check_options(workers, timeout)
    _check(plans, inputs)
    traces = [np.zeros(len(plan.tasks), TRACE) for plan in plans]
    outputs = _launch(plans, inputs, workers, timeout, traces)
    return outputs, measured(plans, traces)


def prepare(plan: Plan) -> Any:
    """The plan as the engine holds it, its certificate checked once. One that could hang is refused."""
    prepared = plan.__dict__.get("_prepared")
    if prepared is None:
        # Where all ranks were proven together, hop levels have nothing to add.
        proof = proof_of([plan])
        hops = proof is None or not proof.world
        try:
            prepared = _native.engine.prepare(*native_sections(plan), hops=hops)
        except ValueError as error:
            raise PlanFormatError(f"the engine refuses this plan: {error}") from None
        plan.__dict__["_prepared"] = prepared
    return prepared


def check_options(workers: int | None, timeout: float | None) -> None:
    """Refuse worker counts and deadlines that cannot be."""
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or not 0 < workers <= 1024):
        raise EngineError(f"workers is {workers!r}; it must be an int from 1 to 1024, or None")
    a_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (a_number and 0 < timeout < float("inf")):
        raise EngineError(f"timeout is {timeout!r}; it must be a positive number of seconds, or None")


def default_timeout() -> float | None:
    """The deadline, in seconds, of a launch that was given none: HYPER_PARALLEL_SHMEM_TIMEOUT_SEC where it is set."""
    return timeout_from(os.environ) if os.environ.get(TIMEOUT, "").strip() else None


def _check(plans: Sequence[Plan], inputs: Sequence[Mapping[str, Any]]) -> None:
    if plans[0].ranks != len(plans):
        raise EngineError(
            f"rank {plans[0].rank}'s plan of a world of {plans[0].ranks} cannot run alone; run the world that "
            f"hm.compile(..., world={plans[0].ranks}) makes"
        )
    for plan, given in zip(plans, inputs, strict=True):
        check_inputs(plan, given)


def _launch(
    plans: Sequence[Plan],
    inputs: Sequence[Mapping[str, Any]],
    workers: int | None,
    timeout: float | None,
    traces: list[NDArray[np.void]],
) -> list[dict[str, Any]]:
    timeout = default_timeout() if timeout is None else timeout
    require_proof(plans)
    prepared = [prepare(plan) for plan in plans]
    _check_world(plans, prepared)
    outputs = [make_outputs(plan) for plan in plans]
    memory: list[list[int]] = []
    copies: list[list[tuple[int, int]]] = []
    for plan, given, made in zip(plans, inputs, outputs, strict=True):
        found, copied = addresses(plan, given, made)
        memory.append(found)
        copies.append(copied)
    workspaces = [member.workspace for member in prepared]
    kernels = PythonKernels(plans, prepared, workspaces, inputs, outputs)
    outcome = launch(kernels, workspaces, None, memory, copies, traces, workers, timeout)
    if outcome.status != DONE:
        raise launch_error(kernels, outcome)
    return outputs


def _check_world(plans: Sequence[Plan], prepared: list[Any]) -> None:
    """Once a world: what each rank signals and writes is what its peers count on."""
    if len(plans) == 1 or all(plan.__dict__.get("_world_checked") == id(plans[0]) for plan in plans):
        return
    if fault := _native.engine.world_fault(prepared):
        raise PlanFormatError(f"the engine refuses this world: {fault}")
    for plan in plans:
        plan.__dict__["_world_checked"] = id(plans[0])


def addresses(
    plan: Plan, given: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Where each tensor of the plan lies (0: in the workspace), and which symmetric ones to copy out where."""
    index = tensor_index(plan)
    roles = plan.sections["tensors"]["role"]
    storage = plan.sections["tensors"]["storage"]
    found = [0] * len(index)
    copied = []
    for name in plan.graph.inputs:
        found[index[name]] = given[name].data_ptr()
    for output, name in plan.graph.outputs.items():
        number = index[name]
        if roles[number] == ROLES["symmetric"]:
            copied.append((number, made[output].data_ptr()))
        else:
            found[number] = found[int(storage[number])] = made[output].data_ptr()
    return found, copied
