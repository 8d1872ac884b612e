"""Devices: how many cores of which kind, and the figures that the cost model takes.

All rates are whole numbers per microsecond and all times whole nanoseconds, so that costs are exact integers: the
native code and the Python twin, and every rank of a world, come to the same plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hyper_mpmd.errors import UnknownDeviceError
from hyper_mpmd.scheduler.records import MAX_INDEX, MAX_RANKS

# Bounds that keep 64-bit arithmetic exact whatever figures a user's own device has.
Cores = Annotated[int, Field(gt=0, le=1 << 16)]
Rate = Annotated[int, Field(gt=0, le=1 << 52)]
Ramp = Annotated[int, Field(ge=0, le=1 << 16)]
Latency = Annotated[int, Field(ge=0, le=1 << 31)]
TileSize = Annotated[int, Field(gt=0, le=MAX_INDEX)]


class Device(BaseModel):
    """One device (a CPU, or one NPU die) as the scheduler sees it. Rates are what to expect, not peaks.

    unified: every core is both AIC and AIV (a CPU); then aic == aiv counts the same cores.
    cube_flops_per_us, vector_flops_per_us: float32 and 16-bit operations of one core in a microsecond.
    cube_ramp, vector_ramp: rows and columns that a tile pays for on top of its own (packing, pipeline fill, start and
    end of a SIMD loop).
    bytes_per_us: what one core of each kind reads and writes in a microsecond (caches included).
    row_bytes: what each row of a box that is not whole rows costs on top of its bytes (a transfer that starts anew).
    memory_bytes_per_us: of the main memory, all cores together: for the bound.
    link_bytes_per_us: what one core puts to another rank in a microsecond; link_total_bytes_per_us: all cores together.
    task_ns: overhead of a task; event_ns: from a signal to the waiter's start; remote_ns: the same between ranks;
    launch_ns: the host's time to launch an op (O0).
    row_tiles, col_tiles: the tile sizes to choose among.

    For the simulator: l2_bytes: of the cache that all cores share, 0 for none. near: (ranks, nanoseconds) pairs, the
    latency between two ranks of one block of so many consecutive ranks, smallest block first; remote_ns beyond them.
    cube_peak_per_us: peak operations of one AIC in a microsecond, float32 and 16-bit, for the share of the peak.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    aic: Cores
    aiv: Cores
    unified: bool = False
    cube_flops_per_us: tuple[Rate, Rate]
    vector_flops_per_us: tuple[Rate, Rate]
    cube_ramp: tuple[Ramp, Ramp]
    vector_ramp: tuple[Ramp, Ramp] = (0, 0)
    cube_bytes_per_us: Rate
    vector_bytes_per_us: Rate
    row_bytes: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    memory_bytes_per_us: Rate
    link_bytes_per_us: Rate
    link_total_bytes_per_us: Rate
    task_ns: Annotated[int, Field(ge=1, le=1 << 31)]
    event_ns: Latency
    remote_ns: Latency
    launch_ns: Latency
    row_tiles: Annotated[tuple[TileSize, ...], Field(min_length=1)]
    col_tiles: Annotated[tuple[TileSize, ...], Field(min_length=1)]
    l2_bytes: Annotated[int, Field(ge=0, le=1 << 52)] = 0
    near: tuple[tuple[Cores, Latency], ...] = ()
    cube_peak_per_us: tuple[Rate, Rate] | None = None

    @model_validator(mode="after")
    def _unified_counts_agree(self) -> Device:
        if self.unified and self.aic != self.aiv:
            raise ValueError(f"a unified device counts the same cores twice, but aic is {self.aic} and aiv {self.aiv}")
        return self

    def latency_ns(self, source: int, target: int) -> int:
        """From a signal of one rank to the start of what waits for it on another."""
        for ranks, ns in self.near:
            if source // ranks == target // ranks:
                return ns
        return self.remote_ns


def usable_cores() -> int:
    """Processors that this process may use: its affinity, cut down by a cgroup CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _quota_cores() or affinity))


@cache  # a running process keeps its quota, and planning every step asks
def _quota_cores() -> int | None:
    """The cgroup quota in whole processors (rounded up), or None where there is none."""
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(quota_file).read_text().split()
            quota, period = (words[0], words[1]) if period_file is None else (words[0], Path(period_file).read_text())
            if quota not in ("max", "-1"):
                return max(1, -(-int(quota) // int(period)))
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue
    return None


@cache
def _cpu(cores: int) -> Device:
    return Device(
        name="cpu",
        aic=cores,
        aiv=cores,
        unified=True,
        # One core of a current server x86 with AVX2 or AVX-512; `make bench` prints what this machine reaches.
        cube_flops_per_us=(90_000, 80_000),
        vector_flops_per_us=(12_000, 10_000),
        cube_ramp=(8, 32),
        vector_ramp=(0, 16),  # a vector register of floats
        cube_bytes_per_us=15_000,
        vector_bytes_per_us=10_000,
        row_bytes=64,  # a cache line
        memory_bytes_per_us=20_000,
        link_bytes_per_us=8_000,  # a memory copy
        link_total_bytes_per_us=8_000 * cores,
        task_ns=1_000,
        event_ns=100,
        remote_ns=200,
        launch_ns=20_000,
        row_tiles=(256, 128, 64, 32, 16),
        col_tiles=(2048, 1024, 512, 256, 128, 64),
        l2_bytes=32 << 20,  # a last-level cache of current servers, the share of a few cores
    )


@cache
def _ascend(name: str, *, link: int, remote_ns: int, near: tuple[tuple[int, int], ...] = ()) -> Device:
    # 24 AIC and 48 AIV visible to kernels, 1.85 GHz: CANN platform files.
    # Cube 8192 fp16 FLOP a clock a core (CANN best practice), at the 0.75 of peak to expect of matrix products
    # (arXiv 2506.12708, 2605.23764); float32 on the cube at half of that [derived].
    # Vector 22 TFLOP/s fp16 over 48 cores, fp32 half (Ascend/msmodeling).
    # L2 4.9 TB/s read (CANN platform files, derived), HBM 1.6 TB/s at 0.6 (msmodeling).
    # Links at 0.7 of 196 GB/s a die (arXiv 2506.12708); task switch 0.1 us, static queue (arXiv 2605.23764); an event
    # through global memory about 1 us (simpler mmio notes); an op from a C++ host 5 to 10 us (msmodeling).
    return Device(
        name=name,
        aic=24,
        aiv=48,
        cube_flops_per_us=(5_683_200, 11_366_400),
        vector_flops_per_us=(229_166, 458_333),
        cube_ramp=(8, 8),  # assumed: half an L0 fractal row and column of pipeline fill
        vector_ramp=(0, 64),  # a vector register of floats, 256 bytes
        cube_bytes_per_us=204_166,
        vector_bytes_per_us=102_083,
        row_bytes=256,  # assumed: half of the 512 bytes from which a transfer runs at full rate
        memory_bytes_per_us=960_000,
        link_bytes_per_us=link,
        link_total_bytes_per_us=137_200,
        task_ns=100,
        event_ns=1_000,
        remote_ns=remote_ns,
        launch_ns=8_000,
        row_tiles=(1024, 512, 256, 128, 64, 32),
        col_tiles=(2048, 1024, 512, 256, 128),
        l2_bytes=192 << 20,  # CANN platform files
        near=near,
        cube_peak_per_us=(7_577_600, 15_155_200),
    )


_DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": lambda: _cpu(usable_cores()),
    # To one peer about 28 GB/s on A2 (arXiv 2506.12708, msmodeling), 0.5 us away.
    "ascend-a2": lambda: _ascend("ascend-a2", link=19_600, remote_ns=500),
    # 392 / 2 GB/s a die. The other die of the package 0.22 us away, one hop 0.93 us, two hops 2.5 us (UBEP, arXiv
    # 2607.06202); one hop within the 16 dies of a node [derived]. Plans are made for one hop, and simulated with all.
    "ascend-a3": lambda: _ascend(
        "ascend-a3", link=137_200, remote_ns=930, near=((2, 220), (16, 930), (MAX_RANKS, 2_500))
    ),
}


def get_device(device: str | Device) -> Device:
    """A device by name or from a TOML file (a name that ends in .toml), or the given one."""
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and device.endswith(".toml"):
        from hyper_mpmd.scheduler.device_file import read_device

        return read_device(device)
    try:
        return _DEVICES[device]()
    except (KeyError, TypeError):
        known = ", ".join(_DEVICES)
        raise UnknownDeviceError(f"no device is called {device!r}; known: {known}, or FILE.toml") from None


def device_names() -> tuple[str, ...]:
    """The names that `get_device` knows."""
    return tuple(_DEVICES)
