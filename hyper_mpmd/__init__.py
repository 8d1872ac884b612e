"""hyper_mpmd: task graphs of cube, vector and one-sided communication work; scheduled, checked, executed and drawn.

The public names are imported on first use, so that `import hyper_mpmd` costs next to nothing and scheduling-only use
never imports torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that holds it
_HOMES: dict[str, str] = {
    "TaskGraph": "hyper_mpmd.tasks",
    "compile": "hyper_mpmd.scheduler.compile",
    "MegaMoeExperts": "hyper_mpmd.modules.mega_moe",
    "Plan": "hyper_mpmd.scheduler.plan",
    "World": "hyper_mpmd.scheduler.world",
    "Device": "hyper_mpmd.scheduler.device",
    "HyperMpmdError": "hyper_mpmd.errors",
    "init_device_mesh": "torch.distributed.device_mesh",
    "fully_shard": "torch.distributed.fsdp",
}
# subpackages that users reach as attributes: hm.ops.GroupedMatmul
_PACKAGES = ("ops", "errors", "testing")

__all__ = ["__version__", *_HOMES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"hyper_mpmd.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hyper_mpmd' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
