"""The two ways to lower and schedule: native, and its slow Python twin. Same records from both."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import UnknownBackendError
from hyper_mpmd.scheduler.descriptor import Descriptor
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.policies import get_policy
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.scheduler.records import SECTIONS, Records

LoadsBySpace = Mapping[int, NDArray[np.int64]]
TileSizes = dict[int, tuple[int, int]]
Sections = dict[str, Records]


class Backend(Protocol):
    """Lowering and scheduling. loads: {row space index: int64 [ranks, groups]}; given: {op index: tile rows, columns}.

    Several ranks of a world are lowered in one call: they share the layout and the choice of tiles.
    """

    def lower(
        self,
        descriptor: Descriptor,
        loads: LoadsBySpace,
        device: Device,
        ranks: Sequence[int],
        given: TileSizes,
        policy: str = "O1",
    ) -> list[TileProgram]:
        """The tile programs of these ranks."""
        ...

    def schedule(self, program: TileProgram, device: Device, policy: str) -> Sections:
        """A plan's sections."""
        ...

    def plan(
        self,
        descriptor: Descriptor,
        loads: LoadsBySpace,
        device: Device,
        policy: str,
        ranks: Sequence[int],
        given: TileSizes,
    ) -> tuple[list[Sections], NDArray[np.int64]]:
        """Lower and schedule in one go: the sections of each of these ranks' plans, and the tile sizes [ops, 2]."""
        ...


class PythonBackend:
    """The twin."""

    def lower(
        self,
        descriptor: Descriptor,
        loads: LoadsBySpace,
        device: Device,
        ranks: Sequence[int],
        given: TileSizes,
        policy: str = "O1",
    ) -> list[TileProgram]:
        from hyper_mpmd.scheduler.twin.lower import lower

        return lower(descriptor, loads, device, get_policy(policy), list(ranks), given)

    def schedule(self, program: TileProgram, device: Device, policy: str) -> Sections:
        from hyper_mpmd.scheduler.twin.schedule import schedule

        return schedule(program, device, get_policy(policy))

    def plan(
        self,
        descriptor: Descriptor,
        loads: LoadsBySpace,
        device: Device,
        policy: str,
        ranks: Sequence[int],
        given: TileSizes,
    ) -> tuple[list[Sections], NDArray[np.int64]]:
        programs = self.lower(descriptor, loads, device, ranks, given, policy)
        return [self.schedule(program, device, policy) for program in programs], programs[0].tiles


# The sections of a TileProgram that come as records, with their names in a plan.
PROGRAM_SECTIONS = ("ops", "tensors", "tasks", "accesses", "waits", "signals", "events", "peers")


class NativeBackend:
    """The C++ planner. It releases the GIL while it works, and its arrays are handed over without a copy."""

    def __init__(self, planner: Any) -> None:
        self.planner = planner

    def lower(
        self,
        descriptor: Descriptor,
        loads: LoadsBySpace,
        device: Device,
        ranks: Sequence[int],
        given: TileSizes,
        policy: str = "O1",
    ) -> list[TileProgram]:
        found = self.planner.lower(
            descriptor.native,
            list(loads.items()),
            self._device(device),
            self._policy(policy),
            list(ranks),
            _given(given),
        )
        programs = []
        for rank, (sections, costs, local_events, tiles) in zip(ranks, found, strict=True):
            records = {name: sections[name].view(SECTIONS[name]) for name in PROGRAM_SECTIONS}
            programs.append(
                TileProgram(
                    rank=rank,
                    ranks=descriptor.ranks,
                    costs=costs,
                    local_events=local_events,
                    tiles=tiles.reshape(-1, 2),
                    **records,
                )
            )
        return programs

    def schedule(self, program: TileProgram, device: Device, policy: str) -> Sections:
        records = [_bytes(getattr(program, name), name) for name in PROGRAM_SECTIONS]
        costs = np.ascontiguousarray(program.costs, np.int64)
        found = self.planner.schedule(
            program.rank,
            program.ranks,
            program.local_events,
            records,
            costs,
            self._device(device),
            self._policy(policy),
        )
        return {name: found[name].view(dtype) for name, dtype in SECTIONS.items()}

    def plan(
        self,
        descriptor: Descriptor,
        loads: LoadsBySpace,
        device: Device,
        policy: str,
        ranks: Sequence[int],
        given: TileSizes,
    ) -> tuple[list[Sections], NDArray[np.int64]]:
        plans, tiles = self.planner.plan(
            descriptor.native,
            list(loads.items()),
            self._device(device),
            self._policy(policy),
            list(ranks),
            _given(given),
        )
        return [
            {name: sections[name].view(dtype) for name, dtype in SECTIONS.items()} for sections in plans
        ], tiles.reshape(-1, 2)

    @staticmethod
    @lru_cache(maxsize=32)
    def _device(device: Device) -> Any:
        from hyper_mpmd._native import planner

        return planner.Device(
            [device.aic, device.aiv, int(device.unified)],
            [*device.cube_flops_per_us, *device.vector_flops_per_us, *device.cube_ramp, *device.vector_ramp],
            [
                device.cube_bytes_per_us,
                device.vector_bytes_per_us,
                device.link_bytes_per_us,
                device.link_total_bytes_per_us,
                device.memory_bytes_per_us,
                device.l2_bytes,
                device.row_bytes,
            ],
            [device.task_ns, device.event_ns, device.remote_ns, device.launch_ns],
            list(device.row_tiles),
            list(device.col_tiles),
        )

    @staticmethod
    @lru_cache(maxsize=32)
    def _policy(name: str) -> Any:
        from hyper_mpmd._native import planner

        policy = get_policy(name)
        parts = [
            policy.serial,
            policy.whole_groups,
            policy.rotation,
            policy.priorities,
            policy.interleave,
            policy.bursts,
        ]
        return planner.Policy(("op", "list", "strided").index(policy.how), parts)


def _given(given: TileSizes) -> list[tuple[int, int, int]]:
    return [(op, rows, cols) for op, (rows, cols) in given.items()]


def _bytes(records: Records, name: str) -> NDArray[np.uint8]:
    return np.ascontiguousarray(records, SECTIONS[name]).view(np.uint8)


def get_backend(name: Literal["native", "python"] | None) -> Backend:
    """The backend of that name; for None the native one where it is installed, else the twin, with a warning once."""
    planner = native_module("planner", name)
    return PythonBackend() if planner is None else NativeBackend(planner)


def native_module(part: str, backend: str | None) -> Any:
    """The native `part`; None for its Python twin, which stands in with a warning, once, where nothing else was asked.

    Errors: UnknownBackendError for a name that is none, or "native" where it is not installed.
    """
    if backend == "python":
        return None
    if backend not in (None, "native"):
        raise UnknownBackendError(f"no backend is called {backend!r}; known: native, python")
    try:
        return getattr(importlib.import_module("hyper_mpmd._native"), part)
    except ImportError as error:
        if backend is None:
            _warn_of_twin(str(error))
            return None
        raise UnknownBackendError(
            f"the native {part} is not installed ({error}); build it with `make setup`, or use backend='python'"
        ) from error


@cache
def _warn_of_twin(reason: str) -> None:
    warnings.warn(
        f"the native module cannot be imported ({reason}): the slow Python twin makes, proves and simulates plans, and "
        "nothing can run; build it with `make setup`, or say backend='python'",
        RuntimeWarning,
        stacklevel=4,
    )
