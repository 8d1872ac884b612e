"""Plan files with damaged bytes and fields: refused in words, or proven and run to their end; never a crash or hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparing import SMALL

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.plan_file import from_bytes, from_json, to_bytes, to_json
from hyper_mpmd.scheduler.records import SECTIONS

LOADS = [5, 0, 9, 7]
VALUES = (0, 1, 2, 3, 8, 63, 64, 1000, 2**31 - 1, 2**31, R.MAX_INDEX, R.NONE)


def graph(ranks: int) -> hm.TaskGraph:
    g = hm.TaskGraph("ffn", ranks=ranks)
    x = g.input("x", (g.rows("tokens", groups=4), 32))
    w1, w2 = g.input("w1", (4 // ranks, 32, 32)), g.input("w2", (4 // ranks, 16, 32))
    rows = g.comm("dispatch", hm.ops.Dispatch(), x) if ranks > 1 else x
    rows = g.vector("act", hm.ops.SwiGLU(), g.cube("up", hm.ops.GroupedMatmul(), rows, w1))
    rows = g.cube("down", hm.ops.GroupedMatmul(), rows, w2)
    g.output("y", g.comm("combine", hm.ops.Combine(), rows) if ranks > 1 else rows)
    return g


def plans(ranks: int) -> list[list[hm.Plan]]:
    made = []
    for policy in ("O0", "O1"):
        found = hm.compile(graph(ranks), [LOADS] * ranks, world=ranks, device=SMALL, policy=policy)
        made.append(list(found.plans))
    return made


def inputs(ranks: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.ones(sum(LOADS), 32),
        "w1": torch.ones(4 // ranks, 32, 32),
        "w2": torch.ones(4 // ranks, 16, 32),
    }


Damage = Callable[[hm.Plan, np.random.Generator], hm.Plan]


def flipped_bytes(plan: hm.Plan, random: np.random.Generator) -> hm.Plan:
    """Of the binary image, anywhere."""
    image = np.frombuffer(to_bytes(plan), np.uint8).copy()
    for place in random.integers(0, len(image), random.integers(1, 4)):
        image[place] = random.integers(0, 256)
    return from_bytes(image.tobytes())


def changed_words(plan: hm.Plan, random: np.random.Generator) -> hm.Plan:
    """Of the sections in the binary image: numbers that mean something, in fields that the graph does not settle."""
    image = bytearray(to_bytes(plan))
    start = len(image) - sum(8 + len(records) * dtype.itemsize for records, dtype in zip(
        plan.sections.values(), SECTIONS.values(), strict=True))  # fmt: skip
    for name, records in plan.sections.items():
        start += 8
        if name not in ("ops", "tensors") and len(records) and random.integers(0, 3) == 0:
            place = start + 4 * int(random.integers(0, records.nbytes // 4))
            near = int.from_bytes(image[place : place + 4], "little") + int(random.integers(-2, 3))
            value = random.choice(VALUES) if random.integers(0, 3) == 0 else near % 2**32
            image[place : place + 4] = int(value).to_bytes(4, "little")
        start += records.nbytes
    return from_bytes(bytes(image))


def changed_fields(plan: hm.Plan, random: np.random.Generator) -> hm.Plan:
    """Of the JSON."""
    whole = json.loads(to_json(plan))
    for _ in range(random.integers(1, 3)):
        name = str(random.choice(["tasks", "accesses", "waits", "signals", "events", "queues", "launches", "peers"]))
        section = whole[name]
        if section["records"]:
            row = section["records"][random.integers(0, len(section["records"]))]
            column = random.integers(0, len(row))
            row[column] = max(0, row[column] + int(random.integers(-2, 3)))
    return from_json(json.dumps(whole))


def changed_text(plan: hm.Plan, random: np.random.Generator) -> hm.Plan:
    """Of the JSON, anywhere."""
    text = bytearray(to_json(plan).encode())
    for place in random.integers(0, len(text), random.integers(1, 3)):
        text[place] = random.choice(np.frombuffer(b'0123456789,[]{}":-eE. \xff', np.uint8))
    return from_json(bytes(text))


DAMAGE: dict[str, Damage] = {f.__name__: f for f in (flipped_bytes, changed_words, changed_fields, changed_text)}


def attack(damage: Damage, rounds: int, seed: int) -> Counter[str]:
    random = np.random.default_rng(seed)
    verdicts: Counter[str] = Counter()
    worlds: list[Any] = [*((1, members) for members in plans(1)), *((2, members) for members in plans(2))]
    for number in range(rounds):
        ranks, members = worlds[number % len(worlds)]
        victim = int(random.integers(0, ranks))
        try:
            damaged = damage(members[victim], random)
            world = hm.World([damaged if rank == victim else plan for rank, plan in enumerate(members)])
            world.run([inputs(ranks)] * ranks, timeout=20)
            verdicts["proven"] += 1
        except errors.LaunchTimeout:
            raise  # proven, and hung
        except hm.HyperMpmdError as error:
            verdicts[type(error).__name__] += 1
    return verdicts


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_or_proven_and_runs(name):
    verdicts = attack(DAMAGE[name], 250, seed=1)
    assert verdicts["PlanFormatError"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DAMAGE)
def test_twenty_five_thousand_damaged_files_are_refused_or_proven_and_run(name):
    verdicts = attack(DAMAGE[name], 25_000, seed=2)
    print(name, dict(verdicts))
    assert verdicts["PlanFormatError"] > 0
    if name in ("changed_words", "changed_fields"):
        assert all(verdicts[kind] for kind in ("proven", "SignalError", "RaceError", "HangError")), verdicts
