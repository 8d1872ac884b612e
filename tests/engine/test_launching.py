"""Launches from many threads, inside kernels, after a fork, interrupted, failing, past a deadline: never a hang."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd import _native, errors

from .graphs import LOADS, PROBE, DoubleInPlace, Probe, ffn, ffn_inputs, moe, moe_inputs, probe_graph


@pytest.fixture(autouse=True)
def _no_probe_left():
    PROBE.clear()
    yield
    PROBE.clear()


def test_an_exception_in_a_kernel_ends_the_launch_and_names_the_task():
    graph, inputs = probe_graph()
    plan = hm.compile(graph, tiles={"probe": (16, 16)})

    def fail(tile):
        if tile.number == 2:
            raise KeyError("no such thing")

    PROBE["call"] = fail
    for _ in range(2):
        with pytest.raises(errors.TaskFailedError, match=r"task probe\.t2 failed: KeyError: 'no such thing'") as caught:
            plan.run(**inputs, workers=2)
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value.__cause__, KeyError)
    PROBE.clear()
    assert torch.equal(plan.run(**inputs)["y"], inputs["x"] * 2)


def test_a_failure_on_one_rank_ends_the_launch_on_all_and_the_world_runs_again():
    inputs, counts, expected = moe_inputs([torch.tensor([[0, 7], [2, 5]]), torch.tensor([[1, 6]])])
    world = hm.compile(moe(2), {"batch": [[2], [1]], "routed": counts}, world=2)
    bad = [inputs[0], {**inputs[1], "gather": inputs[1]["gather"] + 50}]
    for _ in range(3):
        with pytest.raises(errors.TaskFailedError, match=r"rank 1, task permute\.t0 failed: index 50"):
            world.run(bad, timeout=30)
        for out, want in zip(world.run(inputs, timeout=30), expected, strict=True):
            torch.testing.assert_close(out["y"], want)


def test_run_from_inside_a_kernel_is_refused():
    graph, inputs = probe_graph()
    plan = hm.compile(graph)
    PROBE["call"] = lambda tile: plan.run(**inputs)
    with pytest.raises(errors.TaskFailedError, match="NestedRunError") as caught:
        plan.run(**inputs)
    assert isinstance(caught.value.__cause__, errors.NestedRunError)


def test_threads_take_turns_and_each_gets_its_own_result():
    plan = hm.compile(ffn(), loads=LOADS)
    base = ffn_inputs()
    wanted = [plan.run(**{**base, "x": base["x"] * (n + 1)})["y"] for n in range(4)]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            if not torch.equal(plan.run(**{**base, "x": base["x"] * (n + 1)})["y"], wanted[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_python_threads_go_on_while_native_tasks_run():
    graph, inputs = probe_graph()
    plan = hm.compile(graph, tiles={"probe": (4, 16)})
    PROBE["call"] = lambda tile: time.sleep(0.02)
    ticks = []
    thread = threading.Thread(target=lambda: ticks.extend(time.sleep(0.001) or n for n in range(50)))
    thread.start()
    plan.run(**inputs, workers=2)
    thread.join(10)
    assert len(ticks) == 50


def test_a_launch_past_its_deadline_names_core_task_and_what_it_lacked():
    g = hm.TaskGraph("late")
    x = g.input("x", (32, 16))
    g.output("y", g.vector("after", DoubleInPlace(), g.vector("slow", Probe(), x)))
    plan = hm.compile(g, tiles={"slow": (32, 16), "after": (16, 16)}, device="ascend-a3")
    PROBE["call"] = lambda tile: time.sleep(0.5)
    inputs = {"x": torch.ones(32, 16)}
    with pytest.raises(errors.LaunchTimeout) as caught:
        plan.run(**inputs, workers=2, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert re.search(r"AIV \d+: after\.t\d waits for .*'slow.*' \(have 0, need 1\)", str(caught.value))
    PROBE.clear()
    assert torch.equal(plan.run(**inputs, timeout=30)["y"], inputs["x"] * 4)


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_a_deadline_that_passes_inside_a_kernel_blames_no_wait(policy):
    graph, inputs = probe_graph()
    plan = hm.compile(graph, policy=policy)
    PROBE["call"] = lambda tile: time.sleep(0.2)
    with pytest.raises(errors.LaunchTimeout, match=r"core 0 is inside probe\.t0, which has not ended"):
        plan.run(**inputs, timeout=0.05)


def test_worker_threads_never_leak_their_thread_count_into_torch():
    before = torch.get_num_threads()
    hm.compile(ffn(), loads=LOADS).run(**ffn_inputs())
    seen = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join(10)
    assert seen == [before, before]


def test_more_workers_come_when_asked_for_and_stay():
    plan = hm.compile(ffn(), loads=LOADS, device="ascend-a3")
    plan.run(**ffn_inputs(), workers=4)
    assert _native.engine.worker_threads() >= 4
    count = _native.engine.worker_threads()
    for _ in range(5):
        plan.run(**ffn_inputs(), workers=2)
    assert _native.engine.worker_threads() == count


def _script(body: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python source with the helpers of these tests at hand."""
    head = """
        import os, signal, sys, threading, time, warnings
        import torch, hyper_mpmd as hm
        from tests.engine.graphs import *
        warnings.simplefilter("ignore")
        graph, inputs = probe_graph()
        plan = hm.compile(graph, tiles={"probe": (4, 16)})
    """
    source = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=timeout, check=False)


def test_ctrl_c_ends_a_launch_long_before_its_end():
    done = _script("""
        PROBE["call"] = lambda tile: time.sleep(0.03)
        plan.run(**inputs, workers=1)
        big = hm.compile(probe_graph(4096)[0], tiles={"probe": (1, 16)})
        x = probe_graph(4096)[1]
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            big.run(**x)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - begin)
        PROBE.clear()
        print(torch.equal(plan.run(**inputs)["y"], inputs["x"] * 2))
    """)
    assert done.returncode == 0, done.stderr
    word, seconds = done.stdout.splitlines()[0].split()
    assert word == "interrupted"
    # 0.5 s until the signal, a minute for the whole launch; the rest is slack for a busy machine.
    assert 0.4 < float(seconds) < 10
    assert done.stdout.splitlines()[1] == "True"


def test_a_forked_child_launches_on_its_own_workers():
    done = _script("""
        plan.run(**inputs)
        pid = os.fork()
        if pid == 0:
            ok = torch.equal(plan.run(**inputs, timeout=20)["y"], inputs["x"] * 2)
            os._exit(0 if ok else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), torch.equal(plan.run(**inputs)["y"], inputs["x"] * 2))
    """)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_a_child_forked_while_another_thread_launches_does_not_hang():
    # The first run imports the engine, and no fork of CPython survives an import under way in another thread.
    done = _script("""
        plan.run(**inputs)
        stop = []
        def spin():
            while not stop:
                plan.run(**inputs)
        thread = threading.Thread(target=spin); thread.start()
        codes = []
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                ok = torch.equal(plan.run(**inputs, timeout=20)["y"], inputs["x"] * 2)
                os._exit(0 if ok else 3)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        stop.append(1); thread.join()
        print(set(codes))
    """)
    assert done.stdout.strip() == "{0}", done.stderr


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "raise SystemExit(0)"])
def test_workers_are_joined_before_the_interpreter_ends(ending):
    done = _script(f"plan.run(**inputs); print('fine'); {ending}")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "fine", "")


def test_the_interpreter_ends_while_a_daemon_thread_launches():
    done = _script("""
        PROBE["call"] = lambda tile: time.sleep(0.001)
        def spin():
            while True:
                plan.run(**inputs)
        threading.Thread(target=spin, daemon=True).start()
        time.sleep(0.3)
        print("fine")
    """)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_ten_thousand_small_launches_leave_no_memory_threads_or_descriptors_behind():
    _, inputs = probe_graph(8)
    g = hm.TaskGraph("copy")
    x = g.input("x", (8, 16))
    g.output("y", g.cube("mm", hm.ops.Matmul(), x, g.input("w", (16, 16))))
    given = {"x": inputs["x"], "w": torch.eye(16)}
    plan = hm.compile(g)

    def state() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(200):
        plan.run(**given)
    before = state()
    resident = _resident_pages()
    for _ in range(10_000):
        plan.run(**given)
    assert state() == before
    assert _resident_pages() - resident < 4096  # 16 MiB


def _resident_pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_signals_reach_the_main_thread_not_the_workers():
    graph, inputs = probe_graph()
    caught = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: caught.append(threading.current_thread().name))
    try:
        PROBE["call"] = lambda tile: os.kill(os.getpid(), signal.SIGUSR1) if tile.number == 0 else None
        hm.compile(graph).run(**inputs)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert caught == ["MainThread"]
