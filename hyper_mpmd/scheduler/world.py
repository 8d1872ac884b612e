"""World: one plan a rank, made from one counts matrix, run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hyper_mpmd.errors import PlanFormatError, WorldSizeError
from hyper_mpmd.scheduler.plan import Plan

if TYPE_CHECKING:
    from hyper_mpmd.scheduler.device import Device
    from hyper_mpmd.scheduler.prove import Proof
    from hyper_mpmd.scheduler.simulate import Simulation
    from hyper_mpmd.scheduler.timeline import Timeline


class World:
    """The plans of all ranks. Made by `hm.compile(..., world=W)`, or of plans that were loaded, in order of rank.

    Errors: WorldSizeError for plans that are not one of each rank, PlanFormatError for plans not made together.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        wanted = self.plans[0].ranks if self.plans else 1
        if [(plan.rank, plan.ranks) for plan in self.plans] != [(rank, wanted) for rank in range(wanted)]:
            found = ", ".join(f"rank {plan.rank} of {plan.ranks}" for plan in self.plans) or "none"
            raise WorldSizeError(f"a world is one plan of each rank, in order; got {found}")
        for name in ("graph", "loads", "tiles"):
            for plan in self.plans[1:]:
                if getattr(plan.header, name) != getattr(self.plans[0].header, name):
                    raise PlanFormatError(f"rank {plan.rank}'s plan was made with other {name} than rank 0's")

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, rank: int) -> Plan:
        return self.plans[rank]

    def __repr__(self) -> str:
        tasks = sum(len(plan.tasks) for plan in self.plans)
        return f"World({self.plans[0].graph.name!r}, {len(self)} ranks, {tasks} tasks)"

    def report(self) -> str:
        """What is in the plans, for people, a column a rank."""
        from hyper_mpmd.viz.report import report

        return report(self.plans)

    def timeline(self) -> Timeline:
        """The predicted timeline of all ranks."""
        from hyper_mpmd.scheduler.timeline import predicted

        return predicted(self.plans)

    def check(self, backend: Literal["native", "python"] | None = None) -> Proof:
        """Prove that the plans together cannot hang or race; see `hyper_mpmd.scheduler.prove.prove`.

        Errors: SignalError, HangError, RaceError with the smallest counter-example; PlanFormatError.
        """
        from hyper_mpmd.scheduler.prove import prove

        return prove(self.plans, backend)

    def simulate(
        self,
        *,
        seed: int = 0,
        jitter: float = 0.0,
        device: str | Device | None = None,
        backend: Literal["native", "python"] | None = None,
    ) -> Simulation:
        """Simulate the plans together in virtual time on their device; see `hyper_mpmd.scheduler.simulate.simulate`.

        Errors: WorldSizeError, SimulationError, HangError, PlanFormatError.
        """
        from hyper_mpmd.scheduler.simulate import simulate

        return simulate(self.plans, seed=seed, jitter=jitter, device=device, backend=backend)

    def run(
        self,
        inputs: Sequence[Mapping[str, Any]],
        *,
        engine: str = "native",
        workers: int | None = None,
        timeout: float | None = None,
    ) -> list[dict[str, Any]]:
        """Run all ranks in this process, each on its own inputs; outputs by name for each rank.

        workers: threads of each rank. Otherwise as `Plan.run`.
        """
        from hyper_mpmd.engine.run import run

        return run(self.plans, self._check(inputs), engine=engine, workers=workers, timeout=timeout)

    def run_measured(
        self, inputs: Sequence[Mapping[str, Any]], *, workers: int | None = None, timeout: float | None = None
    ) -> tuple[list[dict[str, Any]], Timeline]:
        """`run`, and the measured timeline of it."""
        from hyper_mpmd.engine.run import run_measured

        return run_measured(self.plans, self._check(inputs), workers=workers, timeout=timeout)

    def _check(self, inputs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if len(inputs) != len(self):
            raise WorldSizeError(f"a world of {len(self)} ranks needs inputs for each; got {len(inputs)}")
        return inputs
