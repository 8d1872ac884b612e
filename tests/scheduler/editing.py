"""Plans changed by hand, one small step at a time, for the tests of the prover."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.scheduler import records as R


def copied(plan: hm.Plan) -> dict[str, Any]:
    """The plan's sections, to write in."""
    return {name: records.copy() for name, records in plan.sections.items()}


def remade(plan: hm.Plan, sections: dict[str, Any]) -> hm.Plan:
    """A plan of these sections; nothing is remembered of the old one's proof."""
    return hm.Plan(plan.header, sections, plan.graph)


def part(sections: dict[str, Any], kind: str, task: int) -> Any:
    """The waits, signals or accesses of a task, to write in."""
    record = sections["tasks"][task]
    name = {"wait": "waits", "signal": "signals", "access": "accesses"}[kind]
    return sections[name][int(record[f"{kind}_begin"]) :][: int(record[f"{kind}_count"])]


def _some_task(draw: st.DrawFn, sections: dict[str, Any], kind: str) -> int | None:
    found = np.flatnonzero(sections["tasks"][f"{kind}_count"])
    return int(draw(st.sampled_from(found.tolist()))) if len(found) else None


def drop_wait(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    sections = plans[rank]
    task = _some_task(draw, sections, "wait")
    if task is not None:
        waits = part(sections, "wait", task)
        waits[draw(st.integers(0, len(waits) - 1))] = waits[-1]
        sections["tasks"]["wait_count"][task] -= 1


def drop_signal(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    """And, mostly, lower the threshold with it, and the waits for it."""
    sections = plans[rank]
    task = _some_task(draw, sections, "signal")
    if task is None:
        return
    signals = part(sections, "signal", task)
    place = draw(st.integers(0, len(signals) - 1))
    owner, event = (int(n) for n in signals[place].tolist())
    signals[place] = signals[-1]
    sections["tasks"]["signal_count"][task] -= 1
    if owner == rank and draw(st.integers(0, 3)):
        sections["events"]["threshold"][event] -= 1
        waits = sections["waits"]
        mine = waits["event"] == event
        waits["threshold"][mine] = np.minimum(waits["threshold"][mine], sections["events"]["threshold"][event])


def change_wait(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    waits = plans[rank]["waits"]
    if len(waits):
        place = draw(st.integers(0, len(waits) - 1))
        waits["threshold"][place] = max(0, int(waits["threshold"][place]) + draw(st.sampled_from([-2, -1, -1, 1])))


def redirect_wait(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    """Wait for another event, for all of its signals."""
    sections = plans[rank]
    local = np.flatnonzero(sections["events"]["slot"] == R.NONE)
    if len(sections["waits"]) and len(local):
        event = draw(st.sampled_from(local.tolist()))
        sections["waits"][draw(st.integers(0, len(sections["waits"]) - 1))] = (
            event, sections["events"]["threshold"][event],
        )  # fmt: skip


def swap_waits(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    waits = plans[rank]["waits"]
    if len(waits) > 1:
        a, b = draw(st.integers(0, len(waits) - 1)), draw(st.integers(0, len(waits) - 1))
        waits[[a, b]] = waits[[b, a]]


def move_signal(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    signals = plans[rank]["signals"]
    if len(signals) > 1:
        a, b = draw(st.integers(0, len(signals) - 1)), draw(st.integers(0, len(signals) - 1))
        signals[[a, b]] = signals[[b, a]]


def swap_in_queue(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    sections = plans[rank]
    long = [q for q in sections["queues"].tolist() if q[3] > 1]
    if long:
        _, _, begin, count = draw(st.sampled_from(long))
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        sections["tasks"][[begin + a, begin + b]] = sections["tasks"][[begin + b, begin + a]]


def move_between_queues(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    """The last task of a queue becomes the first of the next, whatever its kind."""
    queues = plans[rank]["queues"]
    full = [q for q in range(len(queues) - 1) if queues["count"][q]]
    if full:
        q = draw(st.sampled_from(full))
        queues["count"][q] -= 1
        queues["begin"][q + 1] -= 1
        queues["count"][q + 1] += 1


def alias(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    """Two tensors of a role partly in the same bytes, on all ranks where peers write them."""
    tensors = plans[rank]["tensors"]
    role = draw(st.sampled_from([R.ROLES["workspace"], R.ROLES["symmetric"]]))
    found = np.flatnonzero((tensors["role"] == role) & (tensors["storage"] == np.arange(len(tensors))))
    if len(found) > 1:
        a, b = (int(draw(st.sampled_from(found.tolist()))) for _ in range(2))
        offset = int(tensors["offset"][b]) + 64 * draw(st.integers(0, 2))
        for sections in plans if role == R.ROLES["symmetric"] else [plans[rank]]:
            same = sections["tensors"]["storage"] == a
            sections["tensors"]["offset"][same] = offset


def drop_dependency(draw: st.DrawFn, plans: list[dict[str, Any]], rank: int) -> None:
    """A launch waits for one launch less."""
    launches = plans[rank]["launches"]
    found = np.flatnonzero(launches["dependency_count"])
    if len(found):
        launches["dependency_count"][draw(st.sampled_from(found.tolist()))] -= 1


EDITS = (drop_wait, drop_signal, change_wait, redirect_wait, swap_waits, move_signal, swap_in_queue,
         move_between_queues, alias, drop_dependency)  # fmt: skip


@st.composite
def edits(draw: st.DrawFn, plans: list[hm.Plan], most: int = 2) -> list[hm.Plan]:
    """The plans after one or a few edits."""
    sections = [copied(plan) for plan in plans]
    for _ in range(draw(st.integers(1, most))):
        draw(st.sampled_from(EDITS))(draw, sections, draw(st.integers(0, len(plans) - 1)))
    return [remade(plan, changed) for plan, changed in zip(plans, sections, strict=True)]
