"""Programs of empty tasks in simple shapes, of any size: what planning and running cost where work is free."""

from __future__ import annotations

import numpy as np

from hyper_mpmd.scheduler.backend import get_backend
from hyper_mpmd.scheduler.device import Device, get_device
from hyper_mpmd.scheduler.plan import Plan, PlanHeader
from hyper_mpmd.scheduler.program import TileProgram
from hyper_mpmd.tasks.graph import TaskGraph


def chain(tasks: int) -> TileProgram:
    """Each task waits for the one before."""
    numbers = np.arange(tasks - 1)
    return TileProgram.from_edges(np.ones(tasks, np.int64), np.stack([numbers, numbers + 1], axis=1))


def flat(tasks: int) -> TileProgram:
    """No task waits for any."""
    return TileProgram.from_edges(np.ones(tasks, np.int64), np.zeros((0, 2), np.int64))


def grid(side: int) -> TileProgram:
    """side x side tasks; each waits for its upper and its left neighbour."""
    numbers = np.arange(side * side).reshape(side, side)
    right = np.stack([numbers[:, :-1].ravel(), numbers[:, 1:].ravel()], axis=1)
    down = np.stack([numbers[:-1].ravel(), numbers[1:].ravel()], axis=1)
    return TileProgram.from_edges(np.ones(side * side, np.int64), np.concatenate([right, down]))


def plan_of(program: TileProgram, device: str | Device = "cpu", policy: str = "O1", name: str = "program") -> Plan:
    """A plan of the program, ready to run. Its graph is empty: it has no tensors, and its tasks have no names."""
    target = get_device(device)
    header = PlanHeader(
        graph=TaskGraph(name).to_json(),
        loads={},
        device=target,
        policy=policy,
        rank=program.rank,
        ranks=program.ranks,
        tiles={},
    )
    return Plan(header, get_backend(None).schedule(program, target, policy))
