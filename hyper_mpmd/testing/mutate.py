"""Mutants: plans with one thing changed that a planner, a file or a person could get wrong.

Most are harmful, some are not (a wait that the order of a queue implies is no loss); which, says
`hyper_mpmd.testing.explore`. A prover must refuse the former and only them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.testing.draft import Draft, DraftQueue, DraftTask, drafts

T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    """The plans of a world, changed. kind: one of KINDS; what: the change, in names."""

    plans: tuple[Plan, ...]
    kind: str
    what: str


class _NoPlace(Exception):
    """The world has nothing that this change could be made to."""


class _World:
    """The drafts of a world, a source of chance, and names as they were before the change."""

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        self.drafts = drafts(plans)
        self.random = random.Random(seed)
        self._where = ["" if len(plans) == 1 else f"rank {plan.rank}: " for plan in plans]
        self._names = {
            id(task): self._where[plan.rank] + plan.task_name(number)
            for plan, draft in zip(plans, self.drafts, strict=True)
            for number, task in enumerate(draft.tasks())
        }

    def pick(self, found: Sequence[T]) -> T:
        if not found:
            raise _NoPlace
        return self.random.choice(found)

    def task(self, fits: Callable[[DraftTask], object] = lambda task: True) -> tuple[Draft, DraftTask]:
        """A random task that fits, with its draft."""
        return self.pick([(draft, task) for draft in self.drafts for task in draft.tasks() if fits(task)])

    def name(self, task: DraftTask) -> str:
        return self._names[id(task)]

    def event(self, draft: Draft, number: int) -> str:
        record = draft.events[number]
        if record["op"] == R.NONE:
            return f"the credit of rank {record['signaller']}"
        return f"event {number} ({draft.graph.nodes[int(record['op'])].name})"

    def signal(self, draft: Draft, signal: list[int]) -> str:
        rank, event = signal
        return self.event(draft, event) if rank == draft.rank else f"word {event} of rank {rank}"

    def tensor(self, draft: Draft, number: int) -> str:
        return self._where[draft.rank] + list(draft.graph.tensors)[number]

    def core(self, draft: Draft, queue: DraftQueue) -> str:
        return f"{self._where[draft.rank]}{('AIC', 'AIV', 'core')[queue.kind]} {queue.core}"


# Each of these changes one thing in the drafts and says what, or raises _NoPlace.


def _drop_signal(world: _World) -> str:
    draft, task = world.task(lambda task: task.signals)
    signal = task.signals.pop(world.random.randrange(len(task.signals)))
    return f"{world.name(task)} no longer signals {world.signal(draft, signal)}"


def _drop_signal_and_count(world: _World) -> str:
    """With the event's threshold and what is waited for: counters stay right, an order is lost."""
    draft, task = world.task(lambda task: task.signals)
    signal = task.signals.pop(world.random.randrange(len(task.signals)))
    _count(world, draft.rank, signal, -1)
    return f"{world.name(task)} no longer signals {world.signal(draft, signal)}, nor is it waited for"


def _add_signal(world: _World) -> str:
    draft, task, signal = _new_signal(world)
    task.signals.insert(world.random.randint(0, len(task.signals)), signal)
    return f"{world.name(task)} signals {world.signal(draft, signal)} as well"


def _add_signal_and_count(world: _World) -> str:
    draft, task, signal = _new_signal(world)
    task.signals.append(signal)
    _count(world, draft.rank, signal, +1)
    return f"{world.name(task)} signals {world.signal(draft, signal)} as well, and is waited for"


def _move_signal(world: _World) -> str:
    draft, task = world.task(lambda task: task.signals)
    other = world.pick([other for other in draft.tasks() if other is not task])
    signal = task.signals.pop(world.random.randrange(len(task.signals)))
    other.signals.append(signal)
    return f"{world.name(other)} signals {world.signal(draft, signal)} instead of {world.name(task)}"


def _redirect_signal(world: _World) -> str:
    draft, task = world.task(lambda task: task.signals)
    place = world.random.randrange(len(task.signals))
    before, (_, _, after) = task.signals[place], _new_signal(world, draft)
    if before == after:
        raise _NoPlace
    task.signals[place] = after
    return f"{world.name(task)} signals {world.signal(draft, after)} instead of {world.signal(draft, before)}"


def _drop_wait(world: _World) -> str:
    draft, task = world.task(lambda task: task.waits)
    event, _ = task.waits.pop(world.random.randrange(len(task.waits)))
    return f"{world.name(task)} no longer waits for {world.event(draft, event)}"


def _add_wait(world: _World) -> str:
    draft, task = world.task()
    event = world.pick(range(len(draft.events)))
    threshold = 0 if draft.events["op"][event] == R.NONE else int(draft.events["threshold"][event])
    task.waits.append([event, threshold])
    return f"{world.name(task)} waits for {world.event(draft, event)} as well"


def _move_wait(world: _World) -> str:
    draft, task = world.task(lambda task: task.waits)
    other = world.pick([other for other in draft.tasks() if other is not task])
    wait = task.waits.pop(world.random.randrange(len(task.waits)))
    other.waits.append(wait)
    return f"{world.name(other)} waits for {world.event(draft, wait[0])} instead of {world.name(task)}"


def _swap_waits(world: _World) -> str:
    draft, task = world.task(lambda task: task.waits)
    other = world.pick([other for other in draft.tasks() if other is not task and other.waits])
    i, j = world.random.randrange(len(task.waits)), world.random.randrange(len(other.waits))
    task.waits[i], other.waits[j] = other.waits[j], task.waits[i]
    first, second = (world.event(draft, wait[0]) for wait in (other.waits[j], task.waits[i]))
    return f"{world.name(task)} and {world.name(other)} swap their waits for {first} and {second}"


def _change_wait_threshold(world: _World) -> str:
    draft, task = world.task(lambda task: task.waits)
    wait = world.pick(task.waits)
    before = wait[1]
    wait[1] = world.pick([n for n in (0, before - 1, before + 1) if n >= 0 and n != before])
    return f"{world.name(task)} waits for {wait[1]} signals of {world.event(draft, wait[0])} instead of {before}"


def _change_event_threshold(world: _World) -> str:
    draft = world.pick([draft for draft in world.drafts if len(draft.events)])
    event = world.random.randrange(len(draft.events))
    before = int(draft.events["threshold"][event])
    after = world.pick([n for n in (before - 1, before + 1) if n >= 0])
    draft.events["threshold"][event] = after
    return f"rank {draft.rank}: {world.event(draft, event)} counts {after} signals a launch instead of {before}"


def _swap_queue_entries(world: _World) -> str:
    queue = world.pick([queue for draft in world.drafts for queue in draft.queues if len(queue.tasks) > 1])
    i = world.random.randrange(len(queue.tasks) - 1)
    j = i + 1 if world.random.random() < 0.7 else world.random.randrange(i + 1, len(queue.tasks))
    queue.tasks[i], queue.tasks[j] = queue.tasks[j], queue.tasks[i]
    return f"{world.name(queue.tasks[i])} comes before {world.name(queue.tasks[j])} on its core"


def _move_task(world: _World) -> str:
    found = [
        (draft, queue, other)
        for draft in world.drafts
        for queue in draft.queues
        for other in draft.queues
        if queue.tasks and queue is not other and queue.kind == other.kind
    ]
    draft, queue, other = world.pick(found)
    task = queue.tasks.pop(world.random.randrange(len(queue.tasks)))
    place = world.random.randint(0, len(other.tasks))
    other.tasks.insert(place, task)
    return f"{world.name(task)} runs on {world.core(draft, other)}, as number {place}, instead of core {queue.core}"


def _shrink_tensor(world: _World) -> str:
    draft = world.pick([draft for draft in world.drafts if (draft.tensors["rows"] > 0).any()])
    tensor = world.pick(np.flatnonzero(draft.tensors["rows"] > 0).tolist())
    rows = int(draft.tensors["rows"][tensor])
    fewer = world.random.randrange(rows)
    same = draft.tensors["storage"] == draft.tensors["storage"][tensor]
    # Other ranks keep room for what they put here, so that only this rank's tensor is too small.
    draft.tensors["rows"][same] = fewer
    if draft.tensors["role"][tensor] != R.ROLES["symmetric"]:
        draft.tensors["most_rows"][same] = fewer
    return f"{world.tensor(draft, tensor)} has {fewer} rows instead of {rows}"


def _alias_tensors(world: _World) -> str:
    """A tensor of the workspace, or one that peers write, is moved into the bytes of another."""
    found = [
        (draft, role, a, b)
        for draft in world.drafts
        for role in (R.ROLES["workspace"], R.ROLES["symmetric"])
        for a in np.flatnonzero(draft.tensors["role"] == role).tolist()
        for b in np.flatnonzero(draft.tensors["role"] == role).tolist()
        if draft.tensors["storage"][a] != draft.tensors["storage"][b]
    ]
    draft, role, moved, onto = world.pick(found)
    offset = int(draft.tensors["offset"][onto]) + R.ALIGNMENT * world.random.choice((0, 0, 1, 2))
    # What peers write lies at the same place on all ranks.
    for each in world.drafts if role == R.ROLES["symmetric"] else [draft]:
        each.tensors["offset"][each.tensors["storage"] == each.tensors["storage"][moved]] = offset
    return f"{world.tensor(draft, moved)} lies at byte {offset}, where {world.tensor(draft, onto)} is"


def _drop_credit(world: _World) -> str:
    found = [
        (draft, task, wait)
        for draft in world.drafts
        for task in draft.tasks()
        for wait in task.waits
        if draft.events["op"][wait[0]] == R.NONE
    ]
    draft, task, wait = world.pick(found)
    task.waits.remove(wait)
    return f"{world.name(task)} no longer waits for {world.event(draft, wait[0])}"


def _drop_credits_of_peer(world: _World) -> str:
    """No task of the rank waits for this peer's credit any more."""
    found = [
        (draft, event)
        for draft in world.drafts
        for event in np.flatnonzero(draft.events["op"] == R.NONE).tolist()
        if any(wait[0] == event for task in draft.tasks() for wait in task.waits)
    ]
    draft, event = world.pick(found)
    for task in draft.tasks():
        task.waits = [wait for wait in task.waits if wait[0] != event]
    return f"rank {draft.rank} no longer waits for {world.event(draft, event)}"


def _misplace_credit(world: _World) -> str:
    """A rank gives its credit in another word of the peer's heap than the one that the peer looks at."""
    found = [
        (draft, peer)
        for draft in world.drafts
        for peer in range(len(world.drafts))
        if peer != draft.rank and draft.peers["heap_words"][peer] > 1
    ]
    draft, peer = world.pick(found)
    before, words = int(draft.peers["credit_slot"][peer]), int(draft.peers["heap_words"][peer])
    after = (before + world.random.randrange(1, words)) % words
    draft.peers["credit_slot"][peer] = after
    return f"rank {draft.rank} gives its credit in word {after} of rank {peer} instead of word {before}"


def _drop_launch_edge(world: _World) -> str:
    found = [(draft, launch) for draft in world.drafts for launch in draft.launches if launch.dependencies]
    draft, launch = world.pick(found)
    before = launch.dependencies.pop(world.random.randrange(len(launch.dependencies)))
    ops = [draft.graph.nodes[op].name for op in (launch.op, draft.launches[before].op)]
    return f"rank {draft.rank}: launch {ops[0]} no longer waits for launch {ops[1]}"


def _add_launch_edge(world: _World) -> str:
    found = [
        (draft, number, before)
        for draft in world.drafts
        for number, launch in enumerate(draft.launches)
        for before in range(number)
        if before not in launch.dependencies
    ]
    draft, number, before = world.pick(found)
    draft.launches[number].dependencies.append(before)
    ops = [draft.graph.nodes[draft.launches[launch].op].name for launch in (number, before)]
    return f"rank {draft.rank}: launch {ops[0]} waits for launch {ops[1]} as well"


def _new_signal(world: _World, draft: Draft | None = None) -> tuple[Draft, DraftTask, list[int]]:
    """A random task, and a signal that it could give: to an event of its rank, or to one that its rank signals."""
    each, task = world.task(lambda task: draft is None or task in draft.tasks())
    signals = [[each.rank, event] for event in np.flatnonzero(each.events["slot"] == R.NONE).tolist()]
    signals += [signal for other in each.tasks() for signal in other.signals if signal[0] != each.rank]
    return each, task, world.pick(signals)


def _count(world: _World, rank: int, signal: list[int], by: int) -> None:
    """The event that the signal reaches counts `by` more, and so does whoever waits for it."""
    draft = world.drafts[signal[0]]
    if signal[0] == rank:
        event = signal[1]
    else:
        event = int(world.pick(np.flatnonzero(draft.events["slot"] == signal[1]).tolist()))
    draft.events["threshold"][event] = max(0, int(draft.events["threshold"][event]) + by)
    for task in draft.tasks():
        for wait in task.waits:
            if wait[0] == event:
                wait[1] = max(0, wait[1] + by)


_CHANGES: dict[str, Callable[[_World], str]] = {
    "drop signal": _drop_signal,
    "drop signal and its count": _drop_signal_and_count,
    "add signal": _add_signal,
    "add signal and its count": _add_signal_and_count,
    "move signal": _move_signal,
    "redirect signal": _redirect_signal,
    "drop wait": _drop_wait,
    "add wait": _add_wait,
    "move wait": _move_wait,
    "swap waits": _swap_waits,
    "change threshold of wait": _change_wait_threshold,
    "change threshold of event": _change_event_threshold,
    "swap queue entries": _swap_queue_entries,
    "move task": _move_task,
    "shrink tensor": _shrink_tensor,
    "alias tensors": _alias_tensors,
    "drop credit": _drop_credit,
    "drop credits of peer": _drop_credits_of_peer,
    "misplace credit": _misplace_credit,
    "drop launch edge": _drop_launch_edge,
    "add launch edge": _add_launch_edge,
}
KINDS = tuple(_CHANGES)


def mutate(plans: Sequence[Plan], seed: int, kind: str | None = None) -> Mutant | None:
    """A mutant of the plans of a world (ranks in order), the same for the same seed.

    kind: one of KINDS; None for a random one that the world has a place for. Returns None where it has none, or where
    the change came to nothing: two equal waits swapped, say.
    """
    kinds = [kind] if kind is not None else random.Random(seed).sample(KINDS, len(KINDS))
    for each in kinds:
        world = _World(plans, seed)
        try:
            what = _CHANGES[each](world)
        except _NoPlace:
            continue
        made = tuple(draft.plan() for draft in world.drafts)
        if any(_differ(*pair) for pair in zip(plans, made, strict=True)):
            return Mutant(made, each, what)
    return None


def _differ(plan: Plan, other: Plan) -> bool:
    return any(not np.array_equal(records, other.sections[name]) for name, records in plan.sections.items())
