"""put, get, signal, wait_signal, barrier and all_gather do what they say, between real processes."""

from __future__ import annotations

import time

import pytest
import torch
from shmem_ranks import own_resources, run

from hyper_mpmd import shmem


def _ring(ctx):
    shmem.acquire()
    rows = shmem.empty(ctx.world, 64, dtype=torch.float64)
    slots = shmem.empty(ctx.world, 16, dtype=torch.int32)  # 64 bytes between the slots of different writers
    rows.fill_(-1)
    slots.zero_()
    shmem.barrier()
    mine = torch.arange(64, dtype=torch.float64) + 1000 * ctx.rank
    target = (ctx.rank + 1) % ctx.world
    shmem.put(rows[ctx.rank], mine, target)
    shmem.signal(slots[ctx.rank, :1], 7, target)
    source = (ctx.rank - 1) % ctx.world
    assert shmem.wait_signal(slots[source, :1], 7) == 7
    assert torch.equal(rows[source], torch.arange(64, dtype=torch.float64) + 1000 * source)
    pulled = torch.empty(64, dtype=torch.float64)
    shmem.barrier()
    shmem.get(pulled, rows[source], (source + 1) % ctx.world)
    assert torch.equal(pulled, rows[source])
    shmem.free(rows)
    shmem.free(slots)
    shmem.release()
    return shmem.debug_state()["state"]


@pytest.mark.parametrize("group", [False, True], ids=["endpoint", "gloo"])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_and_signals_go_round_the_ring(world, group):
    assert run(_ring, world, group=group) == ["closed"] * world


def _adds(ctx, times):
    shmem.acquire()
    counter = shmem.empty(1, dtype=torch.int32)
    counter.zero_()
    shmem.barrier()
    for _ in range(times):
        for peer in range(ctx.world):
            shmem.signal(counter, 1, peer, "add")
    seen = shmem.wait_signal(counter, times * ctx.world, "ge")
    shmem.barrier()
    shmem.free(counter)
    shmem.release()
    return seen


def test_adds_of_all_ranks_are_all_counted():
    assert run(_adds, 3, 500) == [1500] * 3


def _message_passing(ctx, rounds):
    """The row put before a signal is there when the signal is, every time."""
    shmem.acquire()
    row = shmem.empty(1024, dtype=torch.int64)
    flag = shmem.empty(32, dtype=torch.int32)
    flag.zero_()
    shmem.barrier()
    peer = 1 - ctx.rank
    for n in range(1, rounds + 1):
        if ctx.rank == n % 2:
            shmem.put(row, torch.full((1024,), n), peer)
            shmem.signal(flag[0], n, peer)
        else:
            shmem.wait_signal(flag[0], n, "ge")
            assert int(row.min()) == int(row.max()) == n
    shmem.barrier()
    shmem.free(row)
    shmem.free(flag)
    shmem.release()


def test_what_was_put_is_seen_with_the_signal_after_it():
    run(_message_passing, 2, 2000)


def _gather(ctx):
    shmem.acquire()
    out = shmem.empty(ctx.world, 3, 5, dtype=torch.bfloat16)
    for step in range(50):
        shmem.all_gather(out, torch.full((3, 5), ctx.rank + 10 * step, dtype=torch.bfloat16))
        wanted = torch.tensor([rank + 10 * step for rank in range(ctx.world)], dtype=torch.bfloat16)
        assert torch.equal(out, wanted[:, None, None].expand(ctx.world, 3, 5))
    nothing = shmem.empty(0)
    if ctx.rank == 0:  # a no-op asks nobody
        shmem.all_gather(nothing, torch.empty(0))
    shmem.free(nothing)
    shmem.free(out)
    shmem.release()


@pytest.mark.parametrize("world", [2, 4])
def test_all_gather_fills_slots_by_rank_again_and_again(world):
    run(_gather, world)


def _barriers(ctx, times):
    shmem.acquire()
    steps = shmem.empty(1, dtype=torch.int32)
    steps.zero_()
    shmem.barrier()
    theirs = torch.empty(1, dtype=torch.int32)
    for n in range(1, times + 1):
        steps.fill_(n)
        shmem.barrier()
        for peer in range(ctx.world):
            shmem.get(theirs, steps, peer)
            assert n <= int(theirs) <= n + 1
    shmem.barrier()
    shmem.free(steps)
    shmem.release()


def test_nobody_leaves_a_barrier_early_even_with_more_ranks_than_processors():
    run(_barriers, 4, 300)


def _announce(ctx):
    shmem.acquire()
    box = shmem.empty(8)
    box.zero_()
    if ctx.rank == 0:
        began = time.monotonic()
        shmem.barrier(blocking=False)
        announced = time.monotonic() - began
        ctx.say("announced")
        shmem.put(box, torch.ones(8), 1)  # waits for rank 1 first
        shmem.barrier()
        result = announced
    else:
        ctx.hear()
        box.fill_(5)  # before this rank's barrier: must not overwrite the put
        shmem.barrier(blocking=False)
        shmem.barrier()
        result = box.tolist()
    shmem.free(box)
    shmem.release()
    return result


def test_an_announced_barrier_returns_at_once_and_holds_before_the_next_operation():
    from shmem_ranks import start

    with start(_announce, 2) as ranks:
        ranks.hear(0)
        time.sleep(0.3)
        ranks.tell(1)
        announced, box = ranks.values()
    assert announced < 0.2
    assert box == [1.0] * 8


def _lives(ctx):
    import os

    before = None
    for life in range(12):
        os.environ["HYPER_PARALLEL_SHMEM_HEAP_SIZE"] = str((life + 1) << 16)
        shmem.acquire()
        assert shmem.debug_state()["config"]["heap_bytes"] == (life + 1) << 16
        box = shmem.empty((life + 1) << 16, dtype=torch.uint8)
        shmem.put(box, torch.full_like(box, life), 1 - ctx.rank)
        shmem.barrier()
        assert int(box[-1]) == life
        shmem.free(box)
        del box
        shmem.release()
        if life == 1:
            before = own_resources()
    return before, own_resources()


@pytest.mark.parametrize("group", [False, True], ids=["endpoint", "gloo"])
def test_many_lives_in_a_row_leave_no_descriptor_mapping_or_thread(group):
    for before, after in run(_lives, 2, group=group):
        assert after == before


def test_every_dtype_and_a_view_of_it_can_be_put(heap):
    for dtype in (torch.uint8, torch.bool, torch.float16, torch.complex64, torch.int64, torch.float8_e4m3fn):
        box = shmem.empty(4, 6, dtype=dtype)
        source = torch.ones(2, 6).to(dtype)
        shmem.put(box[1:3], source, 0)
        assert torch.equal(box[1:3].view(torch.uint8), source.view(torch.uint8))
        shmem.free(box.view(24))


def test_a_put_onto_itself_that_overlaps_moves_the_bytes(heap):
    box = shmem.empty(10, dtype=torch.int32)
    box.copy_(torch.arange(10))
    shmem.put(box[2:], box[:8], 0)
    assert box.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("comparison", "have", "want"),
    [("eq", 3, 3), ("ne", 3, 4), ("gt", 3, 2), ("ge", 3, 3), ("lt", -3, -2), ("le", -(2**31), 2**31 - 1)],
)
def test_each_comparison_lets_the_right_value_through(heap, comparison, have, want):
    flag = shmem.empty((), dtype=torch.int32)
    flag.zero_()
    shmem.signal(flag, have, 0)
    assert shmem.wait_signal(flag, want, comparison) == have


def test_an_add_wraps_at_32_bits(heap):
    flag = shmem.empty(1, dtype=torch.int32)
    shmem.signal(flag, 2**31 - 1, 0)
    shmem.signal(flag, 1, 0, "add")
    assert flag.item() == -(2**31)


@pytest.mark.parametrize("alignment", [1, 64, 4096, 2 << 20])
def test_alignment_is_that_of_the_address(monkeypatch, alignment):
    monkeypatch.setenv("HYPER_PARALLEL_SHMEM_HEAP_SIZE", str(8 << 20))
    shmem.acquire()
    first = shmem.empty(3)
    box = shmem.empty(3, alignment=alignment)
    assert box.data_ptr() % max(alignment, 64) == 0
    shmem.free(first)
    shmem.free(box)
    shmem.release()


def test_autograd_notices_that_a_saved_tensor_was_overwritten_by_get(heap):
    box = shmem.empty(3)
    box.fill_(2)
    x = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    y = (x * saved).sum()
    shmem.get(saved, box, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
