"""The two ways to lower and schedule: native, and its slow Python twin. Same records from both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.scheduler.descriptor import Descriptor
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.scheduler.records import Records

LoadsBySpace = Mapping[int, NDArray[np.int64]]
TileSizes = dict[int, tuple[int, int]]


class Backend(Protocol):
    """Lowering and scheduling. loads: {row space index: int64 [ranks, groups]}; given: {op index: tile rows, columns}."""

    def lower(
        self, descriptor: Descriptor, loads: LoadsBySpace, device: Device, rank: int, given: TileSizes
    ) -> TileProgram: ...

    def schedule(self, program: TileProgram, device: Device, policy: str) -> dict[str, Records]: ...

    def plan(
        self, descriptor: Descriptor, loads: LoadsBySpace, device: Device, policy: str, rank: int, given: TileSizes
    ) -> tuple[dict[str, Records], NDArray[np.int64]]:
        """Lower and schedule in one go: the plan's sections, and the tile sizes [ops, 2]."""
        ...


class PythonBackend:
    """The twin."""

    def lower(
        self, descriptor: Descriptor, loads: LoadsBySpace, device: Device, rank: int, given: TileSizes
    ) -> TileProgram:
        from hyper_mpmd.scheduler.twin.lower import lower

        return lower(descriptor, loads, device, rank, given)

    def schedule(self, program: TileProgram, device: Device, policy: str) -> dict[str, Records]:
        from hyper_mpmd.scheduler.twin.schedule import POLICIES, assemble

        return assemble(program, POLICIES[policy](program, device), device, policy)

    def plan(
        self, descriptor: Descriptor, loads: LoadsBySpace, device: Device, policy: str, rank: int, given: TileSizes
    ) -> tuple[dict[str, Records], NDArray[np.int64]]:
        program = self.lower(descriptor, loads, device, rank, given)
        return self.schedule(program, device, policy), program.tiles


def get_backend(name: Literal["native", "python"] | None) -> Backend:
    """The backend of that name."""
    return PythonBackend()
