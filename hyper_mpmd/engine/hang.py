"""What stood where when a launch passed its deadline: as data in names, as text, as a file, and explained.

The data need no plan to be read, so that `hyper-mpmd explain-hang` works on a file that came from another machine. Of
ranks in other processes a rank knows only who they are.
"""

from __future__ import annotations

import base64
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
from hyper_mpmd.scheduler.records import CORE, CORE_STATES, NONE, Records

DIRECTORY = "HYPER_MPMD_HANG_DIR"  # where files are written; the temporary directory where it is not set
FORMAT, VERSION = "hyper-mpmd hang", 2
_MOST_LINES = 12  # cores told in a message
_MOST_SIGNALLERS = 8  # listed of one event
_ENDINGS = ("circle", "lost signal", "running", "other process", "unknown")  # the first that is found is the root


def hang_report(plans: Sequence[Plan], records: Records, seconds: float) -> dict[str, Any]:
    """The state of every core as plain data: waiting (for what, and for whom), running, ready or done; the root cause.

    records: CORE records of all cores. They are in the data as well, in base64, 64 bytes a core.
    """
    heads = {
        (rank, queue): (CORE_STATES[state], task)
        for rank, queue, state, task in records[["rank", "queue", "state", "task"]].tolist()
    }
    names, by_rank = Names(plans), {plan.rank: plan for plan in plans}
    cores: list[dict[str, Any]] = []
    for record in records:
        rank, queue, task, event = (int(record[name]) for name in ("rank", "queue", "task", "event"))
        plan, state, host = by_rank[rank], CORE_STATES[int(record["state"])], queue == NONE
        core: dict[str, Any] = {"rank": rank, "core": "host" if host else plan.core_name(queue), "state": state}
        if not host:
            core |= {name: int(record[name]) for name in ("worker", "ended", "tasks")}
        if state != "done":
            core["task"] = "the end of the launch" if host else plan.task_name(task)
        if state == "waiting":
            core |= {"event": _event(names, plan, event), "have": int(record["have"]), "need": int(record["need"])}
            core["signallers"] = _signallers(by_rank, heads, plan, task, event)
        cores.append(core)
    report = {"format": FORMAT, "version": VERSION, "graph": plans[0].graph.name, "policy": plans[0].policy}
    report |= {"ranks": plans[0].ranks, "seen": sorted(by_rank), "seconds": seconds, "cores": cores}
    report["records"] = base64.b64encode(records.tobytes()).decode()
    return report | {"root": root_cause(report)}


def core_records(report: Mapping[str, Any]) -> Records:
    """The CORE records of a report. HangFileError: it holds none."""
    try:
        return np.frombuffer(base64.b64decode(report["records"], validate=True), CORE)
    except (KeyError, TypeError, ValueError) as error:
        raise HangFileError(f"the report holds no records of {CORE.itemsize} bytes a core: {error}") from None


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
    for state in ("running", "ready"):
        found += [_end(report, "running", [core]) for core in report["cores"] if core["state"] == state][:1]
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
    return _end(report, "running", [*chain, core, *_busy_worker(report, core)])


def _busy_worker(report: Mapping[str, Any], ready: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What keeps the worker of a core whose next task could start: another core of its own, if anything."""
    if ready["state"] != "ready":
        return []
    same = [core for core in report["cores"] if (core["rank"], core.get("worker")) == (ready["rank"], ready["worker"])]
    return [core for core in same if core["state"] == "running"]


def _end(report: Mapping[str, Any], kind: str, chain: list[Mapping[str, Any]], rank: int = 0) -> dict[str, Any]:
    last = chain[-1]
    where = _place(report, last)
    if kind == "circle":
        text = "cores wait for one another in a circle: " + ", ".join(_place(report, core) for core in chain)
    elif kind == "running" and last["state"] == "ready":
        text = f"{where} can start {last['task']}, which its worker has not come to: are there processors enough?"
    elif kind == "running":
        text = f"{where} is inside {last['task']}, which has not ended"
    elif kind == "lost signal":
        signallers = ", ".join(one["task"] for one in last["signallers"])
        text = f"every task that signals {last['event']} has ended ({signallers}), but {where} has {last['have']} of "
        text += f"{last['need']}: a signal may have been lost"
    elif kind == "other process":
        text = f"{where} waits for rank {rank}, a process of its own: see its file, {_file_prefix(rank)}*.json"
    else:
        text = f"no task signals {last['event']}, for which {where} waits"
    return {"kind": kind, "text": text, "chain": [f"{_place(report, core)}: {_doing(core)}" for core in chain]}


def _place(report: Mapping[str, Any], place: Mapping[str, Any]) -> str:
    rank = f"rank {place['rank']}, " if report["ranks"] > 1 else ""
    return f"{rank}{place['core']}"


def _doing(core: Mapping[str, Any]) -> str:
    if core["state"] == "done":
        return "done"
    if core["state"] in ("running", "ready"):
        return f"{'inside' if core['state'] == 'running' else 'about to start'} {core['task']}"
    return f"{core['task']} waits for {core['event']} (have {core['have']}, need {core['need']})"


def hang_text(report: Mapping[str, Any]) -> str:
    """The root cause, then the cores that wait and whom they wait for; at most 20 lines or so."""
    waiting = [core for core in report["cores"] if core["state"] == "waiting"]
    busy = [core for core in report["cores"] if core["state"] in ("running", "ready")]
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
        lines.append("no core waited for another")
    lines += [f"{_place(report, core)}: {_doing(core)}" for core in busy[:4]]
    done = sum(core["state"] == "done" for core in report["cores"])
    lines.append(f"{len(waiting)} waiting, {len(busy)} inside a task or about to start one, {done} done")
    return "\n".join(lines)


def leading_lines(text: str, most_bytes: int) -> str:
    """As many whole lines of the text as fit."""
    while len(text.encode()) > most_bytes and "\n" in text:
        text = text[: text.rindex("\n")]
    return text


def write_hang(report: Mapping[str, Any]) -> Path:
    """Write the data as JSON to a new file in $HYPER_MPMD_HANG_DIR, or the temporary directory. OSError: it cannot."""
    prefix = _file_prefix(report["seen"][0] if len(report["seen"]) < report["ranks"] else None)
    handle, name = tempfile.mkstemp(".json", prefix, os.environ.get(DIRECTORY) or None)
    with open(handle, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    return Path(name)


def _file_prefix(rank: int | None) -> str:
    return "hyper-mpmd-hang-" if rank is None else f"hyper-mpmd-hang-rank{rank}-"


def read_hang(path: Path) -> dict[str, Any]:
    """The data of a file that `write_hang` wrote. HangFileError: it is not one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["format"] != FORMAT or report["version"] != VERSION:
            raise HangFileError(
                f"{path} is {report['format']!r}, version {report['version']!r}; expected {FORMAT!r}, version {VERSION}"
            )
        hang_text(report | {"root": root_cause(report)})
        core_records(report)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, HangFileError):
            raise
        raise HangFileError(f"{path} is not a file that a launch past its deadline wrote: {error!r}") from None
    return dict(report)
