"""A task body that does not end: the launch ends all the same, the engine refuses by name, and the process can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.engine.group import GroupEngine

from .graphs import PROBE, Probe, probe_graph
from .ranks import Ranks


@pytest.fixture(autouse=True)
def _files_and_probe(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPER_MPMD_HANG_DIR", str(tmp_path))
    PROBE.clear()
    yield
    PROBE.clear()


def test_the_engine_takes_launches_again_once_the_body_has_ended():
    graph, inputs = probe_graph()
    plan, other = hm.compile(graph), hm.compile(graph, policy="O0")
    may_end = threading.Event()
    PROBE["call"] = lambda tile: may_end.wait()
    try:
        start = time.monotonic()
        with pytest.raises(errors.LaunchTimeout, match=r"the engine takes no launch until probe\.t0 has ended") as late:
            plan.run(**inputs, timeout=0.1)
        assert time.monotonic() - start < 5
        assert late.value.report["root"]["text"].endswith("is inside probe.t0, which has not ended")
        PROBE.clear()
        for refused in (plan, other):
            with pytest.raises(errors.EngineHungError, match=r"probe\.t0 of an earlier launch of 'probe'"):
                refused.run(**inputs)
    finally:
        may_end.set()
    assert torch.equal(plan.run(**inputs, timeout=30)["y"], inputs["x"] * 2)
    assert torch.equal(other.run(**inputs, timeout=30)["y"], inputs["x"] * 2)


def test_a_launch_waits_a_while_for_a_body_that_is_only_late():
    graph, inputs = probe_graph()
    plan = hm.compile(graph)
    PROBE["call"] = lambda tile: time.sleep(2)
    with pytest.raises(errors.LaunchTimeout):
        plan.run(**inputs, timeout=0.1)
    PROBE.clear()
    assert torch.equal(plan.run(**inputs, timeout=30)["y"], inputs["x"] * 2)


def test_what_a_late_body_writes_stays_its_own():
    """The memory of a launch that was ended lives until its last body has left; results of later ones are their own."""
    graph, inputs = probe_graph()
    plan = hm.compile(graph)
    PROBE["call"] = lambda tile: time.sleep(1.6)
    with pytest.raises(errors.LaunchTimeout):
        plan.run(x=torch.full_like(inputs["x"], 7.0), timeout=0.1)
    PROBE.clear()
    out = plan.run(**inputs, timeout=30)["y"]
    time.sleep(0.3)
    assert torch.equal(out, inputs["x"] * 2)


HANG = """
    import sys, threading, time
    import hyper_mpmd as hm
    from tests.engine.graphs import PROBE, probe_graph

    def spin(tile):
        while True:
            pass

    def nap(tile):
        while True:
            time.sleep(0.01)

    def forever(tile):
        threading.Event().wait()

    graph, inputs = probe_graph()
    plan = hm.compile(graph)
    PROBE["call"] = {"spin": spin, "nap": nap, "forever": forever}[sys.argv[1]]
    print("started", flush=True)
    try:
        plan.run(**inputs, timeout=float(sys.argv[2]))
    except (hm.errors.LaunchTimeout, KeyboardInterrupt) as error:
        print(type(error).__name__, flush=True)
    sys.exit(7)
"""


def start(how: str, timeout: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HANG), how, str(timeout)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."},
    )  # fmt: skip


@pytest.mark.parametrize("how", ["spin", "nap", "forever"])
def test_a_process_with_a_hung_body_ends_in_good_order(how):
    with start(how, 0.1) as process:
        out, err = process.communicate(timeout=60)
    assert (out.split(), err, process.returncode) == (["started", "LaunchTimeout"], "", 7)


def test_ctrl_c_ends_a_launch_whose_body_hangs():
    with start("nap", 1e6) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (out.split(), err, process.returncode) == (["KeyboardInterrupt"], "", 7)


def hanging_job(rank: int, world: int) -> list[str]:
    """The body of rank 1 hangs in the first of two launches."""
    seen = []
    _, inputs = probe_graph()
    engine = GroupEngine()
    graph = hm.TaskGraph("late", ranks=world)
    x = graph.input("x", (graph.rows("rows"), 16))
    graph.output("y", graph.comm("put", hm.ops.Put(to="all"), graph.vector("slow", Probe(), x)))
    plan = hm.compile(graph, [[64]] * world, world=world, rank=rank)
    for _ in range(2):
        PROBE["call"] = lambda tile: threading.Event().wait() if rank == 1 else None
        try:
            engine.run(plan, timeout=0.3, **inputs)
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        PROBE.clear()
    try:
        engine.close() if rank == 1 else None
    except errors.EngineHungError as error:
        seen.append(str(error))
    return seen


def test_a_body_that_hangs_in_one_process_is_told_to_all():
    before = set(os.listdir("/dev/shm"))
    (first, _, _), (second, _, _) = results = Ranks(2, hanging_job).results()
    assert (first, second) == ("value", "value"), results
    healthy, hung = results[0][1], results[1][1]
    assert healthy[0] == hung[0]
    assert healthy[0].startswith("LaunchTimeout: rank ")
    assert hung[1].startswith("EngineHungError: slow.t0 of an earlier launch of 'late' is still inside its body")
    assert healthy[1].startswith("GroupAborted: ")
    assert "slow.t0 of an earlier launch" in healthy[1]
    assert "still running" in hung[2]
    assert set(os.listdir("/dev/shm")) == before
