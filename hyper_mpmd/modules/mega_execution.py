"""What a layer runs with: plans and, over ranks, its group's engine. Layers of one config may take turns with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hyper_mpmd.modules.mega_config import Config
from hyper_mpmd.modules.mega_errors import CapacityOverflowError, MegaMoeStateError
from hyper_mpmd.modules.mega_exchange import Exchange, Met, Record, check_configs
from hyper_mpmd.modules.mega_groups import Grid
from hyper_mpmd.modules.mega_plans import Plans
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.timeline import Timeline


@dataclass(frozen=True)
class MeasuredRun:
    """One run of a layer, forward or backward: this rank's plan, and when each of its tasks ran."""

    plan: Plan
    timeline: Timeline

    @property
    def kinds(self) -> list[str]:
        """Core kind (cube, vector, comm) of each of the timeline's ops."""
        return [node.core for node in self.plan.graph.nodes]


class Execution:
    """Resources of one layer, or of a group that shares them. Nothing is taken before the first forward.

    grid: the ranks. members: how many layers use it.
    """

    def __init__(self, config: Config, grid: Grid, members: int = 1) -> None:
        self.config = config
        self.members = members
        self.used = False
        self.plans: Plans | None = None
        self.measured: list[MeasuredRun] | None = None  # where runs are noted, if they are
        self._grid = grid
        self._engine: Any = None
        self._exchange: Exchange | None = None
        self._claimed = threading.Lock()

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Use it alone. MegaMoeStateError where another thread does."""
        if not self._claimed.acquire(blocking=False):
            raise MegaMoeStateError(
                "these execution resources are in use by another thread; layers that share them are called one after "
                "another"
            )
        try:
            yield
        finally:
            self._claimed.release()

    def meet(self, record: Record) -> Met:
        """Exchange records with all ranks; raises the same on all. Then the capacity holds too."""
        self._open()
        if self._exchange is not None:
            met = self._exchange.meet(record)
        elif record.refusal is not None:
            raise record.refusal
        else:
            met = Met((record.tokens,), record.counts[None], record.wanted)
        self._check_capacity(met)
        return met

    def run(self, plan: Plan, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run this rank's plan, with its peers; the tensors that the plan takes are picked by name."""
        needed: dict[str, Any] = {name: tensors[name] for name in plan.graph.inputs}
        made: dict[str, torch.Tensor]
        if self.measured is None:
            made = plan.run(**needed) if self._engine is None else self._engine.run(plan, **needed)
            return made
        if self._engine is None:
            made, timeline = plan.run_measured(**needed)
        else:
            made, timeline = self._engine.run_measured(plan, **needed)
        self.measured.append(MeasuredRun(plan, timeline))
        return made

    @property
    def place(self) -> int:
        """This rank's place among those that each expert is cut over."""
        return 0 if self._engine is None else int(self._engine.rank) % self.config.tp_size

    def leave(self) -> None:
        """One layer less; with the last one all is given back, with all ranks. May be called again if it raises."""
        if self.members > 1:
            self.members -= 1
            return
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self.plans = None
        self.members = 0

    def _open(self) -> None:
        if self.plans is not None:
            return
        self.used = True
        if self.config.ranks == 1:
            self.plans = Plans(self.config, 0)
            return
        from hyper_mpmd.engine.group import GroupEngine

        group = self._grid.group()
        check_configs(group, self.config)
        if self._engine is None:
            self._engine = GroupEngine(group)
        self._exchange = Exchange(self._engine.name, group, self.config)
        self.plans = Plans(self.config, self._engine.rank)

    def _name(self, rank: int) -> str:
        return "rank 0" if self._engine is None else str(self._engine.name(rank))

    def _check_capacity(self, met: Met) -> None:
        config = self.config
        received = met.counts.reshape(config.ep_size, config.ep_size, -1).sum(axis=(0, 2))
        most = int(received.max())
        if most > config.capacity:
            rank = int(received.argmax()) * config.tp_size
            raise CapacityOverflowError(
                f"capacity overflow: {self._name(rank)} would receive {most} rows, the capacity is "
                f"{config.capacity} (expert_capacity_factor={config.expert_capacity_factor}); raise the factor or "
                "balance the router"
            )
