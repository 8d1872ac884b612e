"""A rank that dies, at each moment of its life: the others name it within two seconds, and nothing stays behind.

The victim kills itself (SIGKILL) at the moment, so that each run hits it exactly.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd import shmem
from hyper_mpmd.engine.group import GroupEngine
from hyper_mpmd.tasks import Access, CoreKind, Layout, Op, Tensor, TensorType, Tile, TileRule

from .ranks import Ranks

VICTIM = 1
MOMENTS = (
    "before the first launch",
    "during dispatch",
    "before its rows are pulled",
    "during compute",
    "in a second plan",
    "in close",
    "with a forked child",
)


class Passing(Op):
    """y = x, by a Python kernel in whose third tile the victim dies if DIE names the task."""

    core: ClassVar[CoreKind] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),),),
        outputs=((Access("rows", "cols"),),),
        cut_cols=False,
    )

    def shapes(self, inputs: list[Tensor]) -> tuple[TensorType, ...]:
        return (TensorType(inputs[0].shape, inputs[0].dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        return inputs[0]

    def kernel(self, tile: Tile, *views: Any) -> None:
        x, y = views
        y.copy_(x)
        if tile.task.partition(".")[0] == DIE.get("task") and tile.number == 2:
            die(DIE["note"])


DIE: dict[str, Any] = {}


def die(note: str) -> None:
    Path(note).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def graph(ranks: int, mode: Any) -> hm.TaskGraph:
    """Rows are made, dispatched while more are being made, worked on, and returned."""
    g = hm.TaskGraph("mortal", ranks=ranks)
    rows = g.rows("rows", groups=ranks)
    made = g.vector("make", Passing(), g.input("x", (rows, 16)))
    got = g.comm("dispatch", hm.ops.Dispatch(mode=mode), made)
    g.output("y", g.comm("combine", hm.ops.Combine(), g.vector("work", Passing(), got)))
    return g


def plan_of(rank: int, world: int, rows: int, mode: Any = "push") -> hm.Plan:
    loads = [[rows] * world] * world
    return hm.compile(graph(world, mode), loads, world=world, rank=rank, tiles={"make": (8, 16), "work": (8, 16)})


def mortal_job(rank: int, world: int, moment: str, note: str) -> tuple[str, float, float]:
    """(the error seen, when, seconds that closing took afterwards)."""
    engine = GroupEngine()
    plan = plan_of(rank, world, 40, "pull" if "pulled" in moment else "push")
    x = torch.randn(40 * world, 16)
    seen, when = "nothing", 0.0
    try:
        if rank == VICTIM:
            if moment == "before the first launch":
                die(note)
            if moment == "with a forked child" and os.fork() == 0:
                time.sleep(4)  # keeps descriptors and mappings of the dead rank alive
                os._exit(0)
            if moment in ("during dispatch", "before its rows are pulled", "during compute", "with a forked child"):
                DIE.update(task="make" if moment != "during compute" else "work", note=note)
        for launch in range(4):
            if moment == "in a second plan" and launch == 2:
                plan, x = plan_of(rank, world, 24), x[: 24 * world]
                if rank == VICTIM:
                    DIE.update(task="work", note=note)
            assert torch.equal(engine.run(plan, timeout=20, x=x)["y"], x)
        if rank == VICTIM and moment == "in close":
            engine._drop_buffers()
            die(note)
        engine.close()
    except hm.HyperMpmdError as error:
        seen, when = f"{type(error).__name__}: {error}", time.monotonic()
    begin = time.monotonic()
    engine.close()
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    with pytest.raises(shmem.NotAcquired):
        shmem.barrier()
    return seen, when, time.monotonic() - begin


def check(moment: str, world: int, note: Path) -> None:
    results = Ranks(world, mortal_job, moment, str(note)).results(timeout=40)
    died = float(note.read_text())
    for rank, (kind, value, _) in enumerate(results):
        if rank == VICTIM:
            assert kind == "dead", (kind, value)
            continue
        assert kind == "value", (rank, kind, value)
        seen, when, closing = value
        assert seen.startswith(f"PeerLost: rank {VICTIM} is lost"), (rank, seen)
        assert when - died < 2.0, (rank, when - died)
        assert closing < 0.5, (rank, closing)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("world", [2, 4])
def test_survivors_name_the_dead_within_two_seconds(moment, world, tmp_path):
    check(moment, world, tmp_path / "died")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
def test_fifty_times_in_a_row(moment, tmp_path):
    for number in range(50):
        check(moment, 2, tmp_path / f"died{number}")
