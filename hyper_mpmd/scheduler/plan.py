"""The Plan: the only thing later stages see. Task records, one in-order queue a core, events, launches.

The CPU engine, an NPU kernel, the simulator, the prover and the viewer all read this one thing. It is immutable and
hashable, and it is saved as JSON (to read and to edit) or as a binary image (small and fast). Loading runs no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.records import NONE, SECTIONS, Records
from hyper_mpmd.tasks.graph import TaskGraph
from hyper_mpmd.tasks.tensor import Routing

if TYPE_CHECKING:
    from hyper_mpmd.scheduler.prove import Proof
    from hyper_mpmd.scheduler.simulate import Simulation
    from hyper_mpmd.scheduler.timeline import Timeline


class PlanHeader(BaseModel):
    """What a plan was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    graph: str  # the graph's own JSON
    loads: dict[str, list[list[int]]]
    device: Device
    policy: str
    rank: int
    ranks: int
    tiles: dict[str, tuple[int, int]]


class Plan:
    """One rank's plan. Made by `hm.compile` or read by `Plan.load`."""

    def __init__(self, header: PlanHeader, sections: Mapping[str, Records], graph: TaskGraph | None = None) -> None:
        self.header = header
        self._sections: dict[str, Records] = {}
        for name, dtype in SECTIONS.items():
            records = np.ascontiguousarray(sections[name], dtype=dtype)
            records.flags.writeable = False
            self._sections[name] = records
        if graph is not None:
            self.__dict__["graph"] = graph

    # ---- reading -------------------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> TaskGraph:
        """The graph that the plan was made from."""
        return TaskGraph.from_json(self.header.graph)

    @property
    def device(self) -> Device:
        return self.header.device

    @property
    def policy(self) -> str:
        return self.header.policy

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def ranks(self) -> int:
        return self.header.ranks

    @property
    def sections(self) -> dict[str, Records]:
        """The records by section name; see `hyper_mpmd.scheduler.records`. Read-only arrays."""
        return dict(self._sections)

    @property
    def tasks(self) -> Records:
        return self._sections["tasks"]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything in the plan, the same on every machine and in every format (hexadecimal)."""
        digest = hashlib.sha256(self.header.model_dump_json().encode())
        for name, records in self._sections.items():
            digest.update(f"{name}:{len(records)};".encode())
            digest.update(records.tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def __reduce__(self) -> tuple[Any, ...]:
        """For copy and pickle: header and records, not what the engine made of them."""
        return Plan, (self.header, self._sections)

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    def __repr__(self) -> str:
        world = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        return (
            f"Plan({self.graph.name!r}, {self.device.name}, {self.policy}{world}: {len(self.tasks)} tasks, "
            f"{len(self._sections['events'])} events, {len(self._sections['queues'])} queues)"
        )

    @cached_property
    def op_names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.graph.nodes)

    def task_name(self, index: int) -> str:
        """The name people see: op, expert (where the op is cut by group), tile, and where rows go or come from."""
        task = self.tasks[index]
        if not self.graph.nodes:
            return f"task {index}"  # a program without a graph
        node = self.graph.nodes[int(task["op"])]
        group = f".e{task['group']}" if node.op.rule.by_group else ""
        routing = node.op.routing()
        arrow = "<-" if routing is not None and Routing(*routing).mode == "pull" else "->"
        target = f"{arrow}r{task['peer']}" if int(task["peer"]) != self.rank else ""
        return f"{node.name}{group}.t{task['number']}{target}"

    def core_name(self, queue: int) -> str:
        """AIC 3, AIV 40, or core 1 where a core is both."""
        record = self._sections["queues"][queue]
        return f"{('AIC', 'AIV', 'core')[int(record['kind'])]} {record['core']}"

    @cached_property
    def queue_of(self) -> NDArray[np.int64]:
        """The queue of each task."""
        return np.repeat(np.arange(len(self._sections["queues"])), self._sections["queues"]["count"])

    @property
    def predicted_ns(self) -> int:
        """The makespan that the schedule predicts, nanoseconds."""
        return int(self.tasks["end_ns"].max(initial=0))

    def ops_with_tasks(self) -> list[int]:
        """Indices of the ops that have at least one task, in program order."""
        return [int(op) for op in np.unique(self.tasks["op"])]

    def launches_of_all_ops(self) -> bool:
        return len(self._sections["launches"]) == 1 and int(self._sections["launches"]["op"][0]) == NONE

    # ---- using ---------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """What is in the plan, for people: tasks by kind, events, queues, bytes, bounds, predicted makespan."""
        from hyper_mpmd.viz.report import report

        return report([self])

    def timeline(self) -> Timeline:
        """The predicted timeline."""
        from hyper_mpmd.scheduler.timeline import predicted

        return predicted([self])

    def check(self, backend: Literal["native", "python"] | None = None) -> Proof:
        """Prove that the plan cannot hang or race; see `hyper_mpmd.scheduler.prove.prove`. Of one rank of a world this
        proves what is local, and says so.

        Errors: SignalError, HangError, RaceError with the smallest counter-example; PlanFormatError.
        """
        from hyper_mpmd.scheduler.prove import prove

        return prove([self], backend)

    def simulate(
        self,
        *,
        seed: int = 0,
        jitter: float = 0.0,
        device: str | Device | None = None,
        backend: Literal["native", "python"] | None = None,
    ) -> Simulation:
        """Simulate the plan in virtual time on its device; see `hyper_mpmd.scheduler.simulate.simulate`.

        The graph must be one for one rank; a world has `World.simulate`.

        Errors: WorldSizeError, SimulationError, HangError, PlanFormatError.
        """
        from hyper_mpmd.scheduler.simulate import simulate

        return simulate([self], seed=seed, jitter=jitter, device=device, backend=backend)

    def run(
        self,
        *,
        engine: str = "native",
        workers: int | None = None,
        timeout: float | None = None,
        **tensors: Any,
    ) -> dict[str, Any]:
        """Run the plan on these inputs (torch tensors by name) and return its outputs (new torch tensors by name).

        engine: "native", or "reference" (plain torch, one op after another). workers: threads, by default as many as
        the plan's queues or this process's processors allow. timeout: seconds; None: HYPER_PARALLEL_SHMEM_TIMEOUT_SEC
        where that is set, else no deadline.
        Errors: MissingTensorError, ShapeError, DTypeError, DeviceMismatchError, StrideError before anything runs;
        TaskFailedError, LaunchTimeout, EngineError from the run.
        """
        from hyper_mpmd.engine.run import run

        return run([self], [tensors], engine=engine, workers=workers, timeout=timeout)[0]

    def run_measured(
        self, *, workers: int | None = None, timeout: float | None = None, **tensors: Any
    ) -> tuple[dict[str, Any], Timeline]:
        """`run`, and the measured timeline of it."""
        from hyper_mpmd.engine.run import run_measured

        outputs, timeline = run_measured([self], [tensors], workers=workers, timeout=timeout)
        return outputs[0], timeline

    def save(self, path: str | Path) -> None:
        """Write the plan: as JSON where the name ends in .json, else as a binary image."""
        from hyper_mpmd.scheduler.plan_file import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote, either form. Runs no code; PlanFormatError says what is wrong with a file."""
        from hyper_mpmd.scheduler.plan_file import load

        return load(Path(path))
