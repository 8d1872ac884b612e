"""One heap per ordered member list: subgroups side by side, and a process in two of them."""

from __future__ import annotations

import pytest
import torch
from shmem_ranks import own_resources, run, start

from hyper_mpmd import shmem


def _two_pairs(ctx):
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    mine = pairs[ctx.rank // 2]
    heap = shmem.acquire(mine)
    assert heap.members == ((0, 1) if ctx.rank < 2 else (2, 3))
    steps = 20 if ctx.rank < 2 else 200  # different step counts, different allocation sequences
    box = shmem.empty(8 + ctx.rank // 2)
    for step in range(steps):
        shmem.put(box, torch.full_like(box, step * 4 + ctx.rank), 1 - heap.rank)
        shmem.barrier()
        assert float(box[0]) == step * 4 + heap.members[1 - heap.rank]
        shmem.barrier()
        if step % 7 == 0:
            shmem.free(box)
            box = shmem.empty(8 + step)
            shmem.barrier()
    shmem.free(box)
    with pytest.raises(shmem.ShmemValueError, match="not a member"):
        shmem.acquire(pairs[1 - ctx.rank // 2])
    shmem.release()
    return own_resources()[1]


def test_two_groups_of_two_run_at_different_step_counts():
    assert run(_two_pairs, 4, group=True)[:2] is not None


def _in_two(ctx):
    import torch.distributed as dist

    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    heaps = []
    if ctx.rank < 2:
        heaps.append((left, shmem.acquire(left)))
    if ctx.rank > 0:
        heaps.append((right, shmem.acquire(right)))
    if ctx.rank == 1:
        with pytest.raises(shmem.NotAcquired, match="say which with group="):
            shmem.empty(3)
        assert [other["members"] for other in shmem.debug_state()["other_heaps"]] == [(1, 2)]
        assert shmem.debug_state(right)["members"] == (1, 2)
    boxes = [(group, heap, shmem.empty(4, dtype=torch.int32, group=group)) for group, heap in heaps]
    for group, heap, box in boxes:
        box.fill_(ctx.rank * 10)
        shmem.barrier(group=group)
        shmem.get(torch.empty(4, dtype=torch.int32), box, 1 - heap.rank)
    got = []
    for _, heap, box in boxes:
        there = torch.empty(4, dtype=torch.int32)
        shmem.get(there, box, 1 - heap.rank)
        got.append(there.tolist()[0])
    if ctx.rank == 1:  # from one heap into the other
        shmem.put(boxes[0][2], boxes[1][2], boxes[0][1].rank)
    for group, _, box in boxes:
        shmem.barrier(group=group)
        shmem.free(box)
        shmem.release(group)
    return got


def test_a_process_in_two_groups_says_which_it_means():
    assert run(_in_two, 3, group=True) == [[10], [0, 20], [10]]


def _one_dies(ctx):
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shmem.acquire(pairs[ctx.rank // 2])
    flag = shmem.empty(1, dtype=torch.int32)
    flag.zero_()
    shmem.barrier()
    ctx.say("ready")
    if ctx.rank >= 2:
        for _ in range(100):
            shmem.barrier()
        return "unharmed"
    try:
        shmem.wait_signal(flag, 1)
    except shmem.PeerLost as error:
        return error.rank, error.global_rank, str(error)
    return None


def test_a_death_ends_its_own_group_only():
    with start(_one_dies, 4, group=True) as ranks:
        for rank in range(4):
            ranks.hear(rank)
        ranks.kill(0)
        outcomes = ranks.wait()
    assert outcomes[1].value[:2] == (0, 0)
    assert [outcome.value for outcome in outcomes[2:]] == ["unharmed"] * 2


def _named_globally(ctx):
    import torch.distributed as dist

    pair = dist.new_group([1, 2])
    if ctx.rank == 0:
        return None
    heap = shmem.acquire(pair)
    again = dist.new_group([1, 2], use_local_synchronization=True)
    assert shmem.acquire(again) is heap  # the same members in the same order: the same heap
    shmem.release(again)
    ctx.say("ready")
    if ctx.rank == 2:
        ctx.hear()
    try:
        shmem.barrier()
    except shmem.PeerLost as error:
        return error.rank, error.global_rank, str(error)
    return None


def test_a_group_rank_is_named_with_its_global_rank():
    with start(_named_globally, 3, group=True) as ranks:
        ranks.hear(1)
        ranks.hear(2)
        ranks.kill(2)
        rank, global_rank, text = ranks.wait()[1].value
    assert (rank, global_rank) == (1, 2)
    assert "rank 1 (global rank 2) is lost" in text
