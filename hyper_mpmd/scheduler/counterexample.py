"""Counter-examples in the names that people gave: what a prover found, as an error to read and as data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_mpmd.errors import HangError, PlanUnsafe, RaceError, SignalError
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import Access, Finding, Race, Signal, Standing
from hyper_mpmd.scheduler.records import NONE

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def unsafe(plans: Sequence[Plan], finding: Finding) -> PlanUnsafe:
    """The error that tells the finding."""
    names = Names(plans)
    if finding.hops:
        return HangError(
            f"rank {plans[0].rank}'s plan has no certificate ({finding.hops}): a circle may cross ranks; prove the "
            "whole world to see",
            {"kind": "hops", "text": finding.hops},
        )
    if finding.signal is not None:
        return SignalError(names.signal(finding.signal), {"kind": "signal", **finding.signal._asdict()})
    if finding.circle:
        return HangError(names.circle(finding.circle), {"kind": "hang", "circle": names.circle_data(finding.circle)})
    assert finding.race is not None
    race = _writer_first(finding.race)
    return RaceError(names.race(race), {"kind": "race", **names.race_data(race)})


def _writer_first(race: Race) -> Race:
    """Of two accesses without order, the one that writes is told first where the box is the same for both."""
    if race.next_launch or race.first.written or race.first.tensor != race.second.tensor:
        return race
    return race._replace(first=race.second, second=race.first)


class Names:
    """Names of tasks, cores and events, with the rank before them where there is more than one."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = {plan.rank: plan for plan in plans}
        self.several = plans[0].ranks > 1

    def rank(self, rank: int) -> str:
        return f"rank {rank} " if self.several else ""

    def task(self, rank: int, task: int, seen_from: int | None = None) -> str:
        """seen_from: a rank that needs no telling. task: NONE for the host at the end of a launch."""
        if task == NONE:
            return f"the host of rank {rank}"
        return f"{'' if rank == seen_from else self.rank(rank)}{self.plans[rank].task_name(task)}"

    def core(self, rank: int, task: int) -> str:
        if task == NONE:
            return "host"
        plan = self.plans[rank]
        return plan.core_name(int(plan.queue_of[task]))

    def event(self, rank: int, event: int) -> str:
        plan = self.plans[rank]
        record = plan.sections["events"][event]
        if int(record["slot"]) != NONE and int(record["op"]) == NONE:
            return f"the credit of rank {record['signaller']}"
        tensors = list(plan.graph.tensors)
        if int(record["tensor"]) >= len(tensors):
            return f"event {event}"
        box = tuple(int(record[name]) for name in ("row", "rows", "col", "cols"))
        source = f" from rank {record['signaller']}" if int(record["slot"]) != NONE else ""
        return f"{_box(*box)} of {tensors[int(record['tensor'])]!r}{source}"

    def signal(self, found: Signal) -> str:
        """Why an event does not add up."""
        if found.why == "uncounted":
            who = f"the credit of rank {found.task_rank}"
            if found.task != NONE:
                who = self.task(found.task_rank, found.task)
            return f"{who} raises word {found.event} of rank {found.rank}, which no event of rank {found.rank} counts"
        what = f"{self.rank(found.rank)}event {found.event} ({self.event(found.rank, found.event)})"
        if found.why == "count":
            cause = "a wait for all of them never ends" if found.have < found.need else "the next launch miscounts"
            return f"{what} has {found.have} signal(s), its threshold is {found.need}: {cause}"
        if found.why == "shared":
            return f"{what} counts the same word of the heap as event {found.have}: signals would count twice"
        who = self.task(found.task_rank, found.task)
        if found.why == "too much":
            return f"{who} waits until {what} has {found.need} signals, a launch gives {found.have}: it never starts"
        return f"{who} waits for {what} of its own launch, which comes when that has ended: it never starts"

    def circle(self, circle: Sequence[Standing]) -> str:
        """Who waits for whom."""
        return "; ".join(map(self._standing, circle))

    def _standing(self, step: Standing) -> str:
        core = self.core(step.rank, step.task)
        due = self.task(step.signaller_rank, step.signaller, step.rank)
        on = self.core(step.signaller_rank, step.signaller)
        head = f"{self.rank(step.rank)}{core} stands at {self.task(step.rank, step.task, step.rank)}, which waits for "
        if step.signaller_rank == step.rank and on == core and step.signaller > step.task:
            where = f"queued behind it on {on}"
        elif (step.signaller_rank, step.signaller) == (step.rank, step.task):
            where = "the same task"
        else:
            where = f"on {on}"
        if step.event == NONE:
            return f"{head}its launch, and that for the end of {due}, {where}"
        counts = f"(have {step.have}, need {step.need})"
        missing = f"the {_ordinal(step.have + 1)} signal"
        return f"{head}{self.event(step.rank, step.event)} {counts}; {missing} is {due}, {where}"

    def circle_data(self, circle: Sequence[Standing]) -> list[dict[str, Any]]:
        return [
            {
                "rank": step.rank,
                "core": self.plans[step.rank].core_name(step.queue),
                "task": self.plans[step.rank].task_name(step.task),
                "event": None if step.event == NONE else step.event,
                "have": step.have,
                "need": step.need,
                "signaller_rank": step.signaller_rank,
                "signaller": self.plans[step.signaller_rank].task_name(step.signaller),
            }
            for step in circle
        ]

    def race(self, race: Race) -> str:
        """Who touches what, and that nothing orders them."""
        box = _box(race.row, race.rows, race.col, race.cols)
        tensor = self._tensor(race.second)
        other = self._tensor(race.first)
        shared = "" if other == tensor else f" (the memory of {other!r})"
        place = f"{box} of {self.rank(race.memory_rank)}{tensor!r}{shared}"
        why = "no queue, wait or launch orders them"
        later = ""
        if race.next_launch:
            later = " in the next launch"
            why = (
                f"it waits for no credit of rank {race.memory_rank}"
                if race.second.rank != race.memory_rank
                else "nothing shows that it has arrived"
            )
        return (
            f"{self._access(race.first)} {place}, and {self._access(race.second)} it{later}: {why}, so they may run in "
            "either order or at once"
        )

    def race_data(self, race: Race) -> dict[str, Any]:
        def access(found: Access) -> dict[str, Any]:
            return {
                "rank": found.rank,
                "core": self.core(found.rank, found.task),
                "task": None if found.task == NONE else self.plans[found.rank].task_name(found.task),
                "tensor": self._tensor(found),
                "written": found.written,
            }

        return {**race._asdict(), "first": access(race.first), "second": access(race.second)}

    def _access(self, found: Access) -> str:
        verb = "writes" if found.written else "reads"
        if found.task == NONE:
            return f"{self.task(found.rank, NONE)}, which hands it to the caller when the launch has ended, {verb}"
        return f"{self.task(found.rank, found.task)} on {self.core(found.rank, found.task)} {verb}"

    def _tensor(self, found: Access) -> str:
        return list(self.plans[found.rank].graph.tensors)[found.tensor]


def _box(row: int, rows: int, col: int, cols: int) -> str:
    return f"rows {row}-{row + rows - 1}, columns {col}-{col + cols - 1}"


def _ordinal(number: int) -> str:
    if number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
