"""Policies: what each does in a line, and the parts that can be left out of one to see what they are worth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hyper_mpmd.errors import UnknownPolicyError

# name -> what it does, in a line
POLICIES: dict[str, str] = {
    "O0": "a launch an op; independent ops run at once on shares of the cores",
    "O1": "one launch; cores walk queues of their own, a tile starts when the rows it needs are there",
    "serial": "a launch an op, one op at a time on all cores of its kind: the baseline",
    "published": "one launch; tiles wait for whole experts, core c of N takes places c, c + N, ... of one queue a kind",
}
# part -> what a policy does without it; written O1-no-rotation
PARTS: dict[str, str] = {
    "rotation": "every rank puts to rank 0 first, then to 1, ...",
    "tiles": "a tile waits for all rows of its expert, not for those that it reads",
    "priorities": "a core takes what became ready first, not what has most work behind it",
    "interleave": "each core kind takes one op after another",
    "bursts": "a peer is put one tile in its turn, not all rows of a tile that will read them",
}


@dataclass(frozen=True)
class Policy:
    """How tasks are put on cores; the native planner has the same struct.

    how: "op" (a launch an op, see `serial`), "list" (list scheduling), "strided" (places of one queue in turn).
    whole_groups: a tile waits for all rows of its group. rotation: puts visit peers in rank-aware order (RATR), and
    tiles of received rows follow it. priorities, interleave, bursts: see PARTS.
    """

    how: Literal["op", "list", "strided"]
    serial: bool = False
    whole_groups: bool = False
    rotation: bool = True
    priorities: bool = True
    interleave: bool = True
    bursts: bool = True


_NAMED = {
    "O0": Policy("op"),
    "O1": Policy("list"),
    "serial": Policy("op", serial=True, bursts=False),
    "published": Policy("strided", whole_groups=True, bursts=False),
}
# What can be left out of which: O0 and serial order ops, so that only puts are left to order.
_PARTS_OF = {
    "op": ("rotation",),
    "list": ("rotation", "tiles", "priorities", "interleave", "bursts"),
    "strided": ("rotation", "interleave"),
}


def get_policy(name: str) -> Policy:
    """The policy of that name, or one without some of its parts: "O1-no-rotation", "O1-no-tiles-no-priorities".

    Errors: UnknownPolicyError.
    """
    base, *without = name.split("-no-") if isinstance(name, str) else [""]
    if base not in _NAMED:
        raise UnknownPolicyError(f"no policy is called {name!r}; known: {', '.join(POLICIES)}")
    policy = _NAMED[base]
    for part in without:
        if part not in _PARTS_OF[policy.how]:
            parts = ", ".join(_PARTS_OF[policy.how])
            raise UnknownPolicyError(f"policy {name!r}: {base} has no part {part!r} to leave out; it has {parts}")
        changes: dict[str, Any] = {"whole_groups": True} if part == "tiles" else {part: False}
        policy = replace(policy, **changes)
    return policy
