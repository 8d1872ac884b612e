"""References, lives, the environment and what is refused before anything is taken."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from shmem_ranks import interrupt_after, own_resources, run, start

from hyper_mpmd import shmem
from hyper_mpmd.shmem.lifecycle import registry

HEAP = "HYPER_PARALLEL_SHMEM_HEAP_SIZE"
TIMEOUT = "HYPER_PARALLEL_SHMEM_TIMEOUT_SEC"


def test_references_are_counted_and_the_last_release_closes(heap):
    assert shmem.acquire() is heap
    assert shmem.debug_state()["reference_count"] == 2
    shmem.release()
    assert shmem.debug_state()["state"] == "open"
    shmem.release()
    assert shmem.debug_state()["state"] == "closed"
    with pytest.raises(shmem.NotAcquired, match="acquire"):
        shmem.release()


def test_the_last_release_is_refused_while_allocations_live_and_can_be_tried_again(heap):
    box = shmem.empty(3)
    with pytest.raises(shmem.AllocationsLive, match=r"1 allocation\(s\) live \(id 1\)"):
        shmem.release()
    state = shmem.debug_state()
    assert state["reference_count"] == 1
    assert state["state"] == "open"
    shmem.put(box, torch.ones(3), 0)
    shmem.free(box)
    shmem.release()
    assert shmem.debug_state()["state"] == "closed"


def test_a_failed_native_shutdown_makes_the_process_refuse_further_acquires(heap, monkeypatch):
    class Broken:
        def __getattr__(self, name):
            return getattr(native, name)

        def close(self):
            raise OSError("the driver is gone")

    native = heap.native
    heap.native = Broken()
    with pytest.raises(shmem.ShmemUnavailable, match="the driver is gone"):
        shmem.release()
    with pytest.raises(shmem.ShmemUnavailable, match="start a new process"):
        shmem.acquire()
    assert shmem.debug_state()["state"] == "unavailable"
    assert "the driver is gone" in shmem.debug_state()["last_failure"]
    native.close()
    heap.native = native


def test_the_heap_size_is_read_again_in_each_life(monkeypatch):
    for nbytes in (4096, 1 << 20):
        monkeypatch.setenv(HEAP, str(nbytes))
        shmem.acquire()
        box = shmem.empty(nbytes, dtype=torch.uint8)
        with pytest.raises(shmem.HeapTooSmall, match=rf"set {HEAP} to {nbytes + 64} or more"):
            shmem.empty(1)
        shmem.free(box)
        shmem.release()


def test_the_default_heap_is_a_gibibyte_of_address_space_and_takes_no_memory(monkeypatch):
    monkeypatch.delenv(HEAP, raising=False)
    opened = shmem.acquire()
    assert opened.config.heap_bytes == 1 << 30
    assert os.fstat(_heap_descriptor()).st_blocks * 512 < 1 << 20
    box = shmem.empty(1 << 20)
    assert os.fstat(_heap_descriptor()).st_blocks * 512 > 4 << 20
    shmem.free(box)
    assert os.fstat(_heap_descriptor()).st_blocks * 512 < 1 << 20
    shmem.release()


def _heap_descriptor():
    for name in os.listdir("/proc/self/fd"):
        try:
            if "hyper_mpmd_heap" in os.readlink(f"/proc/self/fd/{name}"):
                return int(name)
        except FileNotFoundError:
            continue
    raise AssertionError("no heap is open")


def test_registered_modules_size_the_default_heap_and_a_fixed_one_that_is_too_small_is_refused(monkeypatch):
    monkeypatch.delenv(HEAP, raising=False)
    shmem.require("experts", (1 << 30) + 1)
    try:
        assert shmem.acquire().config.heap_bytes == (1 << 30) + 4096
        shmem.release()
        monkeypatch.setenv(HEAP, "4096")
        before = own_resources()
        with pytest.raises(shmem.HeapTooSmall, match=rf"need {(1 << 30) + 4096} bytes \(experts {(1 << 30) + 1}\)"):
            shmem.acquire()
        assert own_resources() == before
        assert shmem.debug_state()["reference_count"] == 0
        assert "HeapTooSmall" in shmem.debug_state()["last_failure"]
    finally:
        shmem.require("experts", 0)
    shmem.acquire()  # the refusal took no reference and can be retried
    shmem.release()
    with pytest.raises(shmem.ShmemValueError, match="at least 0"):
        shmem.require("experts", -1)


@pytest.mark.parametrize("value", ["0", "-5", "1e9", "many", "1.5", str(1 << 60)])
def test_a_heap_size_that_cannot_be_is_refused_by_name(monkeypatch, value):
    monkeypatch.setenv(HEAP, value)
    with pytest.raises(shmem.ShmemValueError, match=HEAP):
        shmem.acquire()
    assert shmem.debug_state()["state"] == "closed"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_cannot_be_is_refused_by_name(monkeypatch, value):
    monkeypatch.setenv(TIMEOUT, value)
    with pytest.raises(shmem.ShmemValueError, match=TIMEOUT):
        shmem.acquire()


@pytest.mark.parametrize(
    ("value", "level"), [("0", logging.DEBUG), ("1", logging.INFO), ("2", logging.ERROR), ("7", logging.ERROR)]
)
def test_the_log_level_is_that_of_the_environment_and_others_mean_two(monkeypatch, value, level):
    monkeypatch.setenv("HYPER_PARALLEL_SHMEM_LOG_LEVEL", value)
    monkeypatch.setenv(HEAP, "4096")
    shmem.acquire()
    assert logging.getLogger("hyper_mpmd.shmem").level == level
    shmem.release()


@pytest.mark.parametrize(
    ("rank", "world"), [("0", ""), ("", "2"), ("2", "2"), ("-1", "2"), ("a", "2"), ("0", "100000")]
)
def test_a_rank_and_world_that_do_not_fit_are_refused(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(shmem.ShmemValueError, match="RANK="):
        shmem.acquire()


def test_operations_without_a_heap_say_what_to_do():
    for call in (lambda: shmem.empty(3), shmem.barrier, shmem.release):
        with pytest.raises(shmem.NotAcquired, match="acquire"):
            call()
    with pytest.raises(shmem.ShmemValueError, match=r"shmem\.empty"):
        shmem.free(torch.empty(3))
    assert shmem.debug_state()["state"] == "closed"


def test_the_state_is_readable_at_a_prompt(heap):
    box = shmem.empty(2, 3, dtype=torch.int32)
    text = repr(shmem.debug_state())
    for part in ("state", "'open'", "reference_count", "bytes_used", "bytes_peak", "(2, 3)", "torch.int32", "pid"):
        assert part in text
    state = shmem.debug_state()
    assert state["bytes_used"] == 64
    assert state["bytes_free"] == (1 << 20) - 64
    shmem.free(box)
    assert shmem.debug_state()["bytes_used"] == 0
    assert shmem.debug_state()["bytes_peak"] == 64
    assert shmem.debug_state()["allocations"] == {}


def test_stale_tensors_are_refused_by_every_operation_but_never_unmapped(heap):
    box, other = shmem.empty(16, dtype=torch.int32), shmem.empty(16, dtype=torch.int32)
    view = box[3:5]
    shmem.free(box)
    replacement = shmem.empty(16, dtype=torch.int32)  # at the same address
    assert replacement.data_ptr() == box.data_ptr()
    calls = (
        lambda: shmem.put(box, other, 0),
        lambda: shmem.put(other, box, 0),
        lambda: shmem.get(box, other, 0),
        lambda: shmem.get(other, box, 0),
        lambda: shmem.signal(view[:1], 1, 0),
        lambda: shmem.wait_signal(view[:1], 1),
        lambda: shmem.all_gather(box, other),
        lambda: shmem.all_gather(other, box),
        lambda: shmem.free(box),
        lambda: shmem.free(view),
    )
    for call in calls:
        with pytest.raises(shmem.StaleTensor):
            call()
    shmem.free(other)
    shmem.free(replacement)
    shmem.release()
    view.fill_(3)  # still memory
    assert box[3:5].tolist() == [3, 3]
    with pytest.raises(shmem.StaleTensor):
        shmem.put(view, view, 0)


def test_the_mapping_goes_with_the_last_tensor(heap):
    box = shmem.empty(16)
    view = box[3:5]
    shmem.free(box)
    shmem.release()
    del box
    assert own_resources()[1] == 1
    view.fill_(3)
    del view
    assert own_resources()[1] == 0  # at once: nothing waits for a garbage collection


def test_wrong_arguments_are_refused_with_the_value_and_the_limit(heap):
    box = shmem.empty(4, 16, dtype=torch.int32)
    small = torch.zeros(3, dtype=torch.int32)
    for call, error, text in (
        (lambda: shmem.put(box, small, 0), ValueError, "256 bytes, local_src has 12"),
        (lambda: shmem.get(small, box, 0), ValueError, "12 bytes, remote_src has 256"),
        (lambda: shmem.put(box[0], box[1], 1), ValueError, "target_pe=1: this group has ranks 0 to 0"),
        (lambda: shmem.get(box[0], box[1], -1), ValueError, "source_pe=-1"),
        (lambda: shmem.put(box[0], box[1], True), TypeError, "target_pe is True"),
        (lambda: shmem.put(box[:, 0], small, 0), TypeError, "not contiguous"),
        (lambda: shmem.put(box[0], torch.zeros(32, dtype=torch.int32)[::2], 0), TypeError, "not contiguous"),
        (lambda: shmem.put(torch.zeros(3), small, 0), ValueError, "not in a symmetric heap"),
        (lambda: shmem.put([1], small, 0), TypeError, "remote_dst is a list"),
        (lambda: shmem.put(box[0], torch.zeros(16, device="meta"), 0), TypeError, "on meta"),
        (lambda: shmem.signal(box[0], 1, 0), TypeError, "one int32 element"),
        (lambda: shmem.signal(box.view(torch.float32)[0, 0], 1, 0), TypeError, "one int32 element"),
        (lambda: shmem.signal(box[0, 0], 1 << 31, 0), ValueError, "int32"),
        (lambda: shmem.signal(box[0, 0], 1.0, 0), TypeError, "value is 1.0"),
        (lambda: shmem.signal(box[0, 0], 1, 0, "sub"), ValueError, "set, add"),
        (lambda: shmem.wait_signal(box[0, 0], 1, "=="), ValueError, "eq, ne, gt, ge, lt, le"),
        (lambda: shmem.all_gather(box, small), ValueError, "256 bytes, the inputs of 1 ranks have 12"),
        (lambda: shmem.free(box[:2]), ValueError, "bytes 0 to 128 of allocation 1, which has 256"),
        (lambda: shmem.empty(-1), ValueError, "at least 0"),
        (lambda: shmem.empty(2.5), TypeError, "sizes are ints"),
        (lambda: shmem.empty(2, dtype="float32"), TypeError, "torch.dtype"),
        (lambda: shmem.empty(2, alignment=48), ValueError, "power of two"),
        (lambda: shmem.empty(2, alignment=4 << 20), ValueError, "power of two up to 2097152"),
        (lambda: shmem.empty(1 << 62, 1 << 62), MemoryError, "set HYPER_PARALLEL_SHMEM_HEAP_SIZE to"),
    ):
        with pytest.raises(error, match=text) as caught:
            call()
        assert isinstance(caught.value, shmem.ShmemError)
    assert shmem.debug_state()["bytes_used"] == 256


def test_a_wait_hears_ctrl_c_within_a_tenth_of_a_second_and_goes_on(heap):
    flag = shmem.empty(1, dtype=torch.int32)
    flag.zero_()
    timer = interrupt_after(0.3)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        shmem.wait_signal(flag, 1)
    assert 0.25 < time.monotonic() - began < 0.45
    timer.join()
    with pytest.raises(shmem.GroupAborted, match="rank 0 was ended in wait_signal"):
        shmem.signal(flag, 1, 0)
    shmem.barrier()
    shmem.signal(flag, 1, 0)
    assert shmem.wait_signal(flag, 1) == 1


def test_other_threads_run_while_one_waits_and_close_does_not_pull_the_memory_from_under_it(heap):
    import threading

    flag = shmem.empty(1, dtype=torch.int32)
    flag.zero_()
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(shmem.wait_signal(flag, 5)))
    waiter.start()
    time.sleep(0.1)
    with pytest.raises(shmem.ShmemError, match="another thread"):
        heap.close_here()
    shmem.signal(flag, 5, 0)
    waiter.join(5)
    assert seen == [5]


def test_a_program_that_ends_without_release_ends_quietly():
    code = """
        import torch
        from hyper_mpmd import shmem
        shmem.acquire()
        kept = shmem.empty(3)
        kept.zero_()
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _refused_by_one(ctx):
    """Rank 1's environment is wrong: all ranks say so, and all can try again."""
    import os

    if ctx.rank == 1:
        os.environ[HEAP] = "nothing"
    try:
        shmem.acquire()
        text = ""
    except shmem.ShmemValueError as error:
        text = str(error)
    left = own_resources()[1]
    os.environ[HEAP] = "65536" if ctx.rank else "131072"
    try:
        shmem.acquire()
    except shmem.RendezvousError as error:
        text += " | " + str(error)
    os.environ[HEAP] = "65536"
    shmem.acquire()
    shmem.release()
    return text, left, registry.heaps == {}


@pytest.mark.parametrize("group", [False, True], ids=["endpoint", "gloo"])
def test_a_refusal_of_one_rank_is_that_of_all_and_acquire_can_be_tried_again(group):
    values = run(_refused_by_one, 2, group=group)
    assert values[0] == values[1]
    text, left, empty = values[0]
    assert text.startswith(f"rank 1: {HEAP}='nothing'")
    assert "rank 0 has 131072 bytes, rank 1 has 65536" in text
    assert left == 0
    assert empty


def _alone(ctx):
    began = time.monotonic()
    try:
        if ctx.rank == 0:
            shmem.acquire()
    except shmem.RendezvousTimeout as error:
        return str(error), time.monotonic() - began, own_resources()[1]
    ctx.hear()
    return None


@pytest.mark.parametrize("group", [False, True], ids=["endpoint", "gloo"])
def test_acquire_does_not_wait_longer_than_the_timeout_for_a_rank_that_does_not_come(group):
    with start(_alone, 2, group=group, timeout_sec=0.6) as ranks:
        outcome = ranks.wait_one(0)
        ranks.tell(1)
        assert outcome.error is None, outcome.trace
    text, took, heaps = outcome.value
    assert "in time" in text
    assert took < 2
    assert heaps == 0


def _interrupted(ctx):
    ctx.say("here")
    if ctx.rank == 0:
        try:
            shmem.acquire()
        except KeyboardInterrupt:
            return time.monotonic(), own_resources()[1], shmem.debug_state()["last_failure"]
    ctx.hear()
    return None


@pytest.mark.parametrize("group", [False, True], ids=["endpoint", "gloo"])
def test_acquire_hears_ctrl_c_and_leaves_nothing(group):
    import signal

    with start(_interrupted, 2, group=group) as ranks:
        ranks.hear(0)
        time.sleep(0.3)
        at = ranks.kill(0, signal.SIGINT)
        outcome = ranks.wait_one(0)
        ranks.tell(1)
    assert outcome.error is None, outcome.trace
    ended, heaps, failure = outcome.value
    assert ended - at < 0.25
    assert heaps == 0
    assert failure.startswith("KeyboardInterrupt")


def _out_of_step(ctx):
    """Rank 0 gives up once before rank 1 comes; both then keep trying."""
    if ctx.rank == 0:
        os.environ[TIMEOUT] = "0.3"
        with pytest.raises(shmem.RendezvousTimeout):
            shmem.acquire()
        os.environ[TIMEOUT] = "10"
        ctx.say("gave up")
    else:
        ctx.hear()
    tries = 0
    while True:
        tries += 1
        try:
            shmem.acquire()
            break
        except shmem.RendezvousError:
            assert shmem.debug_state()["reference_count"] == 0
    shmem.barrier()
    shmem.release()
    return tries


@pytest.mark.parametrize("group", [False, True], ids=["endpoint", "gloo"])
def test_ranks_out_of_step_after_a_timeout_come_together_when_they_try_again(group):
    with start(_out_of_step, 2, group=group) as ranks:
        ranks.hear(0)
        ranks.tell(1)
        assert max(ranks.values()) <= 3
