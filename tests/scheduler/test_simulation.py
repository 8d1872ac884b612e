"""The simulator: timelines worked out by hand, the twin to the nanosecond, and what must hold on any graph."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from comparing import SMALL, cases
from hyper_mpmd._native import simulator
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.scheduler.records import AIC, AIV
from hyper_mpmd.scheduler.simulate import COMM, DATA, DISPATCH, SIMULATED, simulate
from hyper_mpmd.testing.programs import grid, plan_of

BACKENDS = ("native", "python")
both = pytest.mark.parametrize("backend", BACKENDS)
FAST = {"memory_bytes_per_us": 10**9, "link_bytes_per_us": 10**9, "link_total_bytes_per_us": 10**9}


def like(**changes: Any) -> hm.Device:
    """SMALL: 2 AIC and 3 AIV, a launch 90 ns, an event 7 ns, a signal to another rank 40 ns, a task 3 ns."""
    return SMALL.model_copy(update=changes)


def times(simulation: Any, rank: int = 0) -> list[tuple[int, int, int]]:
    """(tile, start, end) in order of the start."""
    plan, record = simulation.plans[rank], simulation.records[rank]
    rows = zip(plan.tasks["number"].tolist(), record["start_ns"].tolist(), record["end_ns"].tolist(), strict=True)
    return sorted(rows, key=lambda row: (row[1], row[0]))


# ---- by hand ---------------------------------------------------------------------------------------------------------


@both
def test_a_chain_starts_with_the_launch_and_stands_for_each_event(backend):
    found = plan_of(TileProgram.from_edges([10, 5, 20], [(0, 1), (1, 2)]), SMALL).simulate(backend=backend)
    # The launch opens at 90; the signal of a task lands 7 ns after its end.
    assert times(found) == [(0, 90, 100), (1, 107, 112), (2, 119, 139)]
    assert found.makespan_ns == 139
    assert found.bounds.path == 10 + 7 + 5 + 7 + 20


@both
def test_a_core_takes_its_queue_in_order(backend):
    one_core = like(aiv=1)
    found = plan_of(TileProgram.from_edges([50, 10, 40], []), one_core).simulate(backend=backend)
    # O1 queues the long ones first.
    assert [end - start for _, start, end in times(found)] == [50, 40, 10]
    assert [start for _, start, _ in times(found)] == [90, 140, 180]
    assert found.bounds.vector == 100
    assert found.by_core_kind()["AIV"] == {"busy": 100, "stalled": 0, "data": 0, "comm": 0, "dispatch": 90, "idle": 0}


@both
def test_the_host_launches_op_by_op(backend):
    # Launch 0 opens at 90 and ends at 100; launch 1 depends on it, but the host comes to it at 180 only.
    program = TileProgram.from_edges([10, 30], [(0, 1)], [AIC, AIV])
    found = plan_of(program, SMALL, "O0").simulate(backend=backend)
    assert times(found) == [(0, 90, 100), (0, 180, 210)]
    record = found.records[0]
    assert sorted(record["held"].tolist()) == [DISPATCH, DISPATCH]
    slow = plan_of(TileProgram.from_edges([200, 30], [(0, 1)], [AIC, AIV]), SMALL, "O0").simulate(backend=backend)
    # Here the host is done first, and launch 1 opens when launch 0 has ended.
    assert times(slow) == [(0, 90, 290), (0, 290, 320)]


@both
def test_serial_runs_one_op_at_a_time_on_all_cores(backend):
    # Two ops with nothing between them: O0 runs them side by side, serial one after the other, each on its 3 cores.
    g = hm.TaskGraph("two")
    x = g.input("x", (g.rows("rows"), 32))
    for name in "ab":
        g.output(name, g.vector(name, hm.ops.SwiGLU(), x))
    tiles = {"a": (8, 16), "b": (8, 16)}
    found = {
        policy: hm.compile(g, [24], device=like(launch_ns=1), policy=policy, tiles=tiles).simulate(backend=backend)
        for policy in ("O0", "serial")
    }
    tasks, record = found["serial"].plans[0].tasks, found["serial"].records[0]
    first, second = record[tasks["op"] == 0], record[tasks["op"] == 1]
    assert set(second["start_ns"].tolist()) == {int(first["end_ns"].max())}
    assert set(first["start_ns"].tolist()) == {1}
    together = found["O0"].records[0]
    assert together["start_ns"][found["O0"].plans[0].tasks["op"] == 1].min() == 2


def activation(rows: int, device: hm.Device) -> hm.Plan:
    g = hm.TaskGraph("act")
    x = g.input("x", (g.rows("rows"), 32))
    g.output("y", g.vector("act", hm.ops.SwiGLU(), x))
    plan: hm.Plan = hm.compile(g, [rows], device=device, tiles={"act": (8, 16)})
    return plan


@both
def test_tiles_that_run_together_share_the_memory(backend):
    # A tile reads 8 x 32 and writes 8 x 16 floats: 1536 bytes. Two of them at 100 bytes a microsecond together.
    found = activation(16, like(memory_bytes_per_us=100)).simulate(backend=backend)
    assert times(found) == [(0, 90, 90 + 30_720), (1, 90, 90 + 30_720)]
    assert found.records[0]["memory_bytes"].tolist() == [1536, 1536]
    alone = activation(8, like(memory_bytes_per_us=100)).simulate(backend=backend)
    assert times(alone) == [(0, 90, 90 + 15_360)]
    # What one leaves the other has: with 8 rows and 4, the small one is through when each has moved 768 bytes.
    uneven = activation(12, like(memory_bytes_per_us=100)).simulate(backend=backend)
    assert times(uneven) == [(0, 90, 90 + 23_040), (1, 90, 90 + 15_360)]


@both
def test_the_l2_spares_what_was_written_a_moment_ago(backend):
    def moved(l2_bytes: int) -> list[int]:
        g = hm.TaskGraph("two")
        x = g.input("x", (g.rows("rows"), 64))
        g.output("y", g.vector("second", hm.ops.SwiGLU(), g.vector("first", hm.ops.SwiGLU(), x)))
        tiles = {"first": (8, 32), "second": (8, 16)}
        plan = hm.compile(g, [8], device=like(l2_bytes=l2_bytes, memory_bytes_per_us=10**6), tiles=tiles)
        order = np.argsort(plan.tasks["op"])
        found: list[int] = plan.simulate(backend=backend).records[0]["memory_bytes"][order].tolist()
        return found

    assert moved(0) == [2048 + 1024, 1024 + 512]
    assert moved(1 << 20) == [2048 + 1024, 512]


def exchange(device: hm.Device) -> Any:
    """Two ranks, each with 8 rows of 16 floats for either: a put of 512 bytes to the other."""
    g = hm.TaskGraph("exchange", ranks=2)
    x = g.input("x", (g.rows("rows", groups=2), 16))
    g.output("y", g.vector("act", hm.ops.SwiGLU(), g.comm("dispatch", hm.ops.Dispatch(), x)))
    return hm.compile(g, [[8, 8], [8, 8]], world=2, device=device, tiles={"act": (16, 8)})


@both
def test_a_put_takes_its_link_and_its_signal_lands_later(backend):
    # Between two ranks 100 bytes a microsecond: 5120 ns. Then 40 ns until the other rank's task starts.
    world = exchange(like(memory_bytes_per_us=10**6))
    found = world.simulate(backend=backend)
    for rank, plan in enumerate(world.plans):
        record, away = found.records[rank], plan.tasks["peer"] != rank
        assert record["start_ns"][away].tolist() == [90]
        assert record["end_ns"][away].tolist() == [90 + 5120]
        last = record[plan.tasks["op"] == 1]
        assert last["start_ns"].tolist() == [90 + 5120 + 40]
        assert last["held"].tolist() == [COMM]
    assert found.bounds.link == 5120
    near = world.simulate(backend=backend, device=like(memory_bytes_per_us=10**6, near=((2, 11),)))
    assert near.records[0]["start_ns"].max() == 90 + 5120 + 11


@both
def test_a_pull_takes_the_link_of_the_rank_it_reads_from(backend):
    # 8 rows of 8 floats of the other rank, 256 bytes at 100 a microsecond.
    g = hm.TaskGraph("pull", ranks=2)
    x = g.input("x", (g.rows("rows", groups=2), 16))
    rows = g.vector("act", hm.ops.SwiGLU(), x)
    g.output("y", g.comm("dispatch", hm.ops.Dispatch(mode="pull"), rows))
    world = hm.compile(g, [[8, 0], [8, 0]], world=2, device=like(memory_bytes_per_us=10**6))
    found = world.simulate(backend=backend)
    plan, record = world.plans[0], found.records[0]
    boxes = plan.sections["accesses"]["rank"][plan.tasks["access_begin"]]
    away = (plan.tasks["op"] == 1) & (boxes == 1)
    assert (record["end_ns"] - record["start_ns"])[away].tolist() == [2560]
    made = int(found.records[1]["end_ns"][world.plans[1].tasks["op"] == 0].max())
    assert record["start_ns"][away].tolist() == [made + 40]
    assert record["held"][away].tolist() == [COMM]
    assert found.bounds.link == 2560


@both
def test_puts_share_a_port(backend):
    # Three ranks send to rank 0 at once: 3 x 512 bytes into a port of 200 a microsecond, 7680 ns.
    g = hm.TaskGraph("funnel", ranks=4)
    x = g.input("x", (g.rows("rows", groups=4), 16))
    g.output("y", g.comm("dispatch", hm.ops.Dispatch(), x))
    counts = [[0, 0, 0, 0]] + 3 * [[8, 0, 0, 0]]
    world = hm.compile(g, counts, world=4, device=like(memory_bytes_per_us=10**6))
    found = world.simulate(backend=backend)
    assert [int(record["end_ns"].max(initial=0)) for record in found.records] == [0] + 3 * [90 + 7680]
    assert found.bounds.link == 7680


# ---- on any graph ----------------------------------------------------------------------------------------------------


def same(first: Any, second: Any) -> None:
    for rank, (one, other) in enumerate(zip(first.records, second.records, strict=True)):
        for name in one.dtype.names:
            assert one[name].tolist() == other[name].tolist(), (rank, name)
    assert first.bounds == second.bounds


@given(cases(), st.integers(0, 5), st.sampled_from([0.0, 0.3]))
@settings(max_examples=40)
def test_the_twin_comes_to_the_same_nanosecond(case, seed, jitter):
    plans = case.compile()
    native, twin = (simulate(plans, seed=seed, jitter=jitter, backend=backend) for backend in BACKENDS)
    same(native, twin)
    same(native, simulate(plans, seed=seed, jitter=jitter))


@given(cases(), st.sampled_from([0, 1 << 12, 1 << 30]))
@settings(max_examples=60)
def test_nothing_beats_the_bound_and_cores_do_one_thing_at_a_time(case, l2_bytes):
    plans = case.compile()
    found = simulate(plans, device=plans[0].device.model_copy(update={"l2_bytes": l2_bytes}))
    assert found.makespan_ns >= found.bounds.largest[1]
    assert 0 <= found.of_bound <= 1
    for plan, record in zip(plans, found.records, strict=True):
        assert (record["start_ns"] >= record["ready_ns"]).all()
        assert (record["start_ns"] >= record["blocked_ns"]).all()
        assert (record["end_ns"] - record["start_ns"] >= record["core_ns"]).all()
        for queue in plan.sections["queues"]:
            mine = record[int(queue["begin"]) :][: int(queue["count"])]
            assert (mine["blocked_ns"][1:] == mine["end_ns"][:-1]).all()
    whole = found.by_core_kind()
    cores = sum(len(plan.sections["queues"]) for plan in plans)
    accounted = sum(sum(ns for name, ns in kind.items() if name != "stalled") for kind in whole.values())
    assert accounted == cores * found.makespan_ns


@given(cases(), st.integers(1, 4))
@settings(max_examples=40)
def test_lower_latencies_never_hurt_where_nothing_is_shared(case, divisor):
    # Queues are fixed, so times are maxima of sums of the latencies: with rates that nobody notices they can only fall.
    plans = case.compile()
    device = plans[0].device.model_copy(update={**FAST, "vector_bytes_per_us": 10**9})
    less = {name: getattr(device, name) // divisor for name in ("event_ns", "remote_ns", "launch_ns")}
    near = tuple((ranks, ns // divisor) for ranks, ns in device.near)
    faster = device.model_copy(update={**less, "near": near})
    slack = max(len(plan.tasks) for plan in plans)  # a byte takes a nanosecond at least: rounding
    assert simulate(plans, device=faster).makespan_ns <= simulate(plans, device=device).makespan_ns + slack


@given(cases(), st.sampled_from(["memory_bytes_per_us", "link_bytes_per_us", "link_total_bytes_per_us"]))
@settings(max_examples=40)
def test_a_faster_memory_or_link_hurts_by_less_than_a_list_scheduling_anomaly(case, name):
    # Who shares with whom can turn out worse when others are earlier, as in list scheduling: by less than twice.
    plans = case.compile()
    faster = plans[0].device.model_copy(update={name: getattr(plans[0].device, name) * 2})
    assert simulate(plans, device=faster).makespan_ns <= 2 * simulate(plans).makespan_ns


def test_jitter_only_delays_and_is_drawn_from_the_seed():
    plan = plan_of(TileProgram.from_edges(range(100, 130), [(n, n + 5) for n in range(25)]), SMALL)
    still, first, again, other = (
        plan.simulate(seed=seed, jitter=jitter) for seed, jitter in ((0, 0.0), (1, 0.5), (1, 0.5), (2, 0.5))
    )
    same(first, again)
    assert first.makespan_ns >= still.makespan_ns
    assert first.records[0].tobytes() != other.records[0].tobytes()


def test_a_simulation_is_a_timeline_like_any_other():
    found = exchange(SMALL).simulate()
    assert found.timeline.kind == "simulated"
    assert found.timeline.makespan_ns == found.makespan_ns
    assert found.timeline.spans["wait_ns"].min() >= 0
    assert found.timeline.cores[0].startswith("r0 ")
    assert DATA in {int(held) for held in plan_of(grid(3), SMALL).simulate().records[0]["held"]}


def test_a_million_tasks_are_simulated_in_seconds():
    plan = plan_of(grid(1000), "ascend-a3")
    begin = time.process_time()
    assert plan.simulate().makespan_ns > 0
    assert time.process_time() - begin < 20


def test_the_record_is_laid_out_as_in_the_header():
    assert SIMULATED.fields is not None
    offsets = [SIMULATED.fields[name][1] for name in SIMULATED.names]
    assert [*offsets, SIMULATED.itemsize] == simulator.layout()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"jitter": -0.1}, {"jitter": float("nan")}, {"jitter": 1.5}, {"seed": -1}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(errors.SimulationError, match="must be from 0"):
        plan_of(grid(2), SMALL).simulate(**options)


def test_a_rank_of_a_world_is_not_simulated_alone():
    with pytest.raises(errors.WorldSizeError, match=r"all 2 rank\(s\)"):
        exchange(SMALL).plans[1].simulate()


@both
def test_plans_that_stand_are_refused_with_the_first_task_that_never_starts(backend):
    plan = plan_of(TileProgram.from_edges([10, 5], [(0, 1)]), SMALL)
    sections = {name: records.copy() for name, records in plan.sections.items()}
    sections["tasks"]["signal_count"] = 0
    with pytest.raises(errors.HangError, match=r"1 task\(s\) never start"):
        hm.Plan(plan.header, sections, plan.graph).simulate(backend=backend)
