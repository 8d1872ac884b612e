"""Jobs that the tests of the group engine run in each rank, and ranks of their own that may be killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import hyper_mpmd as hm

from .graphs import moe, moe_inputs

EXPERTS = 8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def step_inputs(
    ranks: int, seed: int, most: int = 40
) -> tuple[list[dict[str, Any]], dict[str, Any], list[torch.Tensor]]:
    """Inputs of each rank, loads and the expected outputs of one random step."""
    made = torch.Generator().manual_seed(seed)
    tokens = [int(torch.randint(0, most, (1,), generator=made)) for _ in range(ranks)]
    ids = [torch.randint(0, EXPERTS, (count, 2), generator=made) for count in tokens]
    inputs, counts, expected = moe_inputs(ids, seed=seed)
    return inputs, {"batch": [[count] for count in tokens], "routed": counts}, expected


def _main(
    rank: int, world: int, endpoint: str, job: Callable[..., Any], answer: Connection, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), HYPER_PARALLEL_SHMEM_BOOTSTRAP_ENDPOINT=endpoint,
        HYPER_PARALLEL_SHMEM_TIMEOUT_SEC="30",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        answer.send(("value", job(rank, world, *arguments), time.monotonic()))
    except BaseException as error:
        answer.send((type(error).__name__, str(error), time.monotonic()))


class Ranks:
    """Processes that each run job(rank, world, *arguments) once; any of them may be killed."""

    def __init__(self, world: int, job: Callable[..., Any], *arguments: Any) -> None:
        # Forked from a server that has imported torch and started no thread: a start takes milliseconds, not seconds.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["hyper_mpmd.engine.group", "tests.engine.graphs"])
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.answers = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(rank, world, endpoint, job, there, arguments), daemon=True)
            process.start()
            there.close()
            self.answers.append(here)
            self.processes.append(process)

    def kill(self, rank: int) -> float:
        """Returns when it was done."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)  # type: ignore[arg-type]
        return time.monotonic()

    def interrupt(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGINT)  # type: ignore[arg-type]

    def results(self, timeout: float = 60) -> list[tuple[str, Any, float]]:
        """(kind, value or text, time) of each rank; kind is "value", an error's class, or "dead"."""
        found = []
        until = time.monotonic() + timeout
        for answer, process in zip(self.answers, self.processes, strict=True):
            try:
                came = answer.poll(max(0.0, until - time.monotonic()))
                found.append(answer.recv() if came else ("hung", None, time.monotonic()))
            except EOFError:
                found.append(("dead", process.exitcode, time.monotonic()))
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
        return found


def steps_in_a_loop(rank: int, world: int, count: int, most: int = 40) -> int:
    """`count` launches with random loads, each compared with the expected output."""
    from hyper_mpmd.engine.group import GroupEngine

    right = 0
    engine = GroupEngine()
    for step in range(count):
        inputs, loads, expected = step_inputs(world, step, most)
        plan = hm.compile(moe(world), loads, world=world, rank=rank, policy="O0" if step % 3 == 0 else "O1")
        out = engine.run(plan, timeout=25, **inputs[rank])["y"]
        scale = expected[rank].abs().max() if expected[rank].numel() else 1
        if expected[rank].numel() and not (out - expected[rank]).abs().max() <= 1e-5 * scale:
            raise AssertionError(f"step {step}: wrong output")
        right += 1
    engine.close()
    return right
