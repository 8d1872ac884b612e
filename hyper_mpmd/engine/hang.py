"""What stood where when a launch passed its deadline: as data in names, as text, as a file, and explained.

The data need no plan to be read, so that `hyper-mpmd explain-hang` works on a file that came from another machine. Of
ranks in other processes a rank knows only who they are.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_mpmd.errors import HangFileError
from hyper_mpmd.scheduler.counterexample import Names
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import NONE

DIRECTORY = "HYPER_MPMD_HANG_DIR"  # where files are written; the temporary directory where it is not set
FORMAT, VERSION = "hyper-mpmd hang", 1
_MOST_LINES = 12  # cores told in a message
_MOST_SIGNALLERS = 8  # listed of one event
_ENDINGS = ("circle", "lost signal", "running", "other process", "unknown")  # the first that is found is the root

Standing = tuple[int, int, int, int, int, int]  # rank, queue, task, event, have, need: BlockedCore of the engine


def hang_report(
    plans: Sequence[Plan], blocked: Sequence[Standing], running: Sequence[Standing], seconds: float
) -> dict[str, Any]:
    """The state of every core as plain data: waiting (for what, and for whom), running or done; and the root cause."""
    heads = {(rank, queue): ("waiting", task) for rank, queue, task, *_ in blocked}
    heads |= {(rank, queue): ("running", task) for rank, queue, task, *_ in running}
    lacking = {(rank, queue): (event, have, need) for rank, queue, _, event, have, need in blocked}
    names, by_rank = Names(plans), {plan.rank: plan for plan in plans}
    cores: list[dict[str, Any]] = []
    for plan in plans:
        for queue in np.flatnonzero(plan.sections["queues"]["count"]).tolist():
            state, task = heads.get((plan.rank, queue), ("done", NONE))
            core: dict[str, Any] = {"rank": plan.rank, "core": plan.core_name(queue), "state": state}
            if state != "done":
                core["task"] = plan.task_name(task)
            if state == "waiting":
                event, have, need = lacking[plan.rank, queue]
                core |= {"event": _event(names, plan, event), "have": have, "need": need}
                core["signallers"] = _signallers(by_rank, heads, plan, task, event)
            cores.append(core)
    for rank, queue, _, event, have, need in blocked:
        if queue == NONE:
            core = {"rank": rank, "core": "host", "state": "waiting", "task": "the end of the launch"}
            core |= {"event": _event(names, by_rank[rank], event), "have": have, "need": need}
            cores.append(core | {"signallers": _signallers(by_rank, heads, by_rank[rank], NONE, event)})
    report = {"format": FORMAT, "version": VERSION, "graph": plans[0].graph.name, "policy": plans[0].policy}
    report |= {"ranks": plans[0].ranks, "seen": sorted(by_rank), "seconds": seconds, "cores": cores}
    return report | {"root": root_cause(report)}


def _event(names: Names, plan: Plan, event: int) -> str:
    return "its launch" if event == NONE else names.event(plan.rank, event)


def _signallers(
    plans: Mapping[int, Plan], heads: Mapping[tuple[int, int], tuple[str, int]], plan: Plan, task: int, event: int
) -> list[dict[str, Any]]:
    """The tasks that should signal the event, those that have not first; a rank alone where another process has it."""
    source = plan
    if event == NONE:  # the host has not dispatched the task's launch: some task of those before it has not ended
        launch = plan.sections["launches"][int(plan.tasks[task]["launch"])]
        begin = int(launch["dependency_begin"])
        before = plan.sections["dependencies"][begin : begin + int(launch["dependency_count"])]
        numbers = np.flatnonzero(np.isin(plan.tasks["launch"], before)).tolist()
    else:
        record = plan.sections["events"][event]
        slot, rank = int(record["slot"]), int(record["signaller"])
        if slot != NONE and rank not in plans:
            return [{"rank": rank, "state": "in another process"}]
        source = plan if slot == NONE else plans[rank]
        signals = source.sections["signals"]
        wanted = (signals["rank"] == plan.rank) & (signals["event"] == (event if slot == NONE else slot))
        owner = np.repeat(np.arange(len(source.tasks)), source.tasks["signal_count"])
        numbers = owner[wanted].tolist() if len(owner) == len(signals) else []
    found = [_signaller(heads, source, number) for number in numbers]
    return sorted(found, key=lambda one: one["state"] == "ended")[:_MOST_SIGNALLERS]


def _signaller(heads: Mapping[tuple[int, int], tuple[str, int]], plan: Plan, task: int) -> dict[str, Any]:
    queue = int(plan.queue_of[task])
    state, head = heads.get((plan.rank, queue), ("done", NONE))
    if task < head or state == "done":
        state = "ended"
    elif task > head:
        state = "not started"
    return {"rank": plan.rank, "core": plan.core_name(queue), "task": plan.task_name(task), "state": state}


def root_cause(report: Mapping[str, Any]) -> dict[str, Any]:
    """Follow the waits of every core to where they end: {"kind", "text", "chain"}, the gravest kind found.

    Kinds: circle, lost signal, running, other process, unknown.
    """
    cores = {(core["rank"], core["core"]): core for core in report["cores"]}
    found = [_follow(report, cores, core) for core in report["cores"] if core["state"] == "waiting"]
    found += [_end(report, "running", [core]) for core in report["cores"] if core["state"] == "running"][:1]
    found.append({"kind": "unknown", "text": "no core was waiting or inside a task", "chain": []})
    return min(found, key=lambda one: _ENDINGS.index(one["kind"]))


def _follow(report: Mapping[str, Any], cores: Mapping[Any, Any], core: Mapping[str, Any]) -> dict[str, Any]:
    chain: list[Mapping[str, Any]] = []
    while core["state"] == "waiting":
        if core in chain:
            return _end(report, "circle", chain[chain.index(core) :])
        chain.append(core)
        late = [one for one in core["signallers"] if one["state"] != "ended"]
        if not late:
            return _end(report, "lost signal" if core["signallers"] else "unknown", chain)
        if "core" not in late[0]:
            return _end(report, "other process", chain, late[0]["rank"])
        core = cores[late[0]["rank"], late[0]["core"]]
    return _end(report, "running", [*chain, core])


def _end(report: Mapping[str, Any], kind: str, chain: list[Mapping[str, Any]], rank: int = 0) -> dict[str, Any]:
    last = chain[-1]
    where = _place(report, last)
    if kind == "circle":
        text = "cores wait for one another in a circle: " + ", ".join(_place(report, core) for core in chain)
    elif kind == "running":
        text = f"{where} is inside {last['task']}, which has not ended"
    elif kind == "lost signal":
        text = f"every task that signals {last['event']} has ended, but {where} has {last['have']} of {last['need']}"
    elif kind == "other process":
        text = f"{where} waits for rank {rank}, a process of its own: see the file that rank {rank} wrote"
    else:
        text = f"no task signals {last['event']}, for which {where} waits"
    return {"kind": kind, "text": text, "chain": [f"{_place(report, core)}: {_doing(core)}" for core in chain]}


def _place(report: Mapping[str, Any], place: Mapping[str, Any]) -> str:
    rank = f"rank {place['rank']}, " if report["ranks"] > 1 else ""
    return f"{rank}{place['core']}"


def _doing(core: Mapping[str, Any]) -> str:
    if core["state"] == "done":
        return "done"
    if core["state"] == "running":
        return f"inside {core['task']}"
    return f"{core['task']} waits for {core['event']} (have {core['have']}, need {core['need']})"


def hang_text(report: Mapping[str, Any]) -> str:
    """The root cause, then the cores that wait and whom they wait for; at most 20 lines or so."""
    waiting = [core for core in report["cores"] if core["state"] == "waiting"]
    busy = [core for core in report["cores"] if core["state"] == "running"]
    lines = [f"root cause: {report['root']['text']}"]
    for core in waiting[:_MOST_LINES]:
        line = f"{_place(report, core)}: {_doing(core)}"
        if core["signallers"]:
            one = core["signallers"][0]
            who = f"{one['task']} on {_place(report, one)}" if "core" in one else f"rank {one['rank']}"
            line += f"; from {who}: {one['state']}"
        lines.append(line)
    if len(waiting) > _MOST_LINES:
        lines.append(f"and {len(waiting) - _MOST_LINES} more cores that wait")
    if not waiting:
        lines.append("every core was inside a task, or done")
    lines += [f"{_place(report, core)}: {_doing(core)}" for core in busy[:4]]
    done = sum(core["state"] == "done" for core in report["cores"])
    lines.append(f"{len(waiting)} waiting, {len(busy)} inside a task, {done} done")
    return "\n".join(lines)


def leading_lines(text: str, most_bytes: int) -> str:
    """As many whole lines of the text as fit."""
    while len(text.encode()) > most_bytes and "\n" in text:
        text = text[: text.rindex("\n")]
    return text


def write_hang(report: Mapping[str, Any]) -> Path:
    """Write the data as JSON to a new file in $HYPER_MPMD_HANG_DIR, or the temporary directory. OSError: it cannot."""
    handle, name = tempfile.mkstemp(".json", "hyper-mpmd-hang-", os.environ.get(DIRECTORY) or None)
    with open(handle, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    return Path(name)


def read_hang(path: Path) -> dict[str, Any]:
    """The data of a file that `write_hang` wrote. HangFileError: it is not one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["format"] != FORMAT or report["version"] != VERSION:
            raise HangFileError(
                f"{path} is {report['format']!r}, version {report['version']!r}; expected {FORMAT!r}, version {VERSION}"
            )
        hang_text(report | {"root": root_cause(report)})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, HangFileError):
            raise
        raise HangFileError(f"{path} is not a file that a launch past its deadline wrote: {error!r}") from None
    return dict(report)
