"""Real rank processes for the tests of symmetric memory: forked from a server that has imported torch already."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch.distributed", "hyper_mpmd.shmem", "pytest"])


@dataclass
class Outcome:
    """How one rank ended: its return value, or its error by class name and text, or neither when it was killed."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""
    at: float = 0.0  # time.monotonic() of the end


class Context:
    """What a rank's function is given: who it is, and a line to the test."""

    def __init__(self, rank: int, world: int, line: Connection) -> None:
        self.rank = rank
        self.world = world
        self._line = line

    def say(self, value: object) -> None:
        self._line.send(("said", value, time.monotonic()))

    def hear(self) -> Any:
        return self._line.recv()


class Ranks:
    """Running ranks. `wait` gives their outcomes; whoever is left at the end of the `with` is killed."""

    def __init__(self, processes: list[Any], lines: list[Connection]) -> None:
        self.processes = processes
        self.lines = lines

    def hear(self, rank: int, timeout: float = 30.0) -> Any:
        if not self.lines[rank].poll(timeout):
            raise AssertionError(f"rank {rank} said nothing in {timeout} s")
        kind, value, *rest = self.lines[rank].recv()
        if kind != "said":
            raise AssertionError(f"rank {rank} ended instead of speaking: {kind} {value} {rest}")
        return value

    def tell(self, rank: int, value: object = None) -> None:
        self.lines[rank].send(value)

    def kill(self, rank: int, how: int = signal.SIGKILL) -> float:
        os.kill(self.processes[rank].pid, how)
        return time.monotonic()

    def wait(self, timeout: float = 30.0) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        return [self.wait_one(rank, deadline - time.monotonic()) for rank in range(len(self.processes))]

    def wait_one(self, rank: int, timeout: float = 30.0) -> Outcome:
        deadline = time.monotonic() + timeout
        line, outcome = self.lines[rank], Outcome()
        try:
            while True:
                if not line.poll(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"rank {rank} was not done after {timeout:.0f} s")
                kind, *rest = line.recv()
                if kind == "value":
                    outcome = Outcome(value=rest[0], at=rest[1])
                    break
                if kind == "error":
                    outcome = Outcome(error=rest[0], text=rest[1], trace=rest[2], at=rest[3])
                    break
        except (EOFError, ConnectionResetError):
            pass
        self.processes[rank].join(max(0.1, deadline - time.monotonic()))
        return outcome

    def values(self, timeout: float = 30.0) -> list[Any]:
        outcomes = self.wait(timeout)
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is None, f"rank {rank}: {outcome.trace}"
        return [outcome.value for outcome in outcomes]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world: int,
    line: Connection,
    environment: dict[str, str],
    store: str | None,
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    torch.set_num_threads(1)
    if store is not None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        value = function(Context(rank, world, line), *arguments)
        line.send(("value", value, time.monotonic()))
    except BaseException as error:
        line.send(("error", type(error).__name__, str(error), traceback.format_exc(), time.monotonic()))
    if store is not None:
        # destroy_process_group would wait for what a rank that gave up has left open.
        line.close()
        os._exit(0)


@contextlib.contextmanager
def start(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    group: bool = False,
    timeout_sec: float = 20,
    environment: dict[str, str] | None = None,
) -> Iterator[Ranks]:
    """`world` ranks that run `function(context, *arguments)`, meeting at an endpoint or, with `group`, through gloo."""
    env = {
        "RANK": "",
        "WORLD_SIZE": str(world),
        "HYPER_PARALLEL_SHMEM_BOOTSTRAP_ENDPOINT": f"tcp://127.0.0.1:{free_port()}",
        "HYPER_PARALLEL_SHMEM_TIMEOUT_SEC": str(timeout_sec),
        "HYPER_PARALLEL_SHMEM_HEAP_SIZE": str(8 << 20),
        "GLOO_SOCKET_IFNAME": "lo",
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store") if group else None
        processes, lines = [], []
        try:
            for rank in range(world):
                here, there = _SERVER.Pipe()
                process = _SERVER.Process(
                    target=_rank_main,
                    args=(function, rank, world, there, {**env, "RANK": str(rank)}, store, arguments),
                )
                process.start()
                there.close()
                processes.append(process)
                lines.append(here)
            yield Ranks(processes, lines)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
            for line in lines:
                line.close()


def run(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 30.0, **options: Any) -> list[Any]:
    """The ranks' return values; an error of any fails the test with its traceback."""
    with start(function, world, *arguments, **options) as ranks:
        return ranks.values(timeout)


def own_resources() -> tuple[int, int, int]:
    """Descriptors, mapped heaps and threads of this process."""
    with open("/proc/self/maps") as maps:
        heaps = sum("hyper_mpmd_heap" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), heaps, len(os.listdir("/proc/self/task"))


def interrupt_after(seconds: float) -> threading.Timer:
    """Ctrl-C for this process, later."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer
