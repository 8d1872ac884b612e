"""A rank that dies in a forward or a backward: the others raise PeerLost with its name, in time, and can close."""

import multiprocessing as mp
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from .reference import batch

WORLD = 2


def train(rank: int, store: str, where: str, answer) -> None:
    from .jobs import ep_layer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    module = ep_layer()
    x, ids, weights = batch(40, seed=rank)
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


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_survivors_are_told_who_died_and_closing_waits_for_nobody(where, tmp_path):
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(WORLD)]
    processes = [
        context.Process(target=train, args=(rank, str(tmp_path / "store"), where, pipes[rank][1]), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    try:
        assert pipes[0][0].poll(60), "the survivor says nothing"
        kind, text, told, closing = pipes[0][0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for ends in pipes:
            for end in ends:
                end.close()
    assert kind == "PeerLost", text
    assert "rank 1" in text
    assert told < 10
    assert closing < 5
