"""Devices from a user's TOML file, and what-if changes of a device: `link=2x`, `aiv=24`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hyper_mpmd.errors import DeviceFormatError
from hyper_mpmd.scheduler.device import Device, get_device

# What people change together.
GROUPS: dict[str, tuple[str, ...]] = {
    "cube": ("cube_flops_per_us",),
    "vector": ("vector_flops_per_us",),
    "l2": ("l2_bytes",),
    "hbm": ("memory_bytes_per_us",),
    "link": ("link_bytes_per_us", "link_total_bytes_per_us"),
    "task": ("task_ns",),
    "event": ("event_ns",),
    "remote": ("remote_ns", "near"),
    "launch": ("launch_ns",),
}


def read_device(path: str | Path) -> Device:
    """A device from a TOML file: the fields of `Device`, and `base`, the name of a device to take the others from.

    Errors: DeviceFormatError for a file that cannot be read or is not a device; UnknownDeviceError for its base.
    """
    file = Path(path)
    try:
        toml = importlib.import_module("tomllib")
    except ImportError:
        raise DeviceFormatError(f"{file}: TOML needs Python 3.11 or later; build a hyper_mpmd.Device instead") from None
    try:
        fields: dict[str, Any] = toml.loads(file.read_text())
    except OSError as error:
        raise DeviceFormatError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise DeviceFormatError(f"{file} is not TOML: {error}") from None
    base = fields.pop("base", None)
    if base is not None:
        fields = {**get_device(base).model_dump(), "name": file.stem, **fields}
    return _valid({"name": file.stem, **fields}, str(file))


def with_settings(device: Device, settings: Sequence[str]) -> Device:
    """The device with changes such as "aiv=24", "link=2x" (times 2), "event_ns=500"; a name is a field of `Device` or
    one of GROUPS.

    Errors: DeviceFormatError for what is not such a change.
    """
    fields = device.model_dump()
    for setting in settings:
        name, equals, text = setting.partition("=")
        names = GROUPS.get(name, (name,))
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(x?)", text)
        if not equals or not found or any(not _is_number(fields.get(one)) for one in names):
            known = ", ".join([*GROUPS, *(field for field in fields if _is_number(fields[field]))])
            raise DeviceFormatError(f"--set {setting}: write NAME=NUMBER or NAME=NUMBERx; names: {known}")
        number, factor = float(found[1]), bool(found[2])
        for one in names:
            fields[one] = _changed(fields[one], number, factor)
        if device.unified and name in ("aic", "aiv"):
            fields["aic"] = fields["aiv"] = fields[name]
    if settings:
        fields["name"] = f"{device.name} with {' '.join(settings)}"
    return _valid(fields, "--set " + " ".join(settings))


def _is_number(value: Any) -> bool:
    """Or several: a pair of rates, latencies by distance."""
    if isinstance(value, tuple):
        return bool(value) or value == ()
    return isinstance(value, int) and not isinstance(value, bool)


def _changed(value: Any, number: float, factor: bool) -> Any:
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):  # (ranks, nanoseconds): the ranks stay
            return tuple((ranks, _changed(ns, number, factor)) for ranks, ns in value)
        return tuple(_changed(one, number, factor) for one in value)
    return round(value * number) if factor else round(number)


def _valid(fields: dict[str, Any], what: str) -> Device:
    try:
        return Device.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "device"
        raise DeviceFormatError(f"{what}: {where}: {first['msg']}; got {first['input']!r}") from None
