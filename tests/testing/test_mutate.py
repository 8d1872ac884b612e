"""Mutants differ from their world in one thing, harmfully or not; the harmless ones run as well as their world."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_mpmd.engine import run as engine
from hyper_mpmd.errors import LaunchTimeout, PlanFormatError
from hyper_mpmd.scheduler.world import World
from hyper_mpmd.testing.explore import explore
from hyper_mpmd.testing.graphs import inputs_for
from hyper_mpmd.testing.mutate import KINDS, mutate
from hyper_mpmd.testing.worlds import compiled_worlds, moe_world


def mutants(kind, count):
    """Of that kind, each of another world."""
    found = []
    for seed in range(count):
        plans = moe_world(seed)
        mutant = mutate(plans, seed, kind)
        if mutant is not None:
            assert mutant.plans != plans
            found.append(mutant)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_change_has_a_place_and_makes_another_world(kind):
    made = mutants(kind, 40)
    assert len(made) >= 5
    assert all(mutant.kind == kind and mutant.what for mutant in made)
    assert any(explore(mutant.plans, method="pairs").harmful for mutant in made) == (kind != "add launch edge")


def test_a_seed_gives_the_same_mutant_and_leaves_the_world_alone():
    plans = moe_world(7)
    before = [plan.hash for plan in plans]
    first, second = mutate(plans, 3), mutate(plans, 3)
    assert first == second
    assert [plan.hash for plan in plans] == before
    assert {mutate(plans, seed).what for seed in range(50)} > {first.what}


def test_both_harmful_and_harmless_mutants_are_common():
    found = Counter(explore(mutate(moe_world(seed % 30), seed).plans, method="pairs").harmful for seed in range(300))
    assert min(found.values()) > 60


def engine_says(plans, inputs, timeout):
    """What becomes of two launches of a world: "done", "hang" or "refused"."""
    try:
        world = World(plans)
        for _ in range(2):
            world.run(inputs, timeout=timeout)
    except LaunchTimeout:
        return "hang"
    except PlanFormatError:
        return "refused"
    return "done"


def test_the_engine_hangs_on_those_that_are_said_to_hang_and_on_no_others(monkeypatch):
    # The engine takes no plan that is not proven. Here it has to, as far as its own checks let it.
    monkeypatch.setattr(engine, "require_proof", lambda plans: None)
    monkeypatch.setattr(engine, "proof_of", lambda plans: SimpleNamespace(world=True))
    found = Counter()
    for seed in range(250):
        plans = moe_world(seed)
        inputs = inputs_for(plans[0].graph, plans[0].header.loads, seed=0)
        mutant = mutate(plans, seed)
        if inputs is None or mutant.kind in ("shrink tensor", "alias tensors"):
            continue
        verdict = explore(mutant.plans, method="pairs")
        said = engine_says(mutant.plans, inputs, timeout=0.2 if verdict.kind == "hang" else 60)
        found[verdict.kind, said] += 1
        if verdict.kind == "hang":
            assert said != "done", f"{mutant.what}\n{verdict}"
        else:
            assert said != "hang", f"{mutant.what}\n{verdict}"
        if verdict.kind == "sound":
            assert said == "done", mutant.what
    assert min(found["hang", "hang"], found["sound", "done"], found["race", "done"]) > 2


@given(plans=compiled_worlds(), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_harmless_mutant_runs_to_the_same_bits(plans, seed):
    graph, loads = plans[0].graph, plans[0].header.loads
    inputs = inputs_for(graph, loads, seed=0)
    mutant = mutate(plans, seed)
    if inputs is None or mutant is None or mutant.kind in ("shrink tensor", "alias tensors"):
        return  # a tensor of another size takes other inputs
    if explore(mutant.plans, method="pairs").harmful:
        return
    wanted, found = (World(each).run(inputs, timeout=20) for each in (plans, mutant.plans))
    for own, other in zip(wanted, found, strict=True):
        for name, tensor in own.items():
            assert torch.equal(tensor.nan_to_num(), other[name].nan_to_num()), (mutant.what, name)
