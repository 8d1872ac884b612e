"""The TCP endpoint turns away what is no rank, and names what is wrong with one that is."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
from shmem_ranks import own_resources, run, start

from hyper_mpmd import shmem
from hyper_mpmd.shmem.endpoint import parse_endpoint

ENDPOINT = "HYPER_PARALLEL_SHMEM_BOOTSTRAP_ENDPOINT"


@pytest.mark.parametrize(
    "endpoint", ["", "127.0.0.1:8662", "udp://a:1", "tcp://:1", "tcp://a", "tcp://a:0", "tcp://a:99999", "tcp://a:1/x"]
)
def test_an_endpoint_of_another_form_is_refused(endpoint):
    with pytest.raises(shmem.ShmemValueError, match="tcp://host:port"):
        parse_endpoint(endpoint)


def test_an_endpoint_may_be_a_name_or_an_ipv6_address():
    assert parse_endpoint("tcp://localhost:8662") == ("localhost", 8662)
    assert parse_endpoint("tcp://[::1]:1") == ("::1", 1)


def _meet(ctx, rank=None, world=None):
    if ctx.rank == 1:
        ctx.hear()
        os.environ["RANK"] = str(ctx.rank if rank is None else rank)
        os.environ["WORLD_SIZE"] = str(ctx.world if world is None else world)
    ctx.say(os.environ[ENDPOINT])
    try:
        shmem.acquire()
    except shmem.ShmemError as error:
        return type(error).__name__, str(error), time.monotonic(), own_resources()[1]
    shmem.barrier()
    shmem.release()
    return "met"


def test_strangers_at_the_port_are_turned_away_and_the_ranks_meet():
    with start(_meet, 2) as ranks:
        address = parse_endpoint(ranks.hear(0))
        strangers = []
        length = struct.Struct("!I").pack
        greetings = (b"GET / HTTP/1.1\r\n\r\n", length(2) + b"[]", b"\xff" * 8, length(9) + b"no", b"")
        for greeting in greetings:
            for _ in range(100):
                try:
                    strangers.append(socket.create_connection(address, timeout=5))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            strangers[-1].sendall(greeting)
        ranks.tell(1)
        assert ranks.values() == ["met", "met"]
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(
    ("rank", "world", "words"),
    [(2, 3, "two processes came|as rank 2"), (1, 2, "a world of 2, rank 0 for one of 3")],
)
def test_a_rank_that_does_not_fit_is_named_to_all(rank, world, words):
    with start(_meet, 3, rank, world, timeout_sec=5) as ranks:
        ranks.hear(0)
        ranks.hear(2)
        time.sleep(0.2)
        ranks.tell(1)
        values = [outcome.value for outcome in ranks.wait()]
    for name, text, _, heaps in values:
        assert name == "RendezvousError"
        assert any(word in text for word in words.split("|")), text
        assert heaps == 0


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_at_the_endpoint_is_named_to_those_who_wait(victim):
    with start(_meet, 3) as ranks:
        ranks.hear(0)
        ranks.hear(2)
        time.sleep(0.3)
        at = ranks.kill(victim)
        name, text, noticed, heaps = ranks.wait_one(2 - victim).value
    assert name == "PeerLost"
    assert f"rank {victim}" in text
    assert noticed - at < 2
    assert heaps == 0


def test_a_port_in_use_is_said_to_be(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv(ENDPOINT, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(shmem.RendezvousError, match="cannot listen"):
            shmem.acquire()


def test_a_bad_endpoint_is_refused_before_anything_is_taken(monkeypatch):
    monkeypatch.setenv(ENDPOINT, "shm://here")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = own_resources()
    with pytest.raises(shmem.ShmemValueError, match="tcp://host:port"):
        shmem.acquire()
    assert own_resources() == before


EXAMPLE = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "ring.py")


def _ring_example(ctx, steps):
    runpy.run_path(EXAMPLE)["ring"](steps)
    return "done"


@pytest.mark.parametrize("group", [False, True], ids=["endpoint", "gloo"])
def test_the_ring_example_verifies_its_rows(group):
    assert run(_ring_example, 3, 7, group=group) == ["done"] * 3


@pytest.mark.slow
def test_the_ring_example_starts_its_ranks_itself():
    command = [sys.executable, EXAMPLE, "--ranks", "2", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "3 steps round 2 ranks: every row arrived as sent" in done.stdout


@pytest.mark.slow
def test_the_ring_example_runs_under_torchrun():
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "every row arrived as sent" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_random_moments_of_acquire_and_release_are_noticed_by_name():
    for turn in range(50):
        with start(_lives_forever, 3, group=True) as ranks:
            for rank in range(3):
                ranks.hear(rank)
            time.sleep(0.002 * turn)
            at = ranks.kill(1, signal.SIGKILL)
            for rank in (0, 2):
                outcome = ranks.wait_one(rank, 15)
                assert outcome.error == "PeerLost", outcome.trace
                assert "rank 1 is lost" in outcome.text
                assert outcome.at - at < 2.5


def _lives_forever(ctx):
    ctx.say("begun")
    while True:
        shmem.acquire()
        box = shmem.empty(100)
        shmem.barrier()
        shmem.free(box)
        del box
        shmem.release()
