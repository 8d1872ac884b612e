"""The pool of ranks: results in rank order, the failing rank named, nothing hangs, and it works again afterwards."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from hyper_mpmd.testing import RankDied, RankFailed, RankPool, RanksTimedOut


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def sum_of_ranks(scale, own=0):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return scale * total.item() + own


def fail_on(rank, error):
    if dist.get_rank() == rank:
        raise error
    dist.barrier()


def fail_on_while_a_subgroup_waits(rank, error):
    group = dist.new_group([0, 1])
    if dist.get_rank() == rank:
        raise error
    dist.barrier(group)


def die_on(rank, code):
    if dist.get_rank() == rank:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    dist.barrier()


def sleep_on(rank, seconds):
    if dist.get_rank() == rank:
        time.sleep(seconds)


def sleep_and_ignore_the_group(rank, seconds):
    if dist.get_rank() == rank:
        time.sleep(seconds)
    else:
        raise ValueError("the other rank sleeps")


def state_left_behind():
    groups = len(dist.distributed_c10d._world.pg_map)
    dist.new_group([0])
    return dist.get_world_size(), torch.get_num_threads(), groups, torch.rand(()).item()


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("stays here")


def return_a_lambda():
    return lambda: None


def test_results_come_in_rank_order_with_arguments_of_each_rank(pool):
    assert pool.run(sum_of_ranks, 10.0, per_rank=[(1,), (2,)]) == [11.0, 12.0]


def test_every_job_starts_clean(pool):
    first, second = pool.run(state_left_behind), pool.run(state_left_behind)
    assert first == second
    assert first[0][:3] == (2, 1, 1)


def test_processes_are_started_once(pool):
    pool.run(sum_of_ranks, 1.0)
    pids = pool.pids
    pool.run(sum_of_ranks, 1.0)
    assert pool.pids == pids


@pytest.mark.parametrize("job", [fail_on, fail_on_while_a_subgroup_waits])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_names_its_rank_and_leaves_the_processes_usable(pool, rank, job):
    pool.run(sum_of_ranks, 1.0)
    pids = pool.pids
    with pytest.raises(RankFailed, match=rf"failed on rank {rank} of 2(.|\n)*ValueError: seven") as caught:
        pool.run(job, rank, ValueError("seven"))
    assert caught.value.rank == rank
    assert isinstance(caught.value.__cause__, ValueError)
    assert pool.run(sum_of_ranks, 1.0) == [1.0, 1.0]
    assert pool.pids == pids


def test_an_error_that_cannot_travel_comes_back_as_text(pool):
    with pytest.raises(RankFailed, match=r"return_a_lambda failed on rank [01]"):
        pool.run(return_a_lambda)
    with pytest.raises(RankFailed, match=r"Unpicklable"):
        pool.run(raise_unpicklable)


def raise_unpicklable():
    raise Unpicklable("text only")


@pytest.mark.parametrize("code", [3, -signal.SIGKILL])
def test_a_dead_rank_ends_the_job_at_once_and_the_next_job_works(pool, code):
    pool.run(sum_of_ranks, 1.0)
    start = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 of 2 died") as caught:
        pool.run(die_on, 1, code)
    assert time.monotonic() - start < 20.0  # gloo alone would wait 60
    assert (caught.value.rank, caught.value.exitcode) == (1, code)
    assert pool.run(sum_of_ranks, 1.0) == [1.0, 1.0]


def test_a_rank_that_died_between_jobs_is_noticed(pool):
    pool.run(sum_of_ranks, 1.0)
    os.kill(pool.pids[0], signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(RankDied, match="rank 0 of 2 died"):
        pool.run(sum_of_ranks, 1.0)
    assert pool.run(sum_of_ranks, 1.0) == [1.0, 1.0]


def test_a_job_past_its_limit_is_ended_with_the_stack_of_the_rank(pool):
    pool.run(sum_of_ranks, 1.0)
    start = time.monotonic()
    with pytest.raises(RanksTimedOut, match=r"rank\(s\) \[1\] of 2 after 0.5 s(.|\n)*in sleep_on") as caught:
        pool.run(sleep_on, 1, 60.0, timeout=0.5)
    assert time.monotonic() - start < 20.0
    assert caught.value.ranks == [1]
    assert pool.run(sum_of_ranks, 1.0) == [1.0, 1.0]


def test_an_error_beside_a_rank_that_never_answers_is_the_one_reported(pool):
    start = time.monotonic()
    with pytest.raises(RankFailed, match="the other rank sleeps"):
        pool.run(sleep_and_ignore_the_group, 0, 60.0)
    assert time.monotonic() - start < 30.0
    assert pool.run(sum_of_ranks, 1.0) == [1.0, 1.0]


def test_closing_leaves_no_process_and_a_later_job_starts_new_ones():
    with RankPool(1) as pool:
        assert pool.run(sum_of_ranks, 1.0) == [0.0]
        pids = pool.pids
    assert pool.pids == []
    assert not any(_alive(pid) for pid in pids)


def test_ranks_end_when_the_starting_process_is_killed():
    code = (
        "import sys; from hyper_mpmd.testing import RankPool; import os\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(1); pool.run(os.getpid); print(*pool.pids, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    (pid,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 10.0
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_wrong_sizes_are_refused(pool):
    with pytest.raises(ValueError, match="got 0"):
        RankPool(0)
    with pytest.raises(ValueError, match="1 entries for 2 ranks"):
        pool.run(sum_of_ranks, 1.0, per_rank=[(1,)])


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
