"""The native planner and its Python twin make the same records, whatever the graph, world, loads and device."""

from __future__ import annotations

import numpy as np
import pytest
from comparing import ALL_POLICIES, DEVICES, FREE, SMALL, assert_same_sections, cases
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.errors import CycleError
from hyper_mpmd.scheduler.backend import get_backend
from hyper_mpmd.scheduler.bounds import _graph, _longest_path, longest_path
from hyper_mpmd.scheduler.program import TileProgram

NATIVE, TWIN = get_backend("native"), get_backend("python")


@given(case=cases())
@settings(max_examples=200, deadline=None)
def test_random_graphs_worlds_and_loads_give_the_same_plans(case):
    native, twin = case.compile("native"), case.compile("python")
    for have, want in zip(native, twin, strict=True):
        assert have.header == want.header
        assert_same_sections(have.sections, want.sections)
        assert have == want
    assert longest_path(twin) == _longest_path(_graph(twin))


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=3000, deadline=None)
def test_many_more_random_graphs_give_the_same_plans(case):
    for have, want in zip(case.compile("native"), case.compile("python"), strict=True):
        assert_same_sections(have.sections, want.sections)


@given(case=cases(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_one_rank_planned_alone_is_the_same_as_planned_with_the_world(case, data):
    rank = data.draw(st.integers(0, case.graph.ranks - 1))
    options = {"device": case.device, "policy": case.policy, "tiles": case.tiles}
    alone = hm.compile(case.graph, case.loads, world=case.graph.ranks, rank=rank, **options)
    assert_same_sections(alone.sections, case.compile()[rank].sections)


@st.composite
def programs(draw):
    """Tasks that do nothing, ordered by random edges; several edges in and out, some tasks free."""
    count = draw(st.integers(1, 40))
    ends = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=80))
    costs = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    kinds = draw(st.one_of(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    return TileProgram.from_edges(costs, [(min(p), max(p)) for p in pairs if p[0] != p[1]], kinds)


@given(program=programs(), device=st.sampled_from([SMALL, FREE]), policy=st.sampled_from(ALL_POLICIES))
@settings(max_examples=80, deadline=None)
def test_hand_made_programs_are_scheduled_the_same(program, device, policy):
    outcomes = []
    for backend in (NATIVE, TWIN):
        try:
            outcomes.append(backend.schedule(program, device, policy))
        except CycleError as error:
            outcomes.append(str(error))
    if isinstance(outcomes[0], str):
        assert outcomes[0] == outcomes[1]
        assert policy.partition("-")[0] != "O1" or "no-interleave" in policy
    else:
        assert_same_sections(*outcomes)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_lowered_programs_are_the_same_before_they_are_scheduled(device):
    from hyper_mpmd.scheduler.descriptor import describe
    from hyper_mpmd.scheduler.device import get_device

    graph = hm.TaskGraph("g", ranks=2)
    rows = graph.rows("tokens", groups=4)
    x = graph.comm("send", hm.ops.Dispatch(), graph.input("x", (rows, 64)))
    graph.output("y", graph.cube("up", hm.ops.GroupedMatmul(), x, graph.input("w", (2, 64, 96))))
    loads = {0: np.array([[5, 0, 17, 40], [9, 1, 0, 33]])}
    arguments = (describe(graph), loads, get_device(device), [0, 1], {})
    for have, want in zip(NATIVE.lower(*arguments), TWIN.lower(*arguments), strict=True):
        assert have.local_events == want.local_events
        assert np.array_equal(have.costs, want.costs)
        assert np.array_equal(have.tiles, want.tiles)
        sections = ("ops", "tensors", "tasks", "accesses", "waits", "signals", "events", "peers")
        assert_same_sections(
            {name: getattr(have, name) for name in sections}, {name: getattr(want, name) for name in sections}
        )
