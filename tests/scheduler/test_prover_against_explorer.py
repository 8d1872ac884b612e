"""The prover held against the explorer: no harmful world accepted, no harmless one refused.

Worlds are compiled, Mixture-of-Experts or put together at random, most of them then changed in one or two things. Those
on which the two once disagreed stay here as tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hyper_mpmd._native.prover import certificate
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.errors import PlanFormatError, PlanUnsafe
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import native_sections, prove
from hyper_mpmd.testing.draft import Draft, DraftQueue, DraftTask, drafts
from hyper_mpmd.testing.explore import Verdict, explore
from hyper_mpmd.testing.mutate import KINDS, mutate
from hyper_mpmd.testing.sample_ops import Copy
from hyper_mpmd.testing.worlds import TINY, compiled_worlds, moe_world, random_world


@dataclass(frozen=True)
class Case:
    """A world, and how it was changed."""

    plans: tuple[Plan, ...]
    kind: str
    what: str


def case_of(seed: int) -> Case:
    """In turn: a world put together at random, one with a change, a sound world with a change, one with two."""
    source = seed % 4
    plans, kind, what = (moe_world if source >= 2 else random_world)(seed), "as it is", ""
    for change in range((0, 1, 1, 2)[source]):
        mutant = mutate(plans, seed + change)
        if mutant is not None:
            plans, kind, what = mutant.plans, "two changes" if change else mutant.kind, f"{what}; {mutant.what}"
    return Case(plans, kind, what.lstrip("; "))


def explored(plans: tuple[Plan, ...]) -> Verdict:
    """By all states where they are few enough; the method of pairs says the same, and always comes to an end."""
    found, pairs = explore(plans, cap=20_000), explore(plans, method="pairs")
    assert found.kind in (pairs.kind, "not a proof")
    return pairs if found.kind == "not a proof" else found


def refusal(plans: tuple[Plan, ...], backend: Any = None) -> Exception | None:
    try:
        prove(plans, backend=backend)
    except (PlanUnsafe, PlanFormatError) as error:
        return error
    return None


def compare(seed: int, backend: Any = None) -> tuple[str, bool, bool]:
    """(kind of change, harmful, refused); fails where the two disagree."""
    case = case_of(seed)
    verdict, refused = explored(case.plans), refusal(case.plans, backend)
    assert verdict.harmful == (refused is not None), (
        f"seed {seed}, {case.kind}: {case.what}\nthe explorer says {verdict}\nthe prover says {refused or 'sound'}"
    )
    return case.kind, verdict.harmful, refused is not None


def print_matrix(found: Counter[tuple[str, bool, bool]]) -> None:
    print(f"\n{'change':28}{'harmful':>18}{'harmless':>20}")
    print(f"{'':28}{'refused':>9}{'accepted':>9}{'refused':>11}{'accepted':>9}")
    for kind in ("as it is", *KINDS, "two changes", "all"):
        cells = [
            sum(n for key, n in found.items() if kind in ("all", key[0]) and key[1:] == cell)
            for cell in ((True, True), (True, False), (False, True), (False, False))
        ]
        print(f"{kind:28}{cells[0]:9}{cells[1]:9}{cells[2]:11}{cells[3]:9}")


def test_prover_and_explorer_agree_on_random_worlds_and_mutants():
    found = Counter(compare(seed)[1:] for seed in range(600))
    assert min(found[True, True], found[False, False]) > 150


def test_the_slow_prover_agrees_with_the_explorer_as_well():
    found = Counter(compare(seed, "python")[1:] for seed in range(600, 720))
    assert min(found[True, True], found[False, False]) > 30


@pytest.mark.parametrize("kind", ["swap queue entries", "add wait", "move wait", "swap waits", "add launch edge"])
def test_a_world_whose_ranks_all_have_their_certificate_does_not_hang(kind):
    """As long as each rank signals its peers as they expect, which no rank can see alone."""
    hangs = 0
    for seed in range(300):
        mutant = mutate(moe_world(seed), seed, kind)
        if mutant is None:
            continue
        certified = not any(certificate((*native_sections(plan), [])) for plan in mutant.plans)
        hang = explored(mutant.plans).kind == "hang"
        assert not (certified and hang), mutant.what
        hangs += hang
    assert hangs > 20 or kind == "add launch edge"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prover_and_explorer_agree_on_twenty_thousand_worlds():
    found = Counter(compare(seed) for seed in range(1000, 21_000))
    print_matrix(found)
    kinds = Counter(kind for kind, _, _ in found.elements())
    assert sum(kinds.values()) - kinds["as it is"] >= 10_000
    assert all(kinds[kind] >= 20 for kind in KINDS)


@given(plans=compiled_worlds(), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_prover_and_explorer_agree_on_changes_to_random_graphs(plans, seed):
    assert refusal(plans) is None
    mutant = mutate(plans, seed)
    if mutant is not None:
        verdict, refused = explored(mutant.plans), refusal(mutant.plans)
        assert verdict.harmful == (refused is not None), f"{mutant.what}\n{verdict}\n{refused}"


# ---- where the two once disagreed --------------------------------------------------------------------------------


def both(made: list[Draft]) -> str:
    """The explorer's verdict on which both provers agree."""
    plans = tuple(draft.plan() for draft in made)
    verdict = explored(plans)
    for backend in ("native", "python"):
        refused = refusal(plans, backend)
        assert verdict.harmful == (refused is not None), f"{verdict}\n{backend}: {refused}"
    return verdict.kind


def some_signals(queued: str) -> Draft:
    """Two writers signal one event; the reader of the first's row waits for one signal."""
    graph = hm.TaskGraph("some")
    x = graph.input("x", (graph.rows("r"), 4))
    graph.output("y", graph.vector("b", Copy(), graph.vector("a", Copy(), x)))
    draft = Draft(hm.compile(graph, [8], device=TINY))
    draft.clear()
    event = draft.add_event(2)
    writers = [DraftTask(0, number, accesses=[[0, 0, number, 1, 0, 4], [1, 0, number, 1, 0, 4]]) for number in (0, 1)]
    for writer in writers:
        writer.signals.append([0, event])
    reader = DraftTask(1, accesses=[[1, 0, 0, 1, 0, 4], [2, 0, 0, 1, 0, 4]], waits=[[event, 1]])
    one, other = draft.queues[2].tasks, draft.queues[3].tasks
    if queued == "writers in one queue":
        one.extend(writers)
        other.append(reader)
    elif queued == "second writer behind the reader":
        one.append(writers[0])
        other.extend([reader, writers[1]])
    elif queued == "second writer behind what waits for the reader":
        done = draft.add_event(1, 1)
        reader.signals.append([0, done])
        between = DraftTask(0, 2, accesses=[[0, 0, 2, 1, 0, 4], [1, 0, 2, 1, 0, 4]], waits=[[done, 1]])
        one.append(reader)
        other.append(writers[0])
        draft.queues.append(DraftQueue(1, 2, [between, writers[1]]))
    else:
        one.append(writers[0])
        other.extend([writers[1], reader])
    return draft


@pytest.mark.parametrize(
    ("queued", "kind"),
    [
        ("writers in one queue", "sound"),
        ("second writer behind the reader", "sound"),
        ("second writer behind what waits for the reader", "sound"),
        ("a writer each queue", "race"),
    ],
)
def test_a_wait_for_some_signals_orders_what_they_cannot_come_without(queued, kind):
    """The prover took such a wait to order nothing, and refused sound worlds."""
    assert both([some_signals(queued)]) == kind


@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize("credit", [True, False])
def test_rows_put_for_the_caller_are_read_by_the_host_between_two_launches(output, credit):
    """The prover knew of tasks only, and accepted a put of the next launch into rows that the host still hands on."""
    graph = hm.TaskGraph("handed-on", ranks=2)
    x = graph.input("x", (graph.rows("r"), 4))
    put = graph.comm("put", hm.ops.Put(to="shift"), x)
    graph.output("y", put if output else graph.vector("b", Copy(), x))
    made = drafts(hm.compile(graph, [[2], [2]], world=2, device=TINY).plans)
    for task in made[0].tasks() if not credit else []:
        task.waits.clear()
    assert both(made) == ("sound" if credit or not output else "race")


def test_a_launch_ends_when_what_was_put_has_arrived_though_no_task_reads_it():
    """The prover took it to end with its tasks, and asked for credits where rows that come back say as much."""
    graph = hm.TaskGraph("back", ranks=2)
    x = graph.input("x", (graph.rows("r", groups=2), 4))
    there = graph.vector("a", Copy(), graph.comm("there", hm.ops.Dispatch(), x))
    graph.output("y", graph.comm("back", hm.ops.Combine(), there))
    made = drafts(hm.compile(graph, [[2, 2], [2, 2]], world=2, device=TINY).plans)
    assert both(made) == "sound"
    credits = [int(event) for event in range(len(made[0].events)) if made[0].events["op"][event] == R.NONE]
    for task in made[0].tasks():
        task.waits = [wait for wait in task.waits if wait[0] not in credits]
    assert both(made) == "sound"
