"""`run --processes`: one process a rank, plans on the symmetric heap, held against the same world in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hyper_mpmd.engine.compare import Outputs
from hyper_mpmd.engine.group import GroupEngine
from hyper_mpmd.errors import EngineError
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.testing.ranks import RankFailed, RankPool

if TYPE_CHECKING:
    import torch


class Processes:
    """A process for each rank, holding its plans and inputs; used as a context manager.

    plans: {policy: the plan of each rank}. inputs: tensors by name of each rank.
    """

    def __init__(self, plans: Mapping[str, Sequence[Plan]], inputs: Sequence[Mapping[str, Any]]) -> None:
        self._plans, self._inputs = plans, inputs
        self._pool = RankPool(len(inputs))

    def __enter__(self) -> Processes:
        import torch

        try:
            with TemporaryDirectory(prefix="hyper-mpmd-") as folder:
                for rank, given in enumerate(self._inputs):
                    torch.save(dict(given), _file(folder, rank, "inputs"))
                    for policy, plans in self._plans.items():
                        plans[rank].save(_file(folder, rank, policy))
                self._pool.run(_open, folder, tuple(self._plans))
        except BaseException:
            self._pool.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._pool.run(_close)
        finally:
            self._pool.close()

    def run(self, policy: str, workers: int | None, timeout: float) -> tuple[Outputs, float]:
        """Outputs of each rank, and the seconds of the slowest one's launch."""
        try:
            answers = self._pool.run(_launch, policy, workers, timeout, timeout=timeout + 60)
        except RankFailed as error:
            raise EngineError(str(error)) from error
        return [outputs for outputs, _ in answers], max(seconds for _, seconds in answers)


# What a rank's process keeps between calls.
_held: dict[str, Any] = {}


def _open(folder: str, policies: tuple[str, ...]) -> None:
    import torch

    engine = GroupEngine()
    _held["engine"] = engine
    _held["inputs"] = torch.load(_file(folder, engine.rank, "inputs"), weights_only=True)
    _held["plans"] = {policy: Plan.load(_file(folder, engine.rank, policy)) for policy in policies}


def _launch(policy: str, workers: int | None, timeout: float) -> tuple[dict[str, torch.Tensor], float]:
    begin = time.perf_counter()
    outputs = _held["engine"].run(_held["plans"][policy], workers=workers, timeout=timeout, **_held["inputs"])
    return outputs, time.perf_counter() - begin


def _close() -> None:
    _held.pop("engine").close()
    _held.clear()


def _file(folder: str, rank: int, what: str) -> Path:
    return Path(folder) / f"rank{rank}.{what}.bin"
