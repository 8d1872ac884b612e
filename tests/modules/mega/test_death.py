"""A rank that dies in a forward or a backward: the others raise PeerLost with its name, in time, and can close."""

import multiprocessing as mp
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from .reference import batch


def train(rank: int, store: str, shape: tuple[int, int], where: str, answer) -> None:
    from .tp_jobs import grid, tp_layer

    ep, tp = shape
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ep * tp)
    module = tp_layer(grid(ep, tp))
    x, ids, weights = batch(40, seed=rank // tp)
    module(x, ids, weights).sum().backward()
    if rank == 1 and where == "forward":
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        y = module(x, ids, weights)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        y.sum().backward()
        answer.send(("nothing", "", 0.0, 0.0))
    except Exception as error:
        told = time.monotonic() - began
        began = time.monotonic()
        module.close()
        answer.send((type(error).__name__, str(error), told, time.monotonic() - began))
    os._exit(0)  # without the process group's own goodbye, which waits for the dead


# On the 2 x 2 grid the last rank neither shares experts with the dead one nor cuts them with it.
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_survivors_are_told_who_died_and_closing_waits_for_nobody(where, shape, tmp_path):
    world = shape[0] * shape[1]
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=train, args=(rank, str(tmp_path / "store"), shape, where, pipes[rank][1]), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    told_by_rank = {}
    try:
        for rank in set(range(world)) - {1}:
            assert pipes[rank][0].poll(60), f"rank {rank} says nothing"
            told_by_rank[rank] = pipes[rank][0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for ends in pipes:
            for end in ends:
                end.close()
    for kind, text, told, closing in told_by_rank.values():
        assert kind == "PeerLost", text
        assert "rank 1" in text
        assert told < 10
        assert closing < 5
