"""How ranks find each other before they share memory: rounds in which everyone tells everyone a few words (JSON).

Three channels with one shape: a rank alone, a torch process group, and a TCP endpoint where rank 0 listens. None
leaves a thread, a socket or a file behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hyper_mpmd.shmem.errors import RendezvousError, RendezvousTimeout

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

    def close(self) -> None: ...


class SoloExchange:
    """A rank that is its own world."""

    rank = 0
    world = 1

    def all(self, message: Message, deadline: float, watch: Watch) -> list[Message]:
        return [message]

    def close(self) -> None:
        return


class GroupExchange:
    """Through a torch process group that can gather CPU tensors (gloo, or a mixed backend with it)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

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
                if time.monotonic() > deadline:
                    raise RendezvousTimeout("not every rank of the process group came to acquire() in time")
                time.sleep(POLL_SEC)
            work.wait()
        except RendezvousError:
            raise
        except RuntimeError as error:
            watch()  # knows better who is gone, where that can be known
            raise RendezvousError(f"the process group failed while ranks met in acquire(): {error}") from error
        return [json.loads(bytes(each.numpy()).rstrip(b"\0")) for each in theirs]

    def close(self) -> None:
        return
