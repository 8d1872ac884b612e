"""Ranks that do not agree are told so by name, all with the same words, and nothing of the call took effect."""

from __future__ import annotations

import random

import pytest
import torch
from shmem_ranks import run

from hyper_mpmd import shmem


def _disagree(ctx, case):
    shmem.acquire()
    box = shmem.empty(4)
    other = shmem.empty(6)
    calls = {
        "kinds": (shmem.barrier, lambda: shmem.empty(3)),
        "sizes": (lambda: shmem.empty(3), lambda: shmem.empty(300)),
        "alignments": (lambda: shmem.empty(3), lambda: shmem.empty(3, alignment=4096)),
        "frees": (lambda: shmem.free(box), lambda: shmem.free(other)),
        "gathers": (lambda: shmem.all_gather(box, torch.ones(2)), lambda: shmem.all_gather(other, torch.ones(3))),
        "refusal": (lambda: shmem.empty(3), lambda: shmem.empty(-3)),
        "too much": (lambda: shmem.empty(3), lambda: shmem.empty(1 << 40)),
        "part": (lambda: shmem.free(box), lambda: shmem.free(box[:2])),
        "input": (lambda: shmem.all_gather(box, torch.ones(2)), lambda: shmem.all_gather(box, torch.ones(2, 2).t()[0])),
        "release": (shmem.barrier, shmem.release),
    }[case]
    before = shmem.debug_state()
    try:
        calls[ctx.rank]()
        text = "went through"
    except shmem.ShmemError as error:
        text = f"{type(error).__name__}: {error}"
    after = shmem.debug_state()
    assert (before["bytes_used"], before["allocations"]) == (after["bytes_used"], after["allocations"])
    # And the group goes on as if nothing had been.
    third = shmem.empty(2)
    third.zero_()
    shmem.barrier()
    shmem.put(third, torch.ones(2), 1 - ctx.rank)
    shmem.barrier()
    assert third.tolist() == [1, 1]
    for tensor in (box, other, third):
        shmem.free(tensor)
    shmem.release()
    return text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("kinds", ["CollectiveMismatch", "rank 0 barrier()", "rank 1 empty(3"]),
        ("sizes", ["CollectiveMismatch", "empty(3,", "empty(300,"]),
        ("alignments", ["CollectiveMismatch", "alignment=4096"]),
        ("frees", ["CollectiveMismatch", "free(allocation 1)", "free(allocation 2)"]),
        ("gathers", ["CollectiveMismatch", "all_gather((4,)", "all_gather((6,)"]),
        ("refusal", ["ShmemValueError: rank 1:", "at least 0"]),
        ("too much", ["HeapTooSmall: rank 1:", "HYPER_PARALLEL_SHMEM_HEAP_SIZE"]),
        ("part", ["ShmemValueError: rank 1: free() takes whole allocations"]),
        ("input", ["ShmemTypeError: rank 1: input of shape (2,) is not contiguous"]),
        ("release", ["CollectiveMismatch", "release()"]),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_error_and_go_on(case, words):
    texts = run(_disagree, 2, case)
    assert texts[0] == texts[1]
    for word in words:
        assert word in texts[0]


def _gives_up(ctx):
    """Rank 1 raises between two steps; the engine's way of telling the group is the abort word."""
    heap = shmem.acquire()
    flag = shmem.empty(1, dtype=torch.int32)
    flag.zero_()
    shmem.barrier()
    try:
        if ctx.rank == 1:
            heap.abort("no expert 7 on this rank")
            text = "rank 1: no expert 7 on this rank"
        else:
            shmem.wait_signal(flag, 1)
    except shmem.GroupAborted as error:
        text = str(error) if error.rank == 1 else f"wrong rank {error.rank}"
    shmem.barrier()
    shmem.free(flag)
    shmem.release()
    return text


def test_a_rank_that_fails_takes_all_out_with_its_error():
    assert run(_gives_up, 3) == ["rank 1: no expert 7 on this rank"] * 3


def _storm(ctx, rounds):
    """Every rank's next call follows from what took effect so far, so all make the same calls only if effects agree."""
    heap = shmem.acquire()
    draw = random.Random(ctx.rank)
    live, effects, aborts = [], 0, 0
    while effects < rounds:
        try:
            if draw.random() < 0.1:
                heap.abort(f"after {effects}")
            if len(live) < 5:
                live.append(shmem.empty(10 + effects))
            else:
                shmem.free(live[effects % 5])
                live.pop(effects % 5)
            effects += 1
        except shmem.GroupAborted:
            aborts += 1
    allocations = shmem.debug_state()["allocations"]
    return aborts > 0, [(each["offset"], each["nbytes"]) for each in allocations.values()]


@pytest.mark.parametrize("world", [2, 4])
def test_heaps_stay_symmetric_under_a_storm_of_aborts(world):
    values = run(_storm, world, 300, timeout_sec=10)
    assert all(layout == values[0][1] for _, layout in values)
    assert any(aborted for aborted, _ in values)
