"""A rank dies, hangs, is interrupted or gives up: the others learn of it in time, by name, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from shmem_ranks import own_resources, start

from hyper_mpmd import shmem

NOTICE_SEC = 2.0


def _open(ctx):
    shmem.acquire()
    box = shmem.empty(4096)
    flags = shmem.empty(ctx.world, 16, dtype=torch.int32)
    flags.zero_()
    shmem.barrier()
    return [box, flags]  # a list, so that the one who cleans up can drop the last reference


def _survive(held, work):
    """Runs `work` until it raises PeerLost; then everything that cleans up has to be quick and quiet."""
    try:
        while True:
            work()
    except shmem.PeerLost as error:
        noticed = time.monotonic()
        lost = error.rank, str(error)
    shmem.free(held[0])
    shmem.release()
    closed = time.monotonic()
    assert float(held[0][0]) == float(held[0][0])  # still mapped
    held.clear()
    _, heaps, _ = own_resources()
    return lost, noticed, closed - noticed, heaps, shmem.debug_state()["state"], shmem.debug_state()["last_failure"]


def _in_wait(ctx):
    held = _open(ctx)
    ctx.say("ready")
    return _survive(held, lambda: shmem.wait_signal(held[1][0, 0], 1))


def _in_barrier(ctx):
    held = _open(ctx)
    ctx.say("ready")
    if ctx.rank == 1:
        ctx.hear()
    return _survive(held, shmem.barrier)


def _in_empty(ctx):
    held = _open(ctx)
    ctx.say("ready")
    if ctx.rank == 1:
        ctx.hear()
    return _survive(held, lambda: shmem.free(shmem.empty(8)))


def _in_work(ctx):
    """Puts all the time and never waits."""
    held = _open(ctx)
    source = torch.ones(4096)
    ctx.say("ready")

    def work():
        for peer in range(ctx.world):
            shmem.put(held[0], source, peer)
            shmem.signal(held[1][ctx.rank, :1], 1, peer, "add")

    return _survive(held, work)


def _in_gather(ctx):
    held = _open(ctx)
    source = torch.ones(4096 // ctx.world)
    ctx.say("ready")
    return _survive(held, lambda: shmem.all_gather(held[0][: 4096 // ctx.world * ctx.world], source))


def _in_release(ctx):
    shmem.acquire()
    ctx.say("ready")
    if ctx.rank == 1:
        ctx.hear()
    try:
        shmem.release()
    except shmem.PeerLost as error:
        noticed = time.monotonic()
        lost = error.rank, str(error)
    shmem.release()
    state = shmem.debug_state()
    return lost, noticed, time.monotonic() - noticed, own_resources()[1], state["state"], state["last_failure"]


def _check_survivors(outcomes, killed_at, victim):
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.value is None
            assert outcome.error is None
            continue
        assert outcome.error is None, outcome.trace
        (lost, text), noticed, cleaning, heaps, state, failure = outcome.value
        assert lost == victim
        assert f"rank {victim} is lost" in text
        assert noticed - killed_at < NOTICE_SEC
        assert cleaning < 0.5
        assert heaps == 0
        assert state == "closed"
        assert "PeerLost" in failure


def _kill_once(function, world, group=False):
    with start(function, world, group=group) as ranks:
        for rank in range(world):
            ranks.hear(rank)
        time.sleep(0.05)
        killed_at = ranks.kill(1)
        _check_survivors(ranks.wait(), killed_at, 1)


@pytest.mark.parametrize("function", [_in_wait, _in_barrier, _in_empty, _in_work, _in_gather, _in_release])
def test_survivors_name_the_killed_rank_within_two_seconds(function):
    _kill_once(function, 4)


def test_survivors_with_a_process_group_name_the_killed_rank():
    _kill_once(_in_wait, 2, group=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("function", [_in_wait, _in_barrier, _in_empty, _in_work, _in_gather, _in_release])
def test_fifty_kills_in_a_row_are_all_noticed(function):
    for _ in range(50):
        _kill_once(function, 2)


def _with_child(ctx):
    held = _open(ctx)
    if ctx.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        ctx.say(child)
    else:
        ctx.say(0)
    return _survive(held, lambda: shmem.wait_signal(held[1][0, 0], 1))


def test_a_death_is_noticed_while_a_forked_child_of_the_dead_lives_on():
    with start(_with_child, 2) as ranks:
        child = ranks.hear(1)
        ranks.hear(0)
        killed_at = ranks.kill(1)
        try:
            outcome = ranks.wait_one(0)
            os.kill(child, 0)  # it was alive all the time
        finally:
            os.kill(child, signal.SIGKILL)
        _check_survivors([outcome], killed_at, 1)


def _fork_and_use(ctx):
    box, flags = _open(ctx)
    read, write = os.pipe()
    if ctx.rank == 0:
        child = os.fork()
        if child == 0:
            answers = []
            for attempt in (lambda: shmem.put(box, torch.ones(4096), 1), shmem.barrier, shmem.release):
                try:
                    attempt()
                    answers.append("did it")
                except shmem.ShmemError as error:
                    answers.append(type(error).__name__)
            del box, flags
            os.write(write, ",".join(answers).encode())
            os._exit(0)
        os.waitpid(child, 0)
        answer = os.read(read, 1000).decode()
    else:
        answer = ""
    os.close(read)
    os.close(write)
    shmem.barrier()
    shmem.free(box)
    shmem.free(flags)
    shmem.release()
    return answer


def test_a_forked_child_is_no_rank_and_disturbs_none():
    with start(_fork_and_use, 2) as ranks:
        assert ranks.values()[0] == "StaleTensor,NotAcquired,NotAcquired"


def _interrupted(ctx, where):
    box, flags = _open(ctx)
    act = {"wait": lambda: shmem.wait_signal(flags[0, 0], 1), "barrier": shmem.barrier, "release": shmem.release}[where]
    if where == "release":
        shmem.free(box)
        shmem.free(flags)
    if ctx.rank == 0 and where != "wait":
        ctx.say("waiting")
        ctx.hear()
        act = lambda: shmem.wait_signal(flags[0, 0], 1)  # noqa: E731
        if where == "release":
            act = lambda: time.sleep(0.01)  # noqa: E731
    else:
        ctx.say("waiting")
    try:
        while True:
            act()
            if where == "release":
                shmem.barrier()
    except (KeyboardInterrupt, shmem.GroupAborted) as error:
        ended = time.monotonic()
        what = type(error).__name__, str(error)
    # The group goes on: all meet in the next collective.
    shmem.barrier()
    again = shmem.empty(8)
    again.zero_()
    shmem.barrier()
    shmem.put(again, torch.ones(8), 1 - ctx.rank)
    shmem.barrier()
    assert again.tolist() == [1.0] * 8
    shmem.free(again)
    if where != "release":
        shmem.free(box)
        shmem.free(flags)
    shmem.release()
    return what, ended


@pytest.mark.parametrize("where", ["wait", "barrier", "release"])
def test_ctrl_c_on_one_rank_ends_all_and_the_group_goes_on(where):
    with start(_interrupted, 2, where) as ranks:
        ranks.hear(0)
        ranks.hear(1)
        time.sleep(0.3)
        at = ranks.kill(1, signal.SIGINT)
        time.sleep(0.3)
        if where != "wait":
            ranks.tell(0)
        (other, other_at), (own, own_at) = ranks.values()
    assert own[0] == "KeyboardInterrupt"
    assert own_at - at < 0.25
    assert other[0] == "GroupAborted"
    assert "rank 1 was ended" in other[1]
    if where == "wait":
        assert other_at - at < 0.4


def _deadline(ctx):
    box, flags = _open(ctx)
    heap = shmem.acquire()
    shmem.release()
    heap.native.set_activity("backward of layer 3")
    began = time.monotonic()
    try:
        if ctx.rank == 0:
            shmem.wait_signal(flags[1, :1], 3, "ge")
        else:
            shmem.barrier()
    except shmem.ShmemTimeout as error:
        text = str(error)
        took = time.monotonic() - began
    try:
        shmem.put(box, box, 0)
        refused = ""
    except shmem.ShmemTimeout as error:
        refused = str(error)
    shmem.barrier()
    shmem.put(box, torch.full((4096,), 3.0), 1 - ctx.rank)
    shmem.barrier()
    assert float(box[17]) == 3.0
    generation = shmem.debug_state()["generation"]
    shmem.free(box)
    shmem.free(flags)
    shmem.release()
    return text, took, refused, generation


def test_a_deadline_ends_all_with_one_error_and_the_next_collective_works():
    with start(_deadline, 2, timeout_sec=1) as ranks:
        (text, took, refused, generation), (other, other_took, other_refused, _) = ranks.values()
    assert text == other == refused == other_refused
    assert generation == 2
    assert max(took, other_took) < 2.5
    assert "waited 1 s" in text


def _late(ctx):
    _open(ctx)
    ctx.say("ready")
    heap = shmem.acquire()
    shmem.release()
    if ctx.rank == 1:
        heap.native.set_activity("backward of layer 3")
        ctx.hear()
    try:
        shmem.barrier()
    except shmem.ShmemTimeout as error:
        return str(error)
    return "passed"


def test_a_barrier_names_who_did_not_come_and_what_it_is_doing():
    with start(_late, 3, timeout_sec=2) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        time.sleep(2.3)
        ranks.tell(1)
        texts = ranks.values()
    assert len(set(texts)) == 1
    assert "barrier(); rank 1 has not entered, it is in backward of layer 3" in texts[0]


def _exits(ctx):
    """Rank 1 leaves as a program does at its end, without release."""
    held = _open(ctx)
    ctx.say("ready")
    if ctx.rank == 1:
        return None
    return _survive(held, lambda: shmem.wait_signal(held[1][0, 0], 1))


def test_a_rank_that_simply_ends_is_lost_too():
    with start(_exits, 2) as ranks:
        outcome = ranks.wait()[0]
    assert outcome.error is None, outcome.trace
    assert outcome.value[0][0] == 1


def _last_word(ctx, times):
    """A rank does its part and is gone at once: what it did counts."""
    _box, flags = _open(ctx)
    if ctx.rank == 1:
        shmem.barrier(blocking=False)
        shmem.signal(flags[1, :1], 1, 0)
        os._exit(0)
    time.sleep(0.3)
    shmem.barrier()
    return shmem.wait_signal(flags[1, :1], 1)


def test_what_a_rank_did_before_it_died_counts():
    with start(_last_word, 2, 1) as ranks:
        outcome = ranks.wait()[0]
    assert outcome.error in (None, "PeerLost"), outcome.trace


def _stopped(ctx):
    _box, flags = _open(ctx)
    ctx.say("ready")
    shmem.wait_signal(flags[0, :1], 1)


def test_a_stopped_rank_is_not_taken_for_dead():
    with start(_stopped, 2, timeout_sec=2) as ranks:
        ranks.hear(0)
        ranks.hear(1)
        ranks.kill(1, signal.SIGSTOP)
        time.sleep(2.5)
        ranks.kill(1, signal.SIGCONT)
        for outcome in ranks.wait():
            assert outcome.error == "ShmemTimeout"


def _before_acquire(ctx):
    if ctx.rank == 1:
        ctx.say("here")
        time.sleep(60)
    ctx.say("here")
    try:
        shmem.acquire()
    except shmem.PeerLost as error:
        count = shmem.debug_state()["reference_count"]
        return error.rank, str(error), time.monotonic(), count, own_resources()[1]
    return None


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_killed_before_it_came_to_acquire_is_named_to_all(world):
    with start(_before_acquire, world, group=True) as ranks:
        for rank in range(world):
            ranks.hear(rank)
        time.sleep(0.3)
        at = ranks.kill(1)
        for rank, outcome in enumerate(ranks.wait()):
            if rank == 1:
                continue
            assert outcome.error is None, outcome.trace
            lost, text, noticed, references, heaps = outcome.value
            assert (lost, references, heaps) == (1, 0, 0), text
            assert text.startswith("rank 1 is lost")
            assert noticed - at < NOTICE_SEC
