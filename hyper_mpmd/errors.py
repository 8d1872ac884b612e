"""What can go wrong, one class a kind: each is a HyperMpmdError and also the built-in error people expect to catch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class HyperMpmdError(Exception):
    """The base of every error that hyper_mpmd raises on purpose."""


# What a graph can get wrong, refused where it is written.


class ShapeError(HyperMpmdError, ValueError):
    """Shapes that do not meet, or a tensor of another shape than the graph declares."""


class DTypeError(HyperMpmdError, TypeError):
    """A dtype that the graph, the op or the engine does not take."""


class RowSpaceError(HyperMpmdError, ValueError):
    """A row space used where another belongs, or one that belongs to another graph."""


class UnknownTensorError(HyperMpmdError, ValueError):
    """A tensor used before it exists, or one of another graph."""


class OverwrittenTensorError(HyperMpmdError, ValueError):
    """A tensor used after an in-place op has overwritten it, or one that may not be overwritten."""


class PullSourceError(HyperMpmdError, ValueError):
    """Rows to be pulled that do not lie where peers can read them."""


class CycleError(HyperMpmdError, ValueError):
    """Tasks that wait for one another in a circle."""


class NameTakenError(HyperMpmdError, ValueError):
    """A name used twice in one graph, or an op name that two classes claim."""


class CoreKindError(HyperMpmdError, TypeError):
    """An op added as work of another core kind than its own: a cube op added as vector, say."""


class OpRuleError(HyperMpmdError, ValueError):
    """An op whose declaration (tile rule, shapes, kernel) is not legal."""


class OpParameterError(HyperMpmdError, ValueError):
    """A parameter that an op does not have, or a value that it cannot take."""


class GraphFormatError(HyperMpmdError, ValueError):
    """A graph file that is not one, or something else where a graph belongs."""


# What `compile` refuses.


class LoadsError(HyperMpmdError, ValueError):
    """Loads that are missing, negative, of the wrong length, or that contradict one another."""


class UnknownDeviceError(HyperMpmdError, ValueError):
    """A device name that nobody has described."""


class DeviceFormatError(HyperMpmdError, ValueError):
    """A device file that is not one, or a change of a device that makes no sense."""


class UnknownPolicyError(HyperMpmdError, ValueError):
    """A policy name that does not exist."""


class UnknownBackendError(HyperMpmdError, ValueError):
    """A planning backend that does not exist, or that is not installed here."""


class TileSizeError(HyperMpmdError, ValueError):
    """Tile sizes that the user gave and the op cannot take."""


class WorldSizeError(HyperMpmdError, ValueError):
    """A number of ranks, or a rank, that does not fit the graph or the counts."""


class PlanLimitError(HyperMpmdError, ValueError):
    """A plan larger than its record fields can index."""


class PlanFormatError(HyperMpmdError, ValueError):
    """A plan file that is not one, is damaged, or has another version."""


# What a simulation refuses.


class SimulationError(HyperMpmdError, ValueError):
    """Options of a simulation that make no sense, or plans that were not made for the same device."""


# What a proof refuses.


class PlanUnsafe(HyperMpmdError, ValueError):
    """A plan or a world that could hang, race or miscount; the message is the smallest counter-example, in names.

    counterexample: the same as plain data for JSON.
    """

    def __init__(self, message: str, counterexample: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.counterexample = counterexample or {}


class SignalError(PlanUnsafe):
    """An event whose threshold is not the number of its signals, or a wait that can never be met."""


class HangError(PlanUnsafe):
    """Tasks that wait for one another in a circle, through queues, events, launches and ranks."""


class RaceError(PlanUnsafe):
    """Two tasks that touch the same box, one writing, in no order."""


# What `run` refuses or reports.


class MissingTensorError(HyperMpmdError, TypeError):
    """An input that `run` was not given, or one that the graph does not have."""


class DeviceMismatchError(HyperMpmdError, ValueError):
    """A tensor that lives on another device than the plan runs on."""


class StrideError(HyperMpmdError, ValueError):
    """A tensor that is not contiguous where the engine reads it in place."""


class EngineError(HyperMpmdError, RuntimeError):
    """The engine cannot take this launch: closed, missing, or in a state it names."""


class EngineHungError(EngineError):
    """A task body of an earlier launch, which was ended, has not come to its end; the engine waits for it.

    The engine takes launches again once that body has ended. One that never ends needs a new process.
    """


class NestedRunError(EngineError):
    """`run` called from inside a kernel: the workers that it would need are busy running that kernel."""


class TaskFailedError(HyperMpmdError, RuntimeError):
    """A task's kernel failed; the message names rank, task and reason, and __cause__ holds a Python kernel's error."""


class LaunchTimeout(HyperMpmdError, TimeoutError, RuntimeError):
    """A launch passed its deadline; the message names rank, core, task, event, have and need, and the root cause.

    report: the same as plain data ({} where a rank never entered the launch): "cores", each with its state, and "root".
    path: the JSON file that holds it, for `hyper-mpmd explain-hang`; None where none was written.
    records: the state of every core as 64-byte records of `hyper_mpmd.scheduler.records.CORE`; None as with report.
    """

    def __init__(
        self, message: str, report: dict[str, Any] | None = None, path: Path | None = None, records: Any = None
    ) -> None:
        super().__init__(message)
        self.report = report or {}
        self.path = path
        self.records = records


class HangFileError(HyperMpmdError, ValueError):
    """A file for `explain-hang` that is not one, is damaged, or has another version."""
