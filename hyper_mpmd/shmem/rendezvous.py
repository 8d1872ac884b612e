"""How ranks find each other before they share memory: rounds in which everyone tells everyone a few words (JSON).

Three channels with one shape: a rank alone, a torch process group, and a TCP endpoint where rank 0 listens. None
leaves a thread, a socket or a file behind.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hyper_mpmd import _native
from hyper_mpmd.shmem.errors import PeerLost, RendezvousError, RendezvousTimeout

Message = dict[str, Any]
# Called again and again while waiting; raises when it is known that waiting is in vain.
Watch = Callable[[], None]

POLL_SEC = 0.002
ROUND_BYTES = 4096  # of one message between ranks of a process group


class Exchange(Protocol):
    """One rendezvous of `world` ranks."""

    rank: int
    world: int

    def all(self, message: Message, deadline: float, watch: Watch) -> list[Message]:
        """Every rank's message, by rank. `deadline` is on time.monotonic's clock. Raises RendezvousError."""

    def settle(self, lost: int, text: str) -> tuple[int, str]:
        """This rank found rank `lost` dead: which death, in which words, all ranks name. The first to find one says."""

    def close(self) -> None: ...


class SoloExchange:
    """A rank that is its own world."""

    rank = 0
    world = 1

    def all(self, message: Message, deadline: float, watch: Watch) -> list[Message]:
        return [message]

    def settle(self, lost: int, text: str) -> tuple[int, str]:
        return lost, text

    def close(self) -> None:
        return


class RollCall:
    """Who has come to acquire() of this group, in the store of its process group: names who is missing when that fails.

    A process group notices a dead neighbour but cannot say which rank it was, and the ranks behind that neighbour wait
    on. The store is only read and written without waiting; where there is none, names are missing and nothing else.
    """

    LOOK_EVERY_SEC = 0.2
    GRACE_SEC = 1.0  # for ranks to come that see the failure later, and for a dying process to count as ended

    def __init__(self, rank: int, members: tuple[int, ...]) -> None:
        self._rank = rank
        self._members = members
        # Not by attempt: a rank that came once is known for good, and a group that broke once stays broken.
        self._prefix = f"hyper_mpmd/shmem/{'-'.join(map(str, members))}"
        self._seen: dict[int, tuple[int, int]] = {}
        self._next_look = 0.0
        self._store: Any = None
        with contextlib.suppress(Exception):
            self._store = dist.distributed_c10d._get_default_store()
            pid, start = _native.process_identity()
            self._store.set(f"{self._prefix}/{rank}", f"{pid} {start}")

    def look(self) -> None:
        """Raises PeerLost for a rank that came and has died, RendezvousError when another rank saw the group fail."""
        now = time.monotonic()
        if self._store is None or now < self._next_look:
            return
        self._next_look = now + self.LOOK_EVERY_SEC
        failed = False
        with contextlib.suppress(RuntimeError):  # a store whose host died: whoever else knows more will say so
            self._read()
            failed = self._store.check([f"{self._prefix}/failed"])
        if failed:  # before looking at who lives: whoever saw it first may have left since
            raise RendezvousError("the process group failed on another rank")
        self._check_alive()

    def name_the_missing(self, error: Exception) -> RendezvousError | PeerLost:
        """What to raise when the process group failed with `error`; the first rank to know decides for all."""
        lost, text = -1, f"the process group failed while ranks met in acquire(): {error}"
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._prefix}/failed", "1")
                lost, text = self._missing(error) or (lost, text)
        if lost < 0:
            return RendezvousError(text)
        lost, text = self.settle(lost, text)
        return PeerLost(text, lost, self._members[lost])

    def settle(self, lost: int, text: str) -> tuple[int, str]:
        """The verdict of the first rank that came to one; this rank's where nobody has."""
        with contextlib.suppress(RuntimeError, AttributeError):  # no store, or its host is gone
            decided = self._store.compare_set(f"{self._prefix}/verdict", "", f"{lost} {text}")
            return self._parse(decided)
        return lost, text

    @staticmethod
    def _parse(verdict: bytes) -> tuple[int, str]:
        number, _, text = verdict.decode().partition(" ")
        return int(number), text

    def _missing(self, error: Exception) -> tuple[int, str] | None:
        until = time.monotonic() + self.GRACE_SEC
        while time.monotonic() < until:
            if self._store.check([f"{self._prefix}/verdict"]):
                return self._parse(self._store.get(f"{self._prefix}/verdict"))
            self._read()
            try:
                self._check_alive()
            except PeerLost as lost:
                return lost.rank, str(lost)
            time.sleep(POLL_SEC)
        absent = [rank for rank in range(len(self._members)) if rank not in self._seen and rank != self._rank]
        if not absent:
            return None
        names = ", ".join(f"rank {rank}" for rank in absent)
        return absent[0], f"{names} is lost: the process group broke and it never came to acquire() ({error})"

    def _read(self) -> None:
        for rank in range(len(self._members)):
            key = f"{self._prefix}/{rank}"
            if rank not in self._seen and self._store.check([key]):
                pid, start = self._store.get(key).split()
                self._seen[rank] = int(pid), int(start)

    def _check_alive(self) -> None:
        for rank, (pid, start) in self._seen.items():
            if not _native.process_alive(pid, start):
                text = f"rank {rank} is lost: its process {pid} ended while ranks met in acquire()"
                rank, text = self.settle(rank, text)
                raise PeerLost(text, rank, self._members[rank])


class GroupExchange:
    """Through a torch process group that can gather CPU tensors (gloo, or a mixed backend with it)."""

    def __init__(self, group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._roll_call = RollCall(self.rank, members)

    def all(self, message: Message, deadline: float, watch: Watch) -> list[Message]:
        text = json.dumps(message).encode()
        if len(text) > ROUND_BYTES:
            raise RendezvousError(f"a rendezvous message has {len(text)} bytes, {ROUND_BYTES} fit")
        mine = torch.zeros(ROUND_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        theirs = [torch.zeros_like(mine) for _ in range(self.world)]
        try:
            work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
            # Polled instead of waited for: a process group's own wait hears neither Ctrl-C nor our deadline.
            while not work.is_completed():
                watch()
                self._roll_call.look()
                if time.monotonic() > deadline:
                    raise RendezvousTimeout("not every rank of the process group came to acquire() in time")
                time.sleep(POLL_SEC)
            work.wait()
        except PeerLost:
            raise
        except RuntimeError as error:  # the group's own errors, and RendezvousError
            if isinstance(error, RendezvousTimeout):
                raise
            watch()  # knows better who is gone, where that can be known
            raise self._roll_call.name_the_missing(error) from error
        return [json.loads(bytes(each.numpy()).rstrip(b"\0")) for each in theirs]

    def settle(self, lost: int, text: str) -> tuple[int, str]:
        return self._roll_call.settle(lost, text)

    def close(self) -> None:
        return
