"""What must hold of every plan, told without either implementation: read off the records alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
from comparing import FREE, cases
from hypothesis import given, settings

import hyper_mpmd as hm
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.bounds import bounds
from hyper_mpmd.testing.graphs import rows_on


def part(plan, kind, task):
    """The waits, signals or accesses of a task."""
    name = {"wait": "waits", "signal": "signals", "access": "accesses"}[kind]
    return plan.sections[name][task[f"{kind}_begin"] :][: task[f"{kind}_count"]]


def accesses(plans):
    """(rank, task, written, rank of the memory, tensor, row, rows, col, cols) of every box in the world."""
    for rank, plan in enumerate(plans):
        reads = plan.sections["ops"]["read_count"]
        for number, task in enumerate(plan.tasks):
            for place, box in enumerate(part(plan, "access", task)):
                tensor, owner, *where = box.tolist()
                yield (rank, number, place >= reads[task["op"]], owner, tensor, *where)


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_every_point_that_an_op_makes_is_written_exactly_once(case):
    plans = case.compile()
    written = [
        [np.zeros((int(t["rows"]), int(t["cols"])), np.int32) for t in plan.sections["tensors"]] for plan in plans
    ]
    for _, _, writes, owner, tensor, row, rows, col, cols in accesses(plans):
        whole = written[owner][tensor]
        assert row + rows <= whole.shape[0]
        assert col + cols <= whole.shape[1]
        if writes:
            whole[row : row + rows, col : col + cols] += 1
    names = list(case.graph.tensors)
    for per_tensor in written:
        for name, times in zip(names, per_tensor, strict=True):
            assert (times == (0 if name in case.graph.inputs else 1)).all(), name


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_thresholds_equal_signals_and_peers_agree_on_slots(case):
    plans = case.compile()
    pulls = any(getattr(node.op, "mode", "push") == "pull" for node in case.graph.nodes)
    signals: Counter[tuple[int, int, bool]] = Counter()  # rank, event or slot, whether it comes from another rank
    sent = {}
    for rank, plan in enumerate(plans):
        for task in plan.tasks:
            for peer, event in part(plan, "signal", task).tolist():
                signals[peer, event, peer != rank] += 1
                if peer != rank:
                    sent[peer, event] = (rank, int(task["op"]), int(task["number"]), part(plan, "access", task)[-1])
    for rank, plan in enumerate(plans):
        used = set()
        for index, event in enumerate(plan.sections["events"]):
            if event["slot"] == R.NONE:
                assert signals.pop((rank, index, False)) == event["threshold"] > 0
                assert event["signaller"] == rank
                continue
            slot = int(event["slot"])
            assert slot not in used
            used.add(slot)
            heap = plan.sections["peers"]["heap_words"][rank]
            stride = heap // len(plans)
            assert slot // stride == event["signaller"] != rank  # whole lines with one writer each
            assert stride % R.WORDS_PER_LINE == 0
            if event["op"] == R.NONE:
                peer = plans[int(event["signaller"])]
                assert slot == peer.sections["peers"]["credit_slot"][rank]
                assert heap == peer.sections["peers"]["heap_words"][rank]
                continue
            assert signals.pop((rank, slot, True)) == event["threshold"] > 0
            if pulls:  # then whatever writes a peer's rows signals them, as many times as there are tiles
                continue
            assert event["threshold"] == 1
            source, op, number, box = sent[rank, slot]
            assert (source, op, number) == (event["signaller"], event["op"], event["order"])
            assert box["rank"] == rank
            for field in ("tensor", "row", "rows", "col", "cols"):
                assert box[field] == event[field]
    assert not signals
    for plan in plans:
        for task in plan.tasks:
            for event, threshold in part(plan, "wait", task).tolist():
                record = plan.sections["events"][event]
                assert threshold == (0 if record["op"] == R.NONE else record["threshold"])


def edges(plans, *, queues):
    """Edges between (rank, task) nodes: events, ends of launches, and the order of queues where asked for."""
    signallers = defaultdict(list)
    for rank, plan in enumerate(plans):
        for number, task in enumerate(plan.tasks):
            for peer, event in part(plan, "signal", task).tolist():
                signallers[peer, event, peer != rank].append((rank, number))
    found = []
    for rank, plan in enumerate(plans):
        in_launch = defaultdict(list)
        for number, task in enumerate(plan.tasks):
            in_launch[int(task["launch"])].append((rank, number))
        for number, task in enumerate(plan.tasks):
            for event, threshold in part(plan, "wait", task).tolist():
                slot = int(plan.sections["events"]["slot"][event])
                key = (rank, event, False) if slot == R.NONE else (rank, slot, True)
                found.extend((source, (rank, number)) for source in signallers[key] if threshold)
            launch = plan.sections["launches"][task["launch"]]
            for before in plan.sections["dependencies"][launch["dependency_begin"] :][: launch["dependency_count"]]:
                assert before < task["launch"]
                found.extend((source, (rank, number)) for source in in_launch[int(before)])
        if queues:
            for queue in plan.sections["queues"].tolist():
                _, _, begin, count = queue
                found.extend(((rank, i), (rank, i + 1)) for i in range(begin, begin + count - 1))
    return found


def ancestors(plans, found):
    """For each node the set (as bits) of nodes that come before it; fails on a circle."""
    nodes = [(rank, number) for rank, plan in enumerate(plans) for number in range(len(plan.tasks))]
    bit = {node: 1 << place for place, node in enumerate(nodes)}
    after, missing = defaultdict(list), Counter()
    for source, target in found:
        after[source].append(target)
        missing[target] += 1
    before = dict.fromkeys(nodes, 0)
    ready = [node for node in nodes if not missing[node]]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        for target in after[node]:
            before[target] |= before[node] | bit[node]
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    assert done == len(nodes), "tasks wait for one another in a circle"
    return bit, before


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_queues_and_events_have_no_circle_and_queues_never_go_down_in_hop_level(case):
    plans = case.compile()
    ancestors(plans, edges(plans, queues=True))
    for plan in plans:
        hops = plan.sections["ops"]["hop"][plan.tasks["op"]]
        for _, _, begin, count in plan.sections["queues"].tolist():
            assert (np.diff(hops[begin : begin + count].astype(int)) >= 0).all()
        assert sorted(q[2] for q in plan.sections["queues"].tolist())[0] == 0
        assert plan.sections["queues"]["count"].sum() == len(plan.tasks)


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_overlapping_accesses_are_ordered_by_events_alone(case):
    """Without the luck of the queues: any two tasks that touch one point of memory, one writing, are ordered."""
    plans = case.compile()
    if sum(len(plan.tasks) for plan in plans) > 700:
        return
    bit, before = ancestors(plans, edges(plans, queues=False))
    by_memory = defaultdict(list)
    for rank, number, writes, owner, tensor, *where in accesses(plans):
        storage = int(plans[owner].sections["tensors"]["storage"][tensor])
        by_memory[owner, storage].append(((rank, number), writes, where))
    for touches in by_memory.values():
        for place, (a, a_writes, (a_row, a_rows, a_col, a_cols)) in enumerate(touches):
            for b, b_writes, (b_row, b_rows, b_col, b_cols) in touches[:place]:
                if a == b or not (a_writes or b_writes):
                    continue
                apart = (
                    a_row >= b_row + b_rows
                    or b_row >= a_row + a_rows
                    or a_col >= b_col + b_cols
                    or b_col >= a_col + a_cols
                )
                if not apart and a_rows * a_cols * b_rows * b_cols:
                    ordered = before[a] & bit[b] or before[b] & bit[a]
                    assert ordered, f"{plans[a[0]].task_name(a[1])} and {plans[b[0]].task_name(b[1])} race"


@given(case=cases(policies=("O1",)))
@settings(max_examples=60, deadline=None)
def test_predicted_times_respect_events_cores_and_bounds(case):
    for plan in case.compile():
        start, end = plan.tasks["start_ns"], plan.tasks["end_ns"]
        signalled = defaultdict(int)
        for number, task in enumerate(plan.tasks):
            for peer, event in part(plan, "signal", task).tolist():
                if peer == plan.rank:
                    signalled[event] = max(signalled[event], int(end[number]))
        for number, task in enumerate(plan.tasks):
            for event, _ in part(plan, "wait", task).tolist():
                if plan.sections["events"]["slot"][event] == R.NONE:
                    assert start[number] >= signalled[event] + plan.device.event_ns
        for _, _, begin, count in plan.sections["queues"].tolist():
            assert (start[begin : begin + count][1:] >= end[begin : begin + count][:-1]).all()
        found = bounds(plan)
        assert plan.predicted_ns >= max(found.path, found.work_aic, found.work_aiv, found.work_core)
        if plan.ranks == 1:
            assert plan.predicted_ns <= int((end - start).sum()) + len(plan.tasks) * plan.device.event_ns


@given(case=cases(policies=("O0",), most_ranks=1))
@settings(max_examples=40, deadline=None)
def test_o0_keeps_its_bounds_and_starts_launches_after_those_they_wait_for(case):
    (plan,) = case.compile()
    found = bounds(plan)
    assert plan.predicted_ns >= max(found.path, found.work_aic, found.work_aiv, found.work_core)
    launches = plan.sections["launches"]
    for launch in launches:
        for before in plan.sections["dependencies"][launch["dependency_begin"] :][: launch["dependency_count"]]:
            assert launch["start_ns"] >= launches[before]["end_ns"]
    assert not (plan.sections["events"]["slot"] == R.NONE).any()


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_memory_is_aligned_apart_and_symmetric_over_ranks(case):
    plans = case.compile()
    item_bytes = (4, 2, 4, 8)
    for role in ("workspace", "symmetric"):
        offsets = []
        for plan in plans:
            tensors = plan.sections["tensors"]
            mine = [
                (int(t["offset"]), int(t["offset"]) + int(t["rows"] * t["cols"]) * item_bytes[t["dtype"]])
                for index, t in enumerate(tensors)
                if t["role"] == R.ROLES[role] and t["storage"] == index
            ]
            assert all(begin % R.ALIGNMENT == 0 for begin, _ in mine)
            assert all(a[1] <= b[0] for a, b in pairwise(mine))
            offsets.append([begin for begin, _ in mine])
        if role == "symmetric":
            assert all(of_rank == offsets[0] for of_rank in offsets)


@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_planning_again_gives_the_same_plan(case):
    assert [plan.hash for plan in case.compile()] == [plan.hash for plan in case.compile()]


@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_tiles_do_not_depend_on_the_policy(case):
    boxes = []
    for policy in ("O0", "O1"):
        case.policy = policy
        boxes.append([sorted(access[2:] for access in accesses([plan])) for plan in case.compile()])
    assert boxes[0] == boxes[1]


@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_an_op_without_rows_has_no_tasks(case):
    nothing = {name: np.zeros_like(counts) for name, counts in case.loads.items()}
    graph = case.graph
    plans = list(hm.compile(graph, nothing, device=case.device, policy=case.policy, world=graph.ranks).plans)
    for plan, sizes in zip(plans, rows_on(graph, nothing), strict=True):
        assert all(not counts.any() for counts in sizes.values())
        for op in plan.ops_with_tasks():
            outputs = [graph.tensors[name] for name in graph.nodes[op].outputs]
            assert all(tensor.space is None for tensor in outputs)


def test_puts_visit_peers_in_turn_starting_with_the_rank_itself():
    graph = hm.TaskGraph("g", ranks=4)
    rows = graph.rows("tokens", groups=4)
    graph.output("y", graph.comm("send", hm.ops.Dispatch(), graph.input("x", (rows, 8))))
    loads = [[16, 16, 40, 16], [8, 8, 8, 8], [64, 0, 0, 1], [16, 16, 16, 16]]
    world = hm.compile(graph, loads, world=4, device=FREE, tiles={"send": (8, 1)})
    for rank, plan in enumerate(world.plans):
        order = np.argsort(plan.tasks["number"])
        peers = plan.tasks["peer"][order].tolist()
        rounds = Counter()
        turns = []
        for peer in peers:
            turns.append((rounds[peer], (peer - rank) % 4))
            rounds[peer] += 1
        assert turns == sorted(turns)
        for peer in range(4):
            landed = [
                int(part(plan, "access", plan.tasks[t])[-1]["row"]) for t in order if plan.tasks["peer"][t] == peer
            ]
            assert landed == sorted(landed)
    assert world[0].tasks["peer"][np.argsort(world[0].tasks["number"])][:4].tolist() == [0, 1, 2, 3]
