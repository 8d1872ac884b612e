"""Small random worlds for the explorer: compiled from random graphs, and put together at random.

Compiled worlds are sound. Those put together task by task are sound or broken, in ways that no planner would come to:
events with signallers on several cores, waits for some of an event's signals, boxes that overlap in odd ways, edges
left out. The strategies need `hypothesis`.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import combinations

from hypothesis import assume
from hypothesis import strategies as st

from hyper_mpmd import ops
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.tensor_parallel import token_parts
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.compile import compile
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.tasks.graph import TaskGraph
from hyper_mpmd.testing.draft import Draft, DraftLaunch, DraftTask
from hyper_mpmd.testing.graphs import graphs, loads_of
from hyper_mpmd.testing.sample_ops import Copy, GroupedOuter

# Two cores of each kind, and tiles so large that an op has one or two of them a group.
TINY = Device(
    name="tiny",
    aic=2,
    aiv=2,
    cube_flops_per_us=(700, 900),
    vector_flops_per_us=(300, 500),
    cube_ramp=(1, 2),
    vector_ramp=(1, 0),
    cube_bytes_per_us=900,
    vector_bytes_per_us=700,
    row_bytes=5,
    memory_bytes_per_us=1500,
    link_bytes_per_us=100,
    link_total_bytes_per_us=200,
    task_ns=3,
    event_ns=7,
    remote_ns=40,
    launch_ns=90,
    row_tiles=(32,),
    col_tiles=(32,),
)


@st.composite
def compiled_worlds(draw: st.DrawFn, most_ranks: int = 3, most_tasks: int = 24) -> tuple[Plan, ...]:
    """The plans of a random graph of 3 to `most_tasks` tiles in all, under O0 or O1, for 1 to `most_ranks` ranks."""
    graph = draw(graphs(ranks=draw(st.integers(1, most_ranks)), max_tasks=4))
    loads, policy = draw(loads_of(graph, most=12)), draw(st.sampled_from(["O0", "O1"]))
    plans = compile(graph, loads, world=graph.ranks, device=TINY, policy=policy).plans
    assume(3 <= sum(len(plan.tasks) for plan in plans) <= most_tasks)
    return tuple(plans)


def moe_world(seed: int) -> tuple[Plan, ...]:
    """A Mixture-of-Experts feed-forward over 1 to 4 ranks, skewed loads, O0 or O1; the same for the same seed.

    Experts are shared out over ranks, cut over teams of two, or both. Sound, with a few dozen tasks.
    """
    chance = random.Random(seed)
    ranks, tp, experts = chance.choice(((1, 1, 2), (2, 1, 2), (2, 1, 4), (3, 1, 3), (2, 2, 2), (4, 2, 2)))
    graph = moe_ffn(16, 16, experts, 1, ranks=ranks, tp=tp, keep=chance.random() < 0.3)
    teams = [[chance.choice((0, 1, 3, 9, 40)) for _ in range(experts)] for _ in range(ranks // tp)]
    routed = [teams[rank // tp] for rank in range(ranks)]
    batch = [token_parts(sum(counts), tp) for counts in routed]
    loads = {"batch": batch, "routed": routed}
    if tp > 1:
        loads["part"] = [[batch[rank][rank % tp]] for rank in range(ranks)]
    plans = compile(graph, loads, world=ranks, device=TINY, policy=chance.choice(("O0", "O1"))).plans
    return tuple(plans)


@lru_cache
def _base(ranks: int, received_is_output: bool) -> tuple[Plan, ...]:
    """Plans with the tensors, ops, cores and heaps that the tasks of a random world are written for."""
    graph = TaskGraph("random", ranks=ranks)
    x = graph.input("x", (graph.rows("tokens"), _COLS))
    a = graph.vector("a", Copy(), x)
    b = graph.vector("b", Copy(), a)
    c = graph.comm("c", ops.Put(to="all"), b)
    graph.output("sum", graph.cube("d", GroupedOuter(groups=ranks), c, c))
    if received_is_output:
        graph.output("received", c)
    plans: tuple[Plan, ...] = compile(graph, [[_ROWS]] * ranks, world=ranks, device=TINY).plans
    return plans


_ROWS, _COLS = 4, 4
_A, _B, _C, _D = range(4)  # the ops of the base graph
_TENSOR_A, _TENSOR_B, _TENSOR_C = 1, 2, 3


class _Maker:
    """Puts a world together: tasks with boxes, then edges between those that conflict, most of the time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = self.random.choice((1, 1, 2, 2, 3))
        self.care = self.random.choice((0.8, 0.95, 1.0, 1.0))  # how often what is needed is there
        self.drafts = [Draft(plan) for plan in _base(self.ranks, self.random.random() < 0.4)]
        self.dispatched = self.random.random() < 0.25
        self.tasks: list[list[DraftTask]] = []  # by rank, in program order
        self.puts: list[tuple[int, DraftTask]] = []  # the rank that puts, and the task

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def rows(self, within: int = _ROWS) -> tuple[int, int]:
        begin = self.random.randrange(within)
        return begin, self.random.randint(1, min(2, within - begin))

    def make(self) -> tuple[Plan, ...]:
        for draft in self.drafts:
            draft.clear()
            self.tasks.append(self.tasks_of(draft.rank))
        for draft, tasks in zip(self.drafts, self.tasks, strict=True):
            if self.dispatched:
                self.add_launches(draft, tasks)
            else:
                self.add_local_events(draft, tasks)
        for draft in self.drafts:
            self.add_arrivals(draft)
        for draft, tasks in zip(self.drafts, self.tasks, strict=True):
            self.add_credits(draft, tasks)
            self.place(draft, tasks)
        return tuple(draft.plan() for draft in self.drafts)

    def tasks_of(self, rank: int) -> list[DraftTask]:
        made: list[DraftTask] = []
        kinds = [_A, _B, _D] if self.ranks == 1 else [_A, _B, _C, _C, _D]
        chosen = [self.random.choice(kinds) for _ in range(self.random.randint(1, (6, 5, 4)[self.ranks - 1]))]
        for op in sorted(chosen) if self.dispatched or self.chance(0.6) else chosen:
            task = DraftTask(op, number=sum(other.op == op for other in made), peer=rank)
            row, rows = self.rows()
            if op == _A:
                task.accesses = [[0, rank, row, rows, 0, _COLS], [_TENSOR_A, rank, row, rows, 0, _COLS]]
            elif op == _B:
                source = self.random.choice((_TENSOR_A, _TENSOR_A, _TENSOR_B))
                col = self.random.choice((0, 2))
                task.accesses = [[source, rank, row, rows, 0, _COLS], [_TENSOR_B, rank, row, rows, col, 2]]
            elif op == _C:
                # Rows of the received tensor belong to their sender, most of the time.
                task.peer = self.random.randrange(self.ranks)
                sender = rank if self.chance(0.9) else self.random.randrange(self.ranks)
                target = [_TENSOR_C, task.peer, sender * _ROWS + row, rows, 0, _COLS]
                task.accesses = [[self.random.choice((_TENSOR_A, _TENSOR_B)), rank, row, rows, 0, _COLS], target]
                if task.peer != rank:
                    self.puts.append((rank, task))
            else:
                row, rows = self.rows(_ROWS * self.ranks)
                reads = [[_TENSOR_C, rank, row, rows, 0, _COLS], [_TENSOR_B, rank, 0, 1, 0, _COLS]]
                task.accesses = [*reads, [4, rank, self.random.randrange(_COLS), 1, 0, _COLS]]
            made.append(task)
        return made

    def reads(self, task: DraftTask) -> int:
        return 2 if task.op == _D else 1

    def conflict(self, first: DraftTask, second: DraftTask) -> bool:
        return any(
            a[:2] == b[:2]
            and max(i - self.reads(first), j - self.reads(second)) >= 0
            and all(a[at] < b[at] + b[at + 1] and b[at] < a[at] + a[at + 1] for at in (2, 4))
            for i, a in enumerate(first.accesses)
            for j, b in enumerate(second.accesses)
        )

    def add_local_events(self, draft: Draft, tasks: list[DraftTask]) -> None:
        edges = [
            (first, second)
            for first, second in combinations(tasks, 2)
            if (self.conflict(first, second) and self.chance(self.care)) or self.chance(0.05)
        ]
        for task in tasks:
            producers = [first for first, second in edges if second is task]
            # One event for all, or one each.
            for group in [producers] if self.chance(0.6) else [[producer] for producer in producers]:
                if not group:
                    continue
                event = draft.add_event(len(group), group[0].op, _TENSOR_A)
                for producer in group:
                    producer.signals.append([draft.rank, event])
                task.waits.append([event, len(group) if self.chance(0.8) else self.random.randint(0, len(group))])

    def add_launches(self, draft: Draft, tasks: list[DraftTask]) -> None:
        used = sorted({task.op for task in tasks})
        draft.launches = [DraftLaunch(op) for op in used]
        for task in tasks:
            task.launch = used.index(task.op)
        for first, second in combinations(tasks, 2):
            launch = draft.launches[second.launch]
            if first.launch == second.launch or first.launch in launch.dependencies:
                continue
            if (self.conflict(first, second) and self.chance(self.care)) or self.chance(0.05):
                launch.dependencies.append(first.launch)

    def add_arrivals(self, draft: Draft) -> None:
        """An event for each put that lands on this rank, waited for by those that touch what it writes."""
        landed = [0] * self.ranks
        for sender, put in self.puts:
            if put.peer != draft.rank:
                continue
            slot = int(self.drafts[sender].peers["credit_slot"][draft.rank]) + R.WORDS_PER_LINE + landed[sender]
            landed[sender] += 1
            event = draft.add_event(1, put.op, _TENSOR_C, signaller=sender, slot=slot)
            put.signals.append([draft.rank, slot])
            for task in self.tasks[draft.rank]:
                if self.conflict(put, task) and self.chance(self.care):
                    task.waits.append([event, 1])

    def add_credits(self, draft: Draft, tasks: list[DraftTask]) -> None:
        for peer in range(self.ranks):
            if peer == draft.rank:
                continue
            slot = int(self.drafts[peer].peers["credit_slot"][draft.rank])
            event = draft.add_event(1, R.NONE, R.NONE, signaller=peer, slot=slot)
            for task in tasks:
                if task.peer == peer and self.chance(self.care):
                    task.waits.append([event, 0 if self.chance(0.98) else 1])

    def place(self, draft: Draft, tasks: list[DraftTask]) -> None:
        for task in tasks:
            kind = int(draft.ops["kind"][task.op])
            queue = self.random.choice([queue for queue in draft.queues if queue.kind == kind])
            place = len(queue.tasks) if self.chance(0.97) else self.random.randint(0, len(queue.tasks))
            queue.tasks.insert(place, task)


def random_world(seed: int) -> tuple[Plan, ...]:
    """A world of 1 to 3 ranks with up to 6 tasks each, sound or not; the same for the same seed."""
    return _Maker(seed).make()
