"""`prove`: shows that plans neither hang nor race over two successive launches, or raises the smallest counter-example.

What a proof rests on: a task starts when its queue's previous task has ended, its launch is open and its waits are met;
it touches its boxes from start to end; its signals land at its end. A launch of a rank ends when its tasks have and
what peers put there has arrived; then its host reads what they put for the caller, and gives credit.
Workers poll the queues they carry and never block on one, so that plans that run with a worker a queue run with any
number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from hyper_mpmd.errors import PlanFormatError, WorldSizeError
from hyper_mpmd.scheduler.backend import native_module
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import ROLES
from hyper_mpmd.tasks.graph import TaskGraph

# Where a plan remembers its proofs: alone, and with all plans of its world (one object for all of them).
_ALONE, _TOGETHER = "_proof_alone", "_proof_together"
_TRUSTED = "_made_here"

_SHOWN_ALWAYS = (
    "every box lies in its tensor, every index in its section",
    "every threshold is the number of its signals",
    "queues, waits and launches have no circle, for any number of workers",
    "any two tiles that touch the same bytes, one writing, are in order",
)
_SHOWN_OF_WORLD = ("what a rank writes for launch n + 1 comes after all use of it in launch n, on every rank",)
_SHOWN_OF_RANK = (
    "of this rank of a world what is local: what peers put is taken to arrive (prove the world for the rest)",
    "no circle crosses ranks, if all ranks' plans are made alike (certificate of hop levels)",
)


@dataclass(frozen=True)
class Proof:
    """A proof that went through. edges: queue order, waits, signals, launches. pairs: accesses whose order was looked
    at, which stand for all that overlap. bytes: most that the proof held at once, without the plans."""

    ranks: int  # whose plans were proven
    world: bool  # all ranks of their world; a plan for one rank is a world of its own
    queues: int
    tasks: int
    events: int
    edges: int
    boxes: int
    pairs: int
    seconds: float
    bytes: int
    shown: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class Signal(NamedTuple):
    """An event that does not add up; why: one of WHY."""

    why: str
    rank: int
    event: int  # "uncounted": the word of the rank's heap
    task_rank: int
    task: int
    have: int
    need: int


class Standing(NamedTuple):
    """A queue that stands at `task`; it lacks signals of `event` (NONE: launches that must end), among them the one of
    task `signaller`."""

    rank: int
    queue: int
    task: int
    event: int
    have: int
    need: int
    signaller_rank: int
    signaller: int


class Access(NamedTuple):
    """task: NONE for the host, which reads the tensor at the end of the launch."""

    rank: int
    task: int
    tensor: int
    written: bool


class Race(NamedTuple):
    """Two accesses without order; next_launch: the first in one launch, the second in the one after. The box is where
    they meet, in the second's tensor on memory_rank."""

    first: Access
    second: Access
    next_launch: bool
    memory_rank: int
    row: int
    rows: int
    col: int
    cols: int


class Finding(NamedTuple):
    """What a prover found: nothing, or the first of these that holds, in this order."""

    record: str = ""
    hops: str = ""  # what a rank's certificate lacks, where the other ranks are not there
    signal: Signal | None = None
    circle: tuple[Standing, ...] = ()
    race: Race | None = None
    counts: tuple[int, ...] = (0,) * 7  # queues, tasks, events, edges, boxes, pairs, bytes

    @property
    def unsafe(self) -> bool:
        return bool(self.record or self.signal or self.circle or self.race or self.hops)


def prove(plans: Sequence[Plan], backend: Literal["native", "python"] | None = None) -> Proof:
    """Prove one plan, or the plans of all ranks of a world in order of rank.

    backend: "native", or "python" (slow, compares everything with everything); by default native where installed.
    Errors: SignalError, HangError, RaceError with the smallest counter-example in names; PlanFormatError for records
    that cannot be read, WorldSizeError for some ranks of a world but not all.
    """
    members = list(plans)
    wanted = members[0].ranks if members else 1
    if len(members) not in (1, wanted) or (len(members) > 1 and [p.rank for p in members] != list(range(wanted))):
        ranks = ", ".join(str(plan.rank) for plan in members) or "none"
        raise WorldSizeError(f"a proof takes one plan, or those of all {wanted} ranks in order; got rank(s) {ranks}")
    begin = time.perf_counter()
    finding = _find(members, backend)
    world = len(members) == wanted
    if finding.record:
        raise PlanFormatError(f"the plan cannot be read: {finding.record}")
    if finding.unsafe:
        from hyper_mpmd.scheduler.counterexample import unsafe

        raise unsafe(members, finding)
    queues, tasks, events, edges, boxes, pairs, held = finding.counts
    proof = Proof(
        ranks=len(members),
        world=world,
        queues=queues,
        tasks=tasks,
        events=events,
        edges=edges,
        boxes=boxes,
        pairs=pairs,
        seconds=time.perf_counter() - begin,
        bytes=held,
        shown=_SHOWN_ALWAYS + (() if wanted == 1 else _SHOWN_OF_WORLD if world else _SHOWN_OF_RANK),
    )
    for plan in members:
        plan.__dict__[_TOGETHER if world else _ALONE] = proof
    return proof


def prove_native(plans: Sequence[Plan]) -> None:
    """`prove` where the native prover is installed; without it the plans stay unproven."""
    try:
        from hyper_mpmd._native import prover  # noqa: F401
    except ImportError:
        return
    prove(plans)


def trust(plan: Plan) -> None:
    """Let the engine take a plan that was made here with no more than its certificate."""
    plan.__dict__[_TRUSTED] = True


def require_proof(plans: Sequence[Plan]) -> None:
    """What an engine asks of a plan or a world before it takes it: proven before or now, unless made here and trusted.

    Errors: those of `prove`.
    """
    if proof_of(plans) is None and not all(plan.__dict__.get(_TRUSTED) for plan in plans):
        prove(plans)


def proof_of(plans: Sequence[Plan]) -> Proof | None:
    """The proof that all plans of a world went through together; of one rank's plan, with its world or else alone."""
    found: list[Proof | None] = [plan.__dict__.get(_TOGETHER) for plan in plans]
    if found[0] is not None and all(proof is found[0] for proof in found):
        return found[0]
    alone: Proof | None = plans[0].__dict__.get(_ALONE)
    return alone if len(plans) == 1 else None


def _find(plans: list[Plan], backend: Literal["native", "python"] | None) -> Finding:
    prover = native_module("prover", backend)
    if prover is not None:
        given = [(*native_sections(plan), host_reads(plan)) for plan in plans]
        finding = _from_native(prover.prove(given))
        if len(plans) < plans[0].ranks and not finding.unsafe:
            finding = finding._replace(hops=prover.certificate(given[0]))
        return finding
    from hyper_mpmd.scheduler.twin.prove import find

    return find(plans)


def host_reads(plan: Plan) -> list[int]:
    """The tensors that peers write and the caller gets, by number: the host reads them at the end of a launch."""
    symmetric = plan.sections["tensors"]["role"] == ROLES["symmetric"]
    if not symmetric.any():
        return []
    return [tensor for tensor in _outputs(plan.header.graph) if tensor < len(symmetric) and symmetric[tensor]]


@lru_cache(maxsize=64)
def _outputs(graph: str) -> list[int]:
    """The tensors that a graph's caller gets, by number. graph: its JSON."""
    read = TaskGraph.from_json(graph)
    names = set(read.outputs.values())
    return [number for number, name in enumerate(read.tensors) if name in names]


def native_sections(plan: Plan) -> tuple[dict[str, Any], int, int]:
    """The plan as the native prover takes it: (sections as bytes, rank, ranks)."""
    return {name: records.view(np.uint8) for name, records in plan.sections.items()}, plan.rank, plan.ranks


# native/include/hyper_mpmd/prove.h: Unsafe, SignalFault::Why
_NOTHING, _RECORD, _SIGNAL, _HANG, _RACE = range(5)
WHY = ("count", "uncounted", "shared", "too much", "own credit")


def _from_native(found: dict[str, Any]) -> Finding:
    kind, counts = found["unsafe"], tuple(found["counts"])
    if kind == _RECORD:
        return Finding(record=found["text"])
    if kind == _SIGNAL:
        why, *rest = found["signal"]
        return Finding(signal=Signal(WHY[why], *rest))
    if kind == _HANG:
        return Finding(circle=tuple(Standing(*step) for step in found["circle"]))
    if kind == _RACE:
        first, second, *rest = found["race"]
        return Finding(race=Race(Access(*first), Access(*second), *rest))
    return Finding(counts=counts)
