"""The hop levels of a certificate: local to a plan, and enough to show that no circle crosses ranks."""

from __future__ import annotations

import numpy as np

from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.records import NONE


def hops(plan: Plan) -> str:
    """Where the plan goes down in hop level, empty if it never does: if no rank's does, no circle crosses ranks."""
    sections = plan.sections
    level = sections["ops"]["hop"][plan.tasks["op"]].astype(np.int64)
    for queue in sections["queues"]:
        begin, count = int(queue["begin"]), int(queue["count"])
        for down in np.flatnonzero(np.diff(level[begin : begin + count]) < 0)[:1]:
            return f"task {begin + down + 1}: its queue goes down in hop level"
    highest = np.zeros(len(sections["events"]), np.int64)
    for number, task in enumerate(plan.tasks):
        for rank, event in sections["signals"][task["signal_begin"] :][: task["signal_count"]].tolist():
            if rank == plan.rank:
                highest[event] = max(highest[event], level[number])
    for number, task in enumerate(plan.tasks):
        for event, _ in sections["waits"][task["wait_begin"] :][: task["wait_count"]].tolist():
            record = sections["events"][event]
            if int(record["slot"]) == NONE:
                above = highest[event]
            elif int(record["op"]) == NONE:
                continue  # a credit is due from the launch before
            else:
                above = int(sections["ops"]["hop"][int(record["op"])]) + 1
            if level[number] < above:
                return f"task {number}: waits for a higher hop level"
    if len(sections["launches"]) == 1 and int(sections["launches"]["op"][0]) == NONE:
        return ""
    for number, launch in enumerate(sections["launches"]):
        mine = level[plan.tasks["launch"] == number]
        for other in sections["dependencies"][launch["dependency_begin"] :][: launch["dependency_count"]]:
            theirs = level[plan.tasks["launch"] == int(other)]
            if len(mine) and len(theirs) and mine.min() < theirs.max():
                return f"launch {number}: waits for a higher hop level"
    return ""
