"""A pool of ranks: N processes joined by gloo, started once, that run one picklable function after another.

Starting a process that imports torch takes seconds; a job takes milliseconds. So a test session keeps one pool a world
size and sends it functions. What makes it safe to keep:

- every job gets a default process group of its own and a fresh seed, so nothing leaks from one job into the next;
- a rank that raises leaves its group at once: its peers, waiting in a collective, fail too instead of waiting for ever;
- a rank that dies ends the job as soon as the system reports the death, and a job past its time limit is ended with a
  stack of every rank; the pool then starts new processes for the next job;
- ranks end with the process that started them, however that process ends.

In pytest, one session-scoped fixture is all it takes:

    @pytest.fixture(scope="session")
    def rank_pools():
        with RankPools() as pools:
            yield pools

    def job(scale):                                    # at module level: it travels by name
        t = torch.full((1,), scale * dist.get_rank())
        dist.all_reduce(t)
        return t.item()

    def test_sum(rank_pools):
        assert rank_pools[4].run(job, 2.0) == [12.0] * 4
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, not in __all__

from hyper_mpmd.errors import HyperMpmdError
from hyper_mpmd.testing._rank_process import HOST, rank_main

# After the first error of a job the other ranks have this long (seconds) to report theirs, before they are ended.
_GRACE = 5.0


class RankError(HyperMpmdError, RuntimeError):
    """A job failed. `rank` is the rank that failed first, or None when no single rank did."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankFailed(RankError):
    """The function raised on `rank`. `__cause__` is what it raised, where that could be pickled."""


class RankDied(RankError):
    """The process of `rank` ended during a job. `exitcode` is negative for a signal, as in `multiprocessing`."""

    def __init__(self, message: str, rank: int, exitcode: int | None) -> None:
        super().__init__(message, rank)
        self.exitcode = exitcode


class RanksTimedOut(RankError):
    """Some ranks did not answer in time. `ranks` are those; the message holds the stack of each."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message, ranks[0])
        self.ranks = ranks


class RankPool:
    """`world_size` processes, each one rank of a gloo group, torch on one thread in each.

    The processes start at the first job. One job runs at a time; a pool is not for use by several threads.

    Args:
        world_size: number of ranks, at least 1.
        start_timeout: seconds that starting the processes may take (imports of torch, on a loaded machine).
        collective_timeout: seconds after which gloo itself gives up on a collective.
    """

    def __init__(self, world_size: int, *, start_timeout: float = 120.0, collective_timeout: float = 60.0) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size must be an int of at least 1, got {world_size!r}")
        self.world_size = world_size
        self._start_timeout = start_timeout
        self._collective_timeout = collective_timeout
        self._jobs = 0
        self._processes: list[Any] = []
        self._connections: list[multiprocessing.connection.Connection] = []
        self._store: TCPStore | None = None
        self._stacks: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty while no processes run."""
        return [process.pid for process in self._processes]

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = 60.0,
        per_rank: list[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, *per_rank[rank], **kwargs)` on every rank; the results, in rank order.

        Function, arguments and results travel by pickle. On each rank the default process group is this job's own and
        `torch.manual_seed(0)` has been called.

        Raises:
            RankFailed, RankDied, RanksTimedOut: with the first failing rank named. The pool stays usable.
        """
        if per_rank is not None and len(per_rank) != self.world_size:
            raise ValueError(f"per_rank has {len(per_rank)} entries for {self.world_size} ranks: give one a rank")
        jobs = []
        for rank in range(self.world_size):
            call = (function, (*args, *(per_rank[rank] if per_rank else ())), kwargs)
            jobs.append(pickle.dumps((self._jobs, list(sys.path), pickle.dumps(call))))
        if not self._processes:
            self._start()
        self._jobs += 1
        name = getattr(function, "__qualname__", repr(function))
        try:
            for rank, (connection, job) in enumerate(zip(self._connections, jobs, strict=True)):
                try:
                    connection.send_bytes(job)
                except OSError:
                    raise self._died(rank, name) from None
            return self._collect(name, timeout)
        except RankFailed:
            raise
        except BaseException:
            # Also on KeyboardInterrupt: ranks in the middle of a job cannot take another one.
            self._kill()
            raise

    def close(self) -> None:
        """Ends the processes. May be called again; a later `run` starts new ones."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        # The store lives here, on a port the system picked, so no port is chosen twice and it outlives every job.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="hyper_mpmd_ranks_")
        context = torch.multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                args=(
                    rank,
                    self.world_size,
                    self._store.port,
                    theirs,
                    self._stack_file(rank),
                    self._collective_timeout,
                ),
                name=f"rank {rank} of {self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._collect("start", self._start_timeout)
        except BaseException:
            self._kill()
            raise

    def _collect(self, name: str, timeout: float) -> list[Any]:
        """One answer from every rank, or the first failure."""
        deadline = time.monotonic() + timeout
        pending = set(range(self.world_size))
        results: list[Any] = [None] * self.world_size
        failures: list[tuple[int, str, BaseException | None]] = []
        while pending:
            for rank in self._wait(pending, deadline):
                answer = self._receive(rank)
                if answer is None:
                    raise self._died(rank, name, failures)
                pending.discard(rank)
                succeeded, payload = answer
                if succeeded:
                    results[rank] = pickle.loads(payload)
                else:
                    text, pickled = pickle.loads(payload)
                    failures.append((rank, text, _load_error(pickled)))
                    deadline = min(deadline, time.monotonic() + _GRACE)
            if pending and time.monotonic() >= deadline:
                break
        if failures:
            if pending:  # stuck for good: the next job gets new processes
                self._kill()
            raise self._failed(name, failures) from failures[0][2]
        if pending:
            ranks = sorted(pending)
            raise RanksTimedOut(
                f"{name}: no answer from rank(s) {ranks} of {self.world_size} after {timeout:g} s; raise `timeout` or "
                f"find what they wait for:\n{self._stack_texts(ranks)}",
                ranks,
            )
        return results

    def _wait(self, pending: set[int], deadline: float) -> Iterator[int]:
        """The ranks of `pending` that have answered or died, when some have or the deadline has passed."""
        handles: dict[Any, int] = {}
        for rank in pending:
            handles[self._connections[rank]] = rank
            handles[self._processes[rank].sentinel] = rank
        ready = multiprocessing.connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
        yield from sorted({handles[handle] for handle in ready})

    def _receive(self, rank: int) -> tuple[bool, bytes] | None:
        """The rank's answer, also when it died after giving it; None when it died without one."""
        connection = self._connections[rank]
        try:
            if connection.poll():
                succeeded, payload = pickle.loads(connection.recv_bytes())
                return bool(succeeded), payload
        except (EOFError, OSError):
            pass
        return None

    def _died(self, rank: int, name: str, failures: list[tuple[int, str, Any]] | None = None) -> RankDied:
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        before = "".join(f"\n--- rank {other}, before that:\n{text}" for other, text, _ in failures or [])
        return RankDied(f"{name}: rank {rank} of {self.world_size} died ({how}){before}", rank, code)

    def _failed(self, name: str, failures: list[tuple[int, str, Any]]) -> RankFailed:
        first, text, _ = failures[0]
        later = [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text, _ in failures[1:]]
        after = "\n--- after that: " + "; ".join(later) if later else ""
        return RankFailed(f"{name} failed on rank {first} of {self.world_size}:\n{text}{after}", first)

    def _stack_file(self, rank: int) -> str:
        assert self._stacks is not None
        return str(Path(self._stacks.name) / f"rank{rank}")

    def _stack_texts(self, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {rank}\n{Path(self._stack_file(rank)).read_text()}" for rank in ranks)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None
        if self._stacks is not None:
            self._stacks.cleanup()
            self._stacks = None


class RankPools(Mapping[int, RankPool]):
    """Pools by world size, each started at its first job: `pools[4].run(job)`. Closing it closes them all."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, world_size: int) -> RankPool:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size)
        return self._pools[world_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def close(self) -> None:
        """Ends the processes of every pool."""
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _load_error(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        error = pickle.loads(pickled)
    except Exception:  # an exception class may refuse to be rebuilt from its args; its text is there all the same
        return None
    return error if isinstance(error, BaseException) else None
