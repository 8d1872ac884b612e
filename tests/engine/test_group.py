"""Plans over processes: the same bits as in one process, and whatever happens to one rank is told to all, in time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd.engine.group import GroupEngine

from .graphs import PROBE, Probe, moe, probe_graph
from .ranks import Ranks, step_inputs, steps_in_a_loop


def same_bits_job(rank: int, world: int) -> list[np.ndarray]:
    outs = []
    with GroupEngine() as engine:
        for seed in range(4):
            inputs, loads, _ = step_inputs(world, seed)
            for policy in ("O0", "O1"):
                plan = hm.compile(moe(world), loads, world=world, rank=rank, policy=policy)
                outs.extend(
                    engine.run(plan, workers=1 + seed % 2, timeout=25, **inputs[rank])["y"].numpy() for _ in range(2)
                )
    return outs


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_give_the_bits_of_a_world_in_one_process(world):
    results = Ranks(world, same_bits_job).results()
    assert [kind for kind, *_ in results] == ["value"] * world
    expected: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for seed in range(4):
        inputs, loads, _ = step_inputs(world, seed)
        outs = hm.compile(moe(world), loads, world=world).run(inputs, timeout=30)
        for rank, out in enumerate(outs):
            expected[rank].extend([out["y"]] * 4)
    for (_, outs, _), wanted in zip(results, expected, strict=True):
        assert all(np.array_equal(have, want.numpy()) for have, want in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_launches_with_random_loads_follow_one_another(world):
    results = Ranks(world, steps_in_a_loop, 60).results()
    assert [result[:2] for result in results] == [("value", 60)] * world


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
def test_ten_thousand_launches_with_random_loads(world):
    results = Ranks(world, steps_in_a_loop, 10_000, 12).results(timeout=850)
    assert [result[:2] for result in results] == [("value", 10_000)] * world


def run_one(engine: GroupEngine, rank: int, world: int, seed: int = 0, **change: Any) -> None:
    """One launch, whose output must be right; change: inputs of this rank that replace the good ones."""
    inputs, loads, expected = step_inputs(world, seed)
    plan = hm.compile(moe(world), loads, world=world, rank=rank)
    out = engine.run(plan, timeout=25, **{**inputs[rank], **change})["y"]
    torch.testing.assert_close(out, expected[rank], rtol=1e-4, atol=1e-4)


def raising_job(rank: int, world: int, how: str) -> list[str]:
    """Rank 1 goes wrong in the second of three launches; everybody notes what it saw and goes on."""
    seen = []
    with GroupEngine() as engine:
        for launch in range(3):
            try:
                if launch == 1 and rank == 1:
                    inputs, loads, _ = step_inputs(world, 0)
                    if how == "bad input":
                        run_one(engine, rank, world, x=inputs[rank]["x"].double())
                    elif how == "failing task":
                        run_one(engine, rank, world, gather=inputs[rank]["gather"] + 1000)
                    elif how == "before launch":
                        engine.abort(ValueError("rank 1 thought better of it"))
                        raise ValueError("rank 1 thought better of it")
                    elif how == "other graph":
                        plan = hm.compile(moe(world), loads, world=world, rank=rank, tiles={"up": (8, 16)})
                        engine.run(plan, timeout=25, **inputs[rank])
                    else:
                        run_one(engine, rank, world, seed=5)  # other loads
                else:
                    run_one(engine, rank, world)
                seen.append("fine")
            except Exception as error:
                seen.append(f"{type(error).__name__}: {error}")
    return seen


@pytest.mark.parametrize(
    ("how", "mine", "theirs"),
    [
        (
            "bad input",
            "DTypeError: rank 1: input 'x' is torch.float64",
            "GroupAborted: rank 1: DTypeError: rank 1: input",
        ),
        (
            "failing task",
            "TaskFailedError: rank 1, task permute.t0 failed: index 1",
            "GroupAborted: rank 1: rank 1, task",
        ),
        (
            "before launch",
            "ValueError: rank 1 thought",
            "GroupAborted: rank 1: ValueError: rank 1 thought better of it",
        ),
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_what_one_rank_raises_ends_the_launch_on_all_and_the_next_one_works(world, how, mine, theirs):
    results = Ranks(world, raising_job, how).results()
    for rank, (kind, seen, _) in enumerate(results):
        assert kind == "value", (rank, kind, seen)
        assert seen[0] == seen[2] == "fine", (rank, seen)
        assert seen[1].startswith(mine if rank == 1 else theirs), (rank, seen)


@pytest.mark.parametrize("how", ["other graph", "other loads"])
def test_ranks_that_launch_different_work_are_told_so(how):
    told = [seen for _, seen, _ in Ranks(2, raising_job, how).results()]
    assert all(seen[0] == "fine" for seen in told), told
    # A rank that needs nothing more of the other may be through with the launch before; it is told at the next one.
    assert all(any("ranks launch different work as launch 2" in text for text in seen[1:]) for seen in told), told


def late_job(rank: int, world: int) -> list[str]:
    """Rank 1 sleeps through the deadline of the second launch, inside a task."""
    seen = []
    _, inputs = probe_graph()
    with GroupEngine() as engine:
        run_one(engine, rank, world)
        wide = hm.TaskGraph("late", ranks=world)
        rows = wide.rows("rows")
        x = wide.input("x", (rows, 16))
        wide.output("y", wide.comm("put", hm.ops.Put(to="all"), wide.vector("slow", Probe(), x)))
        plan = hm.compile(wide, [[64]] * world, world=world, rank=rank)
        for delay in (1.5, 0.0):
            PROBE["call"] = lambda tile, delay=delay: time.sleep(delay if rank == 1 else 0.0)
            try:
                out = engine.run(plan, timeout=0.3 if delay else 20, **inputs)["y"]
                seen.append("fine" if torch.equal(out, torch.cat([inputs["x"] * 2] * world)) else "wrong")
            except Exception as error:
                seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_a_deadline_is_one_error_on_all_ranks_and_the_next_launch_works():
    results = Ranks(2, late_job).results()
    texts = {seen[0] for _, seen, _ in results}
    assert len(texts) == 1, results
    text = texts.pop()
    assert text.startswith("LaunchTimeout: rank ")
    assert "\nroot cause: rank " in text
    assert all(seen[1] == "fine" for _, seen, _ in results)


def received_output_job(rank: int, world: int) -> bool:
    """Rows that no task of the receiver reads go straight to its caller; rank 1 is slow to put them."""
    graph = hm.TaskGraph("received", ranks=world)
    rows = graph.rows("rows")
    x = graph.input("x", (rows, 16))
    graph.output("y", graph.comm("put", hm.ops.Put(to="all"), graph.vector("slow", Probe(), x)))
    plan = hm.compile(graph, [[8]] * world, world=world, rank=rank)
    PROBE["call"] = lambda tile: time.sleep(0.3 if rank == 1 else 0.0)
    with GroupEngine() as engine:
        return all(
            torch.equal(
                engine.run(plan, timeout=20, x=torch.full((8, 16), float(10 * step + rank + 1)))["y"][:, 0],
                torch.cat([torch.full((8,), 2.0 * (10 * step + source + 1)) for source in range(world)]),
            )
            for step in range(3)
        )


def test_a_launch_has_ended_when_all_rows_for_it_have_arrived_read_or_not():
    assert [result[:2] for result in Ranks(2, received_output_job).results()] == [("value", True)] * 2


def absent_job(rank: int, world: int) -> str:
    os.environ["HYPER_PARALLEL_SHMEM_TIMEOUT_SEC"] = "2"
    engine = GroupEngine()
    run_one(engine, rank, world)
    if rank == 1:
        engine._heap.native.set_activity("backward of layer 3")
        time.sleep(4)
    try:
        run_one(engine, rank, world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_rank_that_does_not_enter_is_named_with_what_it_is_doing():
    results = Ranks(2, absent_job).results()
    assert results[0][1] == (
        "LaunchTimeout: rank 0: rank 1 has not entered launch 2 within 2 s; it is in backward of layer 3"
    ), results
    assert results[1][1] == results[0][1]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("after", [0.0, 0.2, 0.7])
def test_a_killed_rank_is_named_by_every_survivor_within_two_seconds(world, after):
    ranks = Ranks(world, steps_in_a_loop, 10**6)
    time.sleep(0.4)
    _until_running(ranks)
    time.sleep(after)
    killed = ranks.kill(world - 1)
    for rank, (kind, text, when) in enumerate(ranks.results()):
        if rank == world - 1:
            assert kind == "dead"
        else:
            assert (kind, when - killed < 2.0) == ("PeerLost", True), (rank, kind, text, when - killed)
            assert f"rank {world - 1} is lost" in text


def _until_running(ranks: Ranks) -> None:
    """Importing torch takes seconds a rank; a worker thread shows that a rank has launched."""
    until = time.monotonic() + 40
    for process in ranks.processes:
        while time.monotonic() < until and not _has_workers(process.pid):
            time.sleep(0.05)


def _has_workers(pid: int | None) -> bool:
    try:
        names = [Path(f"/proc/{pid}/task/{task}/comm").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return False
    return any(name.startswith("mpmd-") for name in names)


def test_ctrl_c_on_one_rank_ends_all():
    ranks = Ranks(2, steps_in_a_loop, 10**6)
    _until_running(ranks)
    time.sleep(0.3)
    ranks.interrupt(1)
    (kind, text, _), (own, *_) = ranks.results()
    assert own == "KeyboardInterrupt"
    assert kind in ("GroupAborted", "PeerLost"), (kind, text)
    assert "rank 1" in text


def closing_job(rank: int, world: int) -> float:
    engine = GroupEngine()
    run_one(engine, rank, world)
    if rank == 1:
        os.kill(os.getpid(), 9)
    try:
        for _ in range(100):
            run_one(engine, rank, world)
    except hm.HyperMpmdError:
        pass
    begin = time.monotonic()
    engine.close()
    engine.close()
    return time.monotonic() - begin


def test_close_returns_at_once_after_a_death():
    (kind, seconds, _), dead = Ranks(2, closing_job).results()
    assert kind == "value", seconds
    assert seconds < 0.5
    assert dead[0] == "dead"


def leak_job(rank: int, world: int) -> tuple[int, int, int]:
    def state() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with GroupEngine() as engine:
        for seed in range(5):
            run_one(engine, rank, world, seed)
    before = state()
    for _ in range(5):
        with GroupEngine() as engine:
            run_one(engine, rank, world)
    after = state()
    return (after[0] - before[0], after[1] - before[1], Path("/proc/self/maps").read_text().count("memfd"))


def test_engines_that_come_and_go_leave_no_threads_descriptors_or_mappings():
    for kind, value, _ in Ranks(2, leak_job).results():
        assert (kind, value) == ("value", (0, 0, 0))
