"""The prover held against the explorer: no harmful world accepted, no harmless one refused.

Worlds are compiled, Mixture-of-Experts or put together at random, most of them then changed in one or two things. Those
on which the two once disagreed stay here as tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_mpmd.errors import PlanFormatError, PlanUnsafe
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.prove import prove
from hyper_mpmd.testing.explore import Verdict, explore
from hyper_mpmd.testing.mutate import KINDS, mutate
from hyper_mpmd.testing.worlds import compiled_worlds, moe_world, random_world


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
