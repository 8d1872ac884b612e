"""`hyper-mpmd devices` (all, or every figure of one with its unit and source) and `hyper-mpmd policies`."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hyper_mpmd.scheduler.device import Device, device_names, get_device
from hyper_mpmd.scheduler.device_sources import SOURCES, UNITS
from hyper_mpmd.scheduler.policies import POLICIES


def devices_command(name: str | None, *, as_json: bool) -> None:
    """Print one device, or all."""
    devices = [get_device(one) for one in ([name] if name is not None else device_names())]
    if as_json:
        found = [_record(device) for device in devices]
        typer.echo(json.dumps(found if name is None else found[0]))
    elif name is None:
        Console().print(_overview(devices))
    else:
        Console().print(_one(devices[0]))


def policies_command(*, as_json: bool) -> None:
    """Print the policies."""
    if as_json:
        typer.echo(json.dumps(POLICIES))
        return
    table = Table(show_header=False)
    for name, what in POLICIES.items():
        table.add_row(name, what)
    Console().print(table)


def _record(device: Device) -> dict[str, Any]:
    figures = device.model_dump(mode="json")
    sources = SOURCES.get(device.name, {})
    return {
        "name": device.name,
        "unified": device.unified,
        "figures": {
            name: {"value": figures[name], "unit": unit, "source": sources.get(name, "given by the user")}
            for name, unit in UNITS.items()
            if figures[name] not in (None, [])
        },
    }


def _overview(devices: list[Device]) -> Table:
    table = Table(title="devices", title_justify="left")
    for heading in ("name", "cores", "cube bf16", "memory", "L2", "links", "to one rank", "latency"):
        left, name = heading in ("name", "cores"), heading == "name"
        table.add_column(heading, justify="left" if left else "right", no_wrap=name, min_width=9 if name else 1)
    for device in devices:
        cores = f"{device.aic} cores" if device.unified else f"{device.aic} AIC + {device.aiv} AIV"
        table.add_row(
            device.name,
            cores,
            f"{device.aic * device.cube_flops_per_us[1] / 1e6:.1f} TFLOP/s",
            f"{device.memory_bytes_per_us / 1e3:.0f} GB/s",
            f"{device.l2_bytes >> 20} MiB",
            f"{device.link_total_bytes_per_us / 1e3:.1f} GB/s",
            f"{device.link_bytes_per_us / 1e3:.1f} GB/s",
            f"{device.latency_ns(0, 1)} ns",
        )
    return table


def _one(device: Device) -> Table:
    table = Table(title=device.name, title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("source")
    for name, figure in _record(device)["figures"].items():
        table.add_row(name, _shown(figure["value"]), figure["unit"], escape(figure["source"]))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"({_shown(one)})" if isinstance(one, list) else _shown(one) for one in value)
    return f"{value:,}"
