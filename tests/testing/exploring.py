"""The explorer once more, slow and obvious: queues that run or do not, and every byte by itself."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hyper_mpmd.scheduler import records as R

ITEM_BYTES = (4, 2, 4, 8)
PLACED = (R.ROLES["workspace"], R.ROLES["symmetric"])


class TooLarge(Exception):
    """More states than the caller wants to wait for."""


def rows_of(plan, what, task):
    name = {"wait": "waits", "signal": "signals", "access": "accesses"}[what]
    return plan.sections[name][task[f"{what}_begin"] :][: task[f"{what}_count"]].tolist()


def bytes_of(plans, tensor, rank, row, rows, col, cols):
    """The addresses that a box covers, each with the memory it lies in; None for a box that leaves its tensor."""
    record = plans[rank].sections["tensors"][tensor]
    if row + rows > record["rows"] or col + cols > record["cols"]:
        return None
    size = ITEM_BYTES[record["dtype"]]
    memory = (rank, "role", int(record["role"])) if record["role"] in PLACED else (rank, "own", int(record["storage"]))
    start = int(record["offset"]) if record["role"] in PLACED else 0
    return {
        (memory, start + (r * int(record["cols"]) + c) * size + byte)
        for r in range(row, row + rows)
        for c in range(col, col + cols)
        for byte in range(size)
    }


class Queue:
    """Jobs that run one after the other; the host's last one of a launch is (rank, None)."""

    def __init__(self, rank, jobs):
        self.rank, self.jobs = rank, jobs


def touches(plans):
    """For each job the bytes it reads and writes, and whether some box leaves its tensor."""
    reads, writes, overflow = {}, {}, False
    for rank, plan in enumerate(plans):
        for number, task in enumerate(plan.tasks):
            reads[rank, number], writes[rank, number] = set(), set()
            for place, (tensor, owner, *box) in enumerate(rows_of(plan, "access", task)):
                found = bytes_of(plans, tensor, owner, *box)
                overflow |= found is None
                kind = reads if place < plan.sections["ops"]["read_count"][task["op"]] else writes
                kind[rank, number] |= found or set()
        reads[rank, None], writes[rank, None] = set(), set()
        for tensor, name in enumerate(plan.graph.tensors):
            record = plan.sections["tensors"][tensor]
            if name in plan.graph.outputs.values() and record["role"] == R.ROLES["symmetric"]:
                reads[rank, None] |= bytes_of(plans, tensor, rank, 0, int(record["rows"]), 0, int(record["cols"]))
    return reads, writes, overflow


class Twin:
    def __init__(self, plans, launches, together):
        self.plans, self.launches, self.together = plans, launches, together
        self.queues = [
            Queue(rank, [(rank, task) for task in range(begin, begin + count)])
            for rank, plan in enumerate(plans)
            for _, _, begin, count in plan.sections["queues"].tolist()
        ] + [Queue(rank, [(rank, None)]) for rank in range(len(plans))]
        self.base = Counter()  # what each counter's base grows by in a launch
        for rank, plan in enumerate(plans):
            for event in range(len(plan.sections["events"])):
                self.base[self.counter(rank, event)] += int(plan.sections["events"]["threshold"][event])

    def counter(self, rank, event):
        slot = int(self.plans[rank].sections["events"]["slot"][event])
        return (rank, "event", event) if slot == R.NONE else (rank, "word", slot)

    def counters(self, ended):
        """The counters once these (job, launch) have ended."""
        found = Counter()
        for (rank, number), _ in ended:
            plan = self.plans[rank]
            if number is None:
                for peer, record in enumerate(plan.sections["peers"].tolist()):
                    if peer != rank and plan.sections["peers"]["heap_words"][rank]:
                        found[peer, "word", record[0]] += 1
                continue
            for peer, event in rows_of(plan, "signal", plan.tasks[number]):
                found[(peer, "event", event) if peer == rank else (peer, "word", event)] += 1
        return found

    def may_start(self, job, launch, ended, counters):
        rank, number = job
        plan = self.plans[rank]
        if launch and ((rank, None), launch - 1) not in ended:
            return False
        if number is None:
            ranks = range(len(self.plans)) if self.together else [rank]
            if not all(((r, t), launch) in ended for r in ranks for t in range(len(self.plans[r].tasks))):
                return False
            # What peers put here has to arrive, credits belong to the next launch.
            events = plan.sections["events"]
            waits = [
                (e, int(events["threshold"][e]))
                for e in range(len(events))
                if events["slot"][e] != R.NONE and events["op"][e] != R.NONE and not self.together
            ]
        else:
            task = plan.tasks[number]
            launches = plan.sections["launches"]
            if len(launches) != 1 or launches["op"][0] != R.NONE:
                mine = launches[task["launch"]]
                for before in plan.sections["dependencies"][mine["dependency_begin"] :][: mine["dependency_count"]]:
                    members = [t for t in range(len(plan.tasks)) if plan.tasks["launch"][t] == before]
                    if not all(((rank, t), launch) in ended for t in members):
                        return False
            waits = rows_of(plan, "wait", task)
        for event, threshold in waits:
            counter = self.counter(rank, event)
            if counters[counter] < launch * self.base[counter] + threshold:
                return False
        return True

    def explore(self, cap):
        """The kinds of harm found: 'hang', 'stale counter', 'race'."""
        reads, writes, _ = touches(self.plans)
        clash = {
            (a, b)
            for a, b in combinations(list(reads), 2)
            if writes[a] & (reads[b] | writes[b]) or writes[b] & reads[a]
        }
        harms, first = set(), set()  # first: (a, b): a has ended in a state where b has not started
        start = tuple((0, False) for _ in self.queues)
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            ended, running = set(), []
            for queue, (position, runs) in zip(self.queues, state, strict=True):
                ended |= {(queue.jobs[p % len(queue.jobs)], p // len(queue.jobs)) for p in range(position)}
                if runs:
                    running.append((queue.jobs[position % len(queue.jobs)], position // len(queue.jobs)))
            started = ended | set(running)
            for a, b in clash:
                for m in range(self.launches):
                    for n in range(self.launches):
                        one, other = (a, m), (b, n)
                        if one in running and other in running:
                            harms.add("race")
                        first |= {(x, y) for x, y in ((one, other), (other, one)) if x in ended and y not in started}
            counters = self.counters(ended)
            following = []
            for q, (queue, (position, runs)) in enumerate(zip(self.queues, state, strict=True)):
                if runs:
                    following.append((q, (position + 1, False)))
                elif queue.jobs and position < self.launches * len(queue.jobs):
                    job, launch = queue.jobs[position % len(queue.jobs)], position // len(queue.jobs)
                    if self.may_start(job, launch, ended, counters):
                        following.append((q, (position, True)))
            if not following:
                over = all(p == self.launches * len(q.jobs) for q, (p, _) in zip(self.queues, state, strict=True))
                if not over:
                    harms.add("hang")
                elif any(counters[c] != self.launches * self.base[c] for c in set(counters) | set(self.base)):
                    harms.add("stale counter")
            for q, move in following:
                after = (*state[:q], move, *state[q + 1 :])
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
                    if len(seen) > cap:
                        raise TooLarge
        if "hang" not in harms and any((y, x) in first for x, y in first):
            harms.add("race")
        return harms


def explore_slowly(plans, launches=2, cap=3000):
    """The kind of harm, in the explorer's order; 'sound' for none. Raises TooLarge past `cap` states."""
    if touches(plans)[2]:
        return "overflow"
    harms = Twin(plans, launches, together=False).explore(cap)
    harms |= Twin(plans, launches, together=True).explore(cap) & {"hang"}
    return next((kind for kind in ("hang", "stale counter", "race") if kind in harms), "sound")
