"""Wrong loads, devices, policies, worlds and tiles are refused before anything is planned; so are plans too large."""

from __future__ import annotations

import numpy as np
import pytest
from comparing import SMALL

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.scheduler import backend as backends
from hyper_mpmd.scheduler.backend import get_backend
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.scheduler.records import MAX_BYTES, MAX_INDEX, MAX_TIME, MAX_WORK


def graph(ranks=1, groups=4, cols=8):
    g = hm.TaskGraph("g", ranks=ranks)
    rows = g.rows("tokens", groups=groups)
    x = g.input("x", (rows, cols))
    if ranks > 1:
        x = g.comm("send", hm.ops.Dispatch(), x)
    g.output("y", g.cube("up", hm.ops.GroupedMatmul(), x, g.input("w", (groups // ranks, cols, 6))))
    return g


FINE = [3, 0, 5, 1]
REFUSALS = {
    "no loads": ({"loads": None}, errors.LoadsError, ["'tokens'", "4 counts"]),
    "unknown row space": ({"loads": {"token": FINE}}, errors.LoadsError, ["'token'", "['tokens']"]),
    "too short": ({"loads": FINE[:3]}, errors.LoadsError, ["'tokens'", "[3]", "4 counts"]),
    "two ranks for one": ({"loads": [FINE, FINE]}, errors.LoadsError, ["[2, 4]"]),
    "negative": ({"loads": [3, 0, -5, 1]}, errors.LoadsError, ["group 2 of rank 0", "-5 rows"]),
    "fractions": ({"loads": [3.5, 0, 5, 1]}, errors.LoadsError, ["whole numbers", "float64"]),
    "ragged": ({"loads": [[1], [2, 3]]}, errors.LoadsError, ["'tokens'"]),
    "truth values": ({"loads": [True] * 4}, errors.LoadsError, ["bool"]),
    "too many rows": ({"loads": [1 << 40, 0, 0, 0]}, errors.LoadsError, [str(1 << 40), str(MAX_INDEX)]),
    "more rows than 63 bits": ({"loads": np.full(4, 1 << 63, np.uint64)}, errors.LoadsError, [str(1 << 65)]),
    "device": ({"device": "tpu"}, errors.UnknownDeviceError, ["'tpu'", "cpu", "ascend-a3"]),
    "device of the wrong type": ({"device": ["cpu"]}, errors.UnknownDeviceError, ["cpu"]),
    "policy": ({"policy": "O2"}, errors.UnknownPolicyError, ["'O2'", "O0, O1"]),
    "backend": ({"backend": "cuda"}, errors.UnknownBackendError, ["'cuda'", "native, python"]),
    "world of nothing": ({"world": 0}, errors.WorldSizeError, ["0", "4096"]),
    "world of another size": ({"world": 2}, errors.WorldSizeError, ["'g'", "1 rank", "ranks=2"]),
    "rank outside": ({"rank": 1}, errors.WorldSizeError, ["rank is 1", "0 to 0"]),
    "tiles of nothing": ({"tiles": {"down": (1, 1)}}, errors.TileSizeError, ["'down'", "up"]),
    "tiles of nothing wide": ({"tiles": {"up": (16, 0)}}, errors.TileSizeError, ["'up'", "(16, 0)"]),
    "tiles past an index": ({"tiles": {"up": (1 << 40, 1)}}, errors.TileSizeError, [str(1 << 40), str(MAX_INDEX)]),
    "tiles in a list": ({"tiles": [("up", (16, 16))]}, errors.TileSizeError, ["dict"]),
    "tiles of three numbers": ({"tiles": {"up": (16, 16, 16)}}, errors.TileSizeError, ["(16, 16, 16)"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_argument_is_refused_with_names_and_numbers(name):
    arguments, kind, words = REFUSALS[name]
    with pytest.raises(kind) as caught:
        hm.compile(graph(), **{"loads": FINE, **arguments})
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


def test_loads_need_a_name_where_there_are_several_row_spaces():
    g = graph()
    g.rows("more")
    with pytest.raises(errors.LoadsError, match=r"2 free row spaces \('tokens', 'more'\)"):
        hm.compile(g, FINE)


@pytest.mark.parametrize(
    ("ranks", "groups", "loads"),
    [(1, 4, FINE), (1, 4, [FINE]), (1, 1, 7), (1, 1, [7]), (2, 4, [FINE, FINE]), (1, 4, np.array(FINE, np.uint8))],
)
def test_loads_may_be_written_short_where_there_is_one_of_a_thing(ranks, groups, loads):
    plan = hm.compile(graph(ranks, groups), loads, world=ranks)[0]
    assert np.array_equal(np.reshape(loads, (ranks, groups)), plan.header.loads["tokens"])


def huge_rows():
    return graph(cols=1), [MAX_INDEX, 0, 0, 0], {"up": (1, 1)}


def doubled_rows():
    g = hm.TaskGraph("g", ranks=4)
    x = g.comm("first", hm.ops.Put(), g.input("x", (g.rows("tokens"), 1)))
    g.output("y", g.comm("second", hm.ops.Put(), x))
    return g, [1 << 30] * 3 + [0], {}


def huge_work():
    g = hm.TaskGraph("g")
    x, w = g.input("x", (1 << 26, 1 << 20)), g.input("w", (1 << 20, 4096))
    g.output("y", g.cube("up", hm.ops.Matmul(), x, w))
    return g, None, {"up": (1 << 26, 4096)}


def huge_tensor():
    g = hm.TaskGraph("g")
    x = g.vector("copy", hm.ops.Permute(), g.input("x", (4, MAX_INDEX), "int64"), g.input("i", (MAX_INDEX,), "int32"))
    g.output("y", g.vector("again", hm.ops.Permute(), x, g.input("j", (4,), "int32")))
    return g, None, {"copy": (1 << 17, 1), "again": (1, 1)}


LIMITS = {
    "tiles": (huge_rows, ["'up'", str(MAX_INDEX), "larger tiles"]),
    "rows that arrive": (doubled_rows, ["'tokens.all.all'", str(4 * 3 << 30), "rank 0", str(MAX_INDEX)]),
    "work of a tile": (huge_work, ["'up'", "4096", str(MAX_WORK), "operations"]),
    "bytes": (huge_tensor, ["'copy'", "bytes", str(MAX_BYTES)]),
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("backend", ["native", "python"])
def test_plan_beyond_a_limit_is_refused_with_value_and_limit(name, backend):
    make, words = LIMITS[name]
    g, loads, tiles = make()
    with pytest.raises(errors.PlanLimitError) as caught:
        hm.compile(g, loads, world=g.ranks, tiles=tiles, device=SMALL, backend=backend)
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_graph_is_refused_by_its_type():
    with pytest.raises(errors.GraphFormatError, match="takes a TaskGraph; got a tuple"):
        hm.compile((graph(), FINE))


def test_a_graph_for_more_ranks_than_a_world_can_have_is_refused():
    with pytest.raises(errors.WorldSizeError, match=r"world is 5000; .* to 4096"):
        hm.compile(hm.TaskGraph("g", ranks=5000))


@pytest.mark.parametrize("name", LIMITS)
def test_both_backends_refuse_with_the_same_words(name):
    make, _ = LIMITS[name]
    g, loads, tiles = make()
    said = []
    for backend in ("native", "python"):
        with pytest.raises(errors.PlanLimitError) as caught:
            hm.compile(g, loads, world=g.ranks, tiles=tiles, device=SMALL, backend=backend)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("policy", ["O0", "O1"])
@pytest.mark.parametrize("backend", ["native", "python"])
def test_times_that_leave_64_bits_are_refused(policy, backend):
    program = TileProgram.from_edges([MAX_TIME // 2, MAX_TIME // 2 + 1], [])
    with pytest.raises(errors.PlanLimitError, match=f"the limit is {MAX_TIME}"):
        get_backend(backend).schedule(program, SMALL, policy)


def test_programs_with_records_that_point_nowhere_are_refused():
    program = TileProgram.from_edges([1, 1, 1], [(0, 1), (1, 2)])
    program.waits["event"][0] = 77
    with pytest.raises(errors.PlanFormatError, match=r"awaited event of 1 is 77.*only 2"):
        get_backend("native").schedule(program, SMALL, "O1")


@pytest.mark.parametrize("backend", ["native", "python"])
def test_programs_that_can_never_start_are_refused(backend):
    program = TileProgram.from_edges([1, 1, 1], [(0, 1), (1, 2)])
    program.signals["event"][:] = program.signals["event"][::-1].copy()
    with pytest.raises(errors.CycleError, match=r"1 task\(s\) at hop level 0 can never start; the first is task 1"):
        get_backend(backend).schedule(program, SMALL, "O1")


@pytest.mark.parametrize(
    ("edges", "kind"),
    [([(0, 3)], errors.PlanFormatError), ([(-1, 0)], errors.PlanFormatError), ([(1, 1)], errors.CycleError)],
)
def test_edges_that_lead_nowhere_or_back_are_refused(edges, kind):
    with pytest.raises(kind, match="edge 0"):
        TileProgram.from_edges([1, 1, 1], edges)


def test_without_the_native_module_the_twin_plans_and_native_is_refused(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "hyper_mpmd._native", None)
    backends._warn_of_twin.cache_clear()
    with pytest.warns(RuntimeWarning, match="make setup"):
        assert isinstance(get_backend(None), backends.PythonBackend)
    assert isinstance(get_backend(None), backends.PythonBackend)  # it warns once
    with pytest.raises(errors.UnknownBackendError, match="make setup"):
        get_backend("native")
    graph = hm.TaskGraph("two")
    graph.output("y", graph.cube("h", hm.ops.Matmul(), graph.input("x", (64, 16)), graph.input("w", (16, 16))))
    plan = hm.compile(graph, prove=False, backend="python")
    for use in (plan.check, plan.simulate):
        backends._warn_of_twin.cache_clear()
        with pytest.warns(RuntimeWarning, match="the slow Python twin makes, proves and simulates"):
            use()
        with pytest.raises(errors.UnknownBackendError, match="make setup"):
            use(backend="native")


def test_a_device_with_impossible_figures_is_refused():
    for change in (
        {"aic": 0},
        {"cube_flops_per_us": (0, 1)},
        {"row_tiles": ()},
        {"unified": True},
        {"task_ns": 1 << 40},
    ):
        with pytest.raises(ValueError, match="Device"):
            hm.Device.model_validate({**SMALL.model_dump(), **change})
