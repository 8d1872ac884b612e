"""Every order in which a small world can run: the judge that the prover is held against.

`explore` runs the plans of a world on paper, over two launches one after the other, in all ways in which their tasks
can start and end, and says whether it found harm. It shares no code with the prover, knows no happens-before, and is
only for worlds of a few dozen tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from hyper_mpmd.errors import PlanFormatError, PlanLimitError, UnknownBackendError
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import NONE, SECTIONS

Kind = Literal["sound", "hang", "race", "stale counter", "overflow", "not a proof"]
_KINDS: tuple[Kind, ...] = ("sound", "hang", "race", "stale counter", "overflow", "not a proof")
CAP = 1_000_000


class Step(NamedTuple):
    """A task that starts or ends: its rank, its number in the rank's plan, and in which launch (from 0).

    task: None for the host's part at the end of a launch, where it reads what peers wrote for the caller.
    """

    what: Literal["starts", "ends"]
    rank: int
    task: int | None
    launch: int


@dataclass(frozen=True)
class Verdict:
    """What `explore` found.

    kind: "sound"; or the harm: "hang", "race", "stale counter", "overflow" (a box leaves its tensor); or "not a proof":
    the cap was reached. reason: the harm in names. steps: what starts and ends, in this order, until the harm is there.
    states: how many were looked at.
    """

    kind: Kind
    reason: str
    steps: tuple[Step, ...]
    trace: tuple[str, ...]  # the steps in names
    states: int

    @property
    def harmful(self) -> bool:
        """Whether the world can come to harm. Errors: ValueError where that is not known."""
        if self.kind == "not a proof":
            raise ValueError(self.reason)
        return self.kind != "sound"

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.reason}", *(f"  {line}" for line in self.trace)])


def explore(
    plans: Sequence[Plan], *, launches: int = 2, cap: int = CAP, method: Literal["states", "pairs"] = "states"
) -> Verdict:
    """All that can happen in the world of these plans (ranks in order) over `launches` launches (1 to 8).

    Harm is looked for in this order: overflow, hang, stale counter, race; the first kind found is told. Two tasks race
    if they touch the same bytes, one of them writing, and can run at once or come in either order, in one launch or in
    two.

    method: "states" visits all reachable states breadth first, so that the way to a race is a shortest one; past `cap`
    states the verdict is "not a proof". "pairs" asks for each two tasks that touch the same bytes whether both can be
    running; it says the same (see native/src/explore.cpp), needs no cap, and its way to a race has no step to spare but
    need not be a shortest one.

    A million states take about two seconds and 50 MB.

    Errors: PlanFormatError for a plan whose records point past their sections, PlanLimitError for more than 4096 tasks,
    UnknownBackendError where the native code is not installed.
    """
    try:
        from hyper_mpmd._native import explore as native
    except ImportError as error:
        raise UnknownBackendError(f"the explorer is native code; build it with `make setup` ({error})") from error

    # Copied, because sections of a file lie at any address.
    sections = [[plan.sections[name].copy().view(np.uint8) for name in SECTIONS] for plan in plans]
    outputs = [sorted(map(list(plan.graph.tensors).index, set(plan.graph.outputs.values()))) for plan in plans]
    try:
        found = native.explore(sections, outputs, launches, cap, method == "pairs")
    except ValueError as error:
        raise PlanFormatError(str(error)) from None
    except RuntimeError as error:
        raise PlanLimitError(str(error)) from None
    kind = _KINDS[found["kind"]]
    names = _Names(plans)
    steps = [step for moment in found["ended"] for step in (_step("starts", moment), _step("ends", moment))]
    if kind == "race":
        steps.extend(_step("starts", moment) for clash in found["clashes"] for moment in clash[:2])
    return Verdict(
        kind=kind,
        reason=names.reason(kind, found, launches),
        steps=tuple(steps),
        trace=tuple(names.step(step) for step in steps),
        states=found["states"],
    )


def _step(what: Literal["starts", "ends"], moment: tuple[int, int, int]) -> Step:
    rank, task, launch = moment
    return Step(what, rank, None if task == NONE else task, launch)


class _Names:
    """Says what was found in the names that people gave."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans

    def task(self, rank: int, task: int) -> str:
        plan = self.plans[rank]
        where = f"rank {rank} " if len(self.plans) > 1 else ""
        return f"{where}{plan.core_name(int(plan.queue_of[task]))}: {plan.task_name(task)}"

    def moment(self, rank: int, task: int | None, launch: int) -> str:
        if task is None or task == NONE:
            return f"rank {rank}: end of launch {launch}"
        return f"{self.task(rank, task)} of launch {launch}"

    def step(self, step: Step) -> str:
        return f"{self.moment(step.rank, step.task, step.launch)} {step.what}"

    def event(self, rank: int, event: int) -> str:
        plan = self.plans[rank]
        record = plan.sections["events"][event]
        if record["op"] == NONE:
            return f"the credit of rank {record['signaller']}"
        source = f" of rank {record['signaller']}" if record["slot"] != NONE else ""
        return f"event {event} ({plan.op_names[record['op']]}{source})"

    def box(self, moment: tuple[int, int, int], access: int) -> str:
        rank, task, _ = moment
        plan = self.plans[rank]
        if task == NONE:
            return f"output {list(plan.graph.tensors)[access]} of rank {rank}"
        box = plan.sections["accesses"][access]
        where = f" of rank {box['rank']}" if len(self.plans) > 1 else ""
        rows, cols = (f"{box[a]}..{int(box[a]) + int(box[n])}" for a, n in (("row", "rows"), ("col", "cols")))
        return f"{list(plan.graph.tensors)[box['tensor']]}[{rows}, {cols}]{where}"

    def stuck(self, stuck: tuple[Any, ...]) -> str:
        moment, event, launch, have, need = stuck
        rank = moment[0]
        if event != NONE:
            lacks = f"waits for {self.event(rank, event)}: have {_signed(have)}, need {need}"
        elif launch != NONE:
            op = self.plans[rank].sections["launches"]["op"][launch]
            lacks = f"waits for the launch of {self.plans[rank].op_names[op]}: {_signed(have)} of {need} tasks ended"
        else:
            lacks = "waits for all tasks to end"
        return f"{self.moment(*moment)} {lacks}"

    def stale(self, stale: tuple[Any, ...]) -> str:
        rank, event, word, have, need = stale
        where = f"rank {rank}: " if len(self.plans) > 1 else ""
        name = self.event(rank, event) if event != NONE else f"word {word}, which no event counts,"
        return f"{where}{name} gets {have} signals a launch, its base grows by {need}"

    def reason(self, kind: Kind, found: Any, launches: int) -> str:
        if kind == "sound":
            return f"no harm in any order over {launches} launches"
        if kind == "not a proof":
            return f"gave up after {found['states']} states"
        if kind == "hang":
            tasks = [stuck for stuck in found["stuck"] if stuck[1] != NONE or stuck[2] != NONE]
            return "; ".join(map(self.stuck, tasks or found["stuck"]))
        if kind == "stale counter":
            return "; ".join(self.stale(stale) for stale in found["stale"])
        first, second, first_box, second_box = found["clashes"][0]
        if kind == "overflow":
            return f"{self.task(*first[:2])} touches {self.box(first, first_box)}, which leaves its tensor"
        return (
            f"{self.moment(*first)} and {self.moment(*second)} can run at once and touch the same bytes: "
            f"{self.box(first, first_box)} and {self.box(second, second_box)}"
        )


def _signed(counter: int) -> int:
    return counter - (1 << 32) if counter >= 1 << 31 else counter
