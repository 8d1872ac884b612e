"""The prover: what compiles is proven, what is broken is refused in names, and the native prover and its twin agree."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from comparing import SMALL, cases
from editing import copied, edits, part, remade
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.scheduler import prove as proving
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.plan_file import from_bytes, from_json, to_bytes, to_json
from hyper_mpmd.scheduler.prove import Finding, proof_of, prove
from hyper_mpmd.testing import programs
from hyper_mpmd.testing.draft import Draft

LOADS = [5, 0, 33, 7]


def ffn(ranks: int = 1, keep: bool = False) -> hm.TaskGraph:
    """keep: the caller also gets the rows that were received."""
    g = hm.TaskGraph("ffn", ranks=ranks)
    x = g.input("x", (g.rows("tokens", groups=4), 32))
    w1, w2 = g.input("w1", (4 // ranks, 32, 32)), g.input("w2", (4 // ranks, 16, 32))
    received = rows = g.comm("dispatch", hm.ops.Dispatch(), x) if ranks > 1 else x
    rows = g.vector("act", hm.ops.SwiGLU(), g.cube("up", hm.ops.GroupedMatmul(), rows, w1))
    rows = g.cube("down", hm.ops.GroupedMatmul(), rows, w2)
    g.output("y", g.comm("combine", hm.ops.Combine(), rows) if ranks > 1 else rows)
    if keep:
        g.output("received", received)
    return g


def one(policy: str = "O1") -> hm.Plan:
    plan: hm.Plan = hm.compile(ffn(), LOADS, device=SMALL, policy=policy)
    return plan


def two(policy: str = "O1", keep: bool = False) -> list[hm.Plan]:
    return list(hm.compile(ffn(2, keep), [LOADS, LOADS], world=2, device=SMALL, policy=policy).plans)


def found(plans: list[hm.Plan], backend: Any) -> Finding:
    return proving._find(plans, backend)


def kind(finding: Finding) -> str:
    names = ("record", "signal", "circle", "race", "hops")
    return next((name for name in names if getattr(finding, name)), "proven")


# ---- both provers ------------------------------------------------------------------------------------------------


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_everything_that_compiles_is_proven_by_both_provers_with_the_same_counts(case):
    plans = case.compile()
    for members in (plans, *([plan] for plan in plans)):
        native, twin = found(members, "native"), found(members, "python")
        assert (kind(native), kind(twin)) == ("proven", "proven")
        assert native.counts[:5] == twin.counts[:5]  # queues, tasks, events, edges, boxes


def agree(case: Any, data: st.DataObject) -> str:
    plans = data.draw(edits(case.compile(), most=3))
    for members in (plans, *([plan] for plan in plans if len(plans) > 1)):
        native, twin = found(members, "native"), found(members, "python")
        if native.record:
            continue  # records that cannot be read: the engine's own checks, which the twin leaves to it
        assert kind(native) == kind(twin), (native, twin)
        assert len(native.circle) == len(twin.circle)
        if native.unsafe:
            with pytest.raises(errors.PlanUnsafe) as caught:
                proving.prove(members)
            json.dumps(caught.value.counterexample)
    return kind(found(plans, "native"))


@given(case=cases(), data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_both_provers_say_the_same_of_plans_that_were_edited(case, data):
    agree(case, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_provers_say_the_same_of_thousands_of_edited_plans():
    verdicts: Counter[str] = Counter()

    @given(case=cases(), data=st.data())
    @settings(max_examples=8000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def attack(case, data):
        verdicts[agree(case, data)] += 1

    attack()
    print(dict(verdicts))
    assert all(verdicts[name] > 100 for name in ("proven", "signal", "circle", "race")), verdicts


# ---- counter-examples in names -----------------------------------------------------------------------------------


def refusal(kind: type[errors.PlanUnsafe], plans: list[hm.Plan]) -> str:
    with pytest.raises(kind) as caught:
        hm.World(plans).check() if len(plans) > 1 else plans[0].check()
    assert isinstance(caught.value, (errors.PlanUnsafe, ValueError))
    json.dumps(caught.value.counterexample)
    return str(caught.value)


def test_a_signal_queued_behind_the_wait_for_it_is_named():
    """The smallest hang: a task before its own producer on one core."""
    plan = hm.compile(ffn(), LOADS, device=SMALL.model_copy(update={"unified": True, "aic": 1}))
    sections = copied(plan)
    names = [plan.task_name(task) for task in range(len(plan.tasks))]
    late = next(task for task, name in enumerate(names) if name.startswith("act"))
    sections["tasks"][: late + 1] = np.roll(sections["tasks"][: late + 1], 1)
    text = refusal(errors.HangError, [remade(plan, sections)])
    assert text == (
        "core 0 stands at act.t0, which waits for rows 0-7, columns 0-31 of 'up' (have 0, need 2); the first signal is "
        "up.e2.t1, queued behind it on core 0"
    )


def test_the_circle_that_is_told_is_the_shortest():
    """Two circles: tasks of four cores that wait for one another, and of two."""
    pairs = [(0, 4), (1, 5), (2, 6), (3, 7), (8, 10), (9, 11)]
    program = hm.scheduler.program.TileProgram.from_edges(np.ones(12, np.int64), pairs)
    plan = programs.plan_of(program, SMALL.model_copy(update={"aiv": 6}))
    sections = copied(plan)
    core = {0: 0, 5: 0, 1: 1, 6: 1, 2: 2, 7: 2, 3: 3, 4: 3, 8: 4, 11: 4, 9: 5, 10: 5}
    by_number = {int(task["number"]): task.copy() for task in plan.tasks}
    order = [n for c in range(6) for n in sorted((n for n in core if core[n] == c), reverse=True)]
    sections["tasks"] = np.array([by_number[n] for n in order], R.TASK)
    sections["queues"]["count"] = [0, 0] + [2] * 6
    sections["queues"]["begin"] = [0, 0, *range(0, 12, 2)]
    text = refusal(errors.HangError, [remade(plan, sections)])
    assert text.count("stands at") == 2
    assert "AIV 4" in text
    assert "AIV 5" in text


def test_a_hang_through_launches_is_named():
    plan = one("O0")
    sections = copied(plan)
    queue = int(np.argmax(sections["queues"]["count"]))
    begin, count = (int(sections["queues"][name][queue]) for name in ("begin", "count"))
    sections["tasks"][begin : begin + count] = sections["tasks"][begin : begin + count][::-1].copy()
    text = refusal(errors.HangError, [remade(plan, sections)])
    assert "which waits for its launch, and that for the end of" in text
    assert "stands at down.e3" in text
    assert "the end of act.t" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (1, ["has 3 signal(s), its threshold is 4", "rows 32-39, columns 0-31 of 'up'", "never ends"]),
        (-1, ["has 3 signal(s), its threshold is 2", "miscounts"]),
    ],
)
def test_a_threshold_that_is_not_the_number_of_signals_is_named(change, words):
    plan = one()
    sections = copied(plan)
    event = int(np.argmax(sections["events"]["threshold"]))
    sections["events"]["threshold"][event] = sections["events"]["threshold"][event].astype(int) + change
    waits = sections["waits"]
    waits["threshold"][waits["event"] == event] = sections["events"]["threshold"][event]
    text = refusal(errors.SignalError, [remade(plan, sections)])
    assert all(word in text for word in words), text


def test_a_wait_for_more_than_a_launch_gives_is_named():
    plan = one()
    sections = copied(plan)
    sections["waits"]["threshold"][0] += 1
    text = refusal(errors.SignalError, [remade(plan, sections)])
    assert "waits until event" in text
    assert "it never starts" in text


def test_a_tile_that_reads_before_it_is_written_is_named_with_its_rows():
    plan = one()
    sections = copied(plan)
    task = next(t for t in range(len(plan.tasks)) if plan.task_name(t) == "act.t0")
    sections["tasks"]["wait_count"][task] = 0
    text = refusal(errors.RaceError, [remade(plan, sections)])
    assert "act.t0 on AIV" in text
    assert "up.e0.t" in text
    assert "rows 0-4, columns" in text
    assert "of 'up'" in text
    assert "no queue, wait or launch orders them" in text


def test_a_wait_for_some_of_several_signals_orders_nothing():
    """Which of them have come is anybody's guess."""
    plan = one()
    sections = copied(plan)
    waits = sections["waits"]
    several = int(np.flatnonzero(waits["threshold"] > 1)[0])
    waits["threshold"][several] -= 1
    refusal(errors.RaceError, [remade(plan, sections)])


def test_two_buffers_in_the_same_bytes_race():
    """A prover that goes by tensors alone would not see it."""
    plan = one()
    names = list(plan.graph.tensors)
    sections = copied(plan)
    sections["tensors"]["offset"][names.index("act")] = sections["tensors"]["offset"][names.index("up")] + 64
    text = refusal(errors.RaceError, [remade(plan, sections)])
    assert "(the memory of '" in text


def without_credits(plan: hm.Plan) -> hm.Plan:
    """The plan waits for no credit any more."""
    sections = copied(plan)
    events = sections["events"]
    credit = set(np.flatnonzero((events["slot"] != R.NONE) & (events["op"] == R.NONE)).tolist())
    for task in range(len(sections["tasks"])):
        waits = part(sections, "wait", task)
        kept = [wait for wait in waits.tolist() if wait[0] not in credit]
        waits[: len(kept)] = kept
        sections["tasks"]["wait_count"][task] = len(kept)
    return remade(plan, sections)


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_a_put_without_credit_races_with_the_host_that_hands_on_the_launch_before(policy):
    plans = two(policy, keep=True)
    text = refusal(errors.RaceError, [plans[0], without_credits(plans[1])])
    assert "the host of rank 0, which hands it to the caller when the launch has ended, reads rows" in text
    assert "of rank 0 'dispatch', and rank 1 dispatch.e0.t" in text
    assert "in the next launch: it waits for no credit of rank 0" in text


def one_way(read: bool, policy: str) -> list[hm.Plan]:
    """Rows that are sent and never come back; read: by a task, otherwise by the caller alone."""
    g = hm.TaskGraph("one-way", ranks=2)
    rows = g.comm("dispatch", hm.ops.Dispatch(), g.input("x", (g.rows("tokens", groups=4), 32)))
    if read:
        rows = g.cube("up", hm.ops.GroupedMatmul(), rows, g.input("w1", (2, 32, 32)))
    g.output("y", rows)
    return list(hm.compile(g, [LOADS, LOADS], world=2, device=SMALL, policy=policy).plans)


@pytest.mark.parametrize("policy", ["O0", "O1"])
@pytest.mark.parametrize("read", [True, False])
def test_rows_that_never_come_back_need_a_credit(read, policy):
    plans = one_way(read, policy)
    text = refusal(errors.RaceError, [plans[0], without_credits(plans[1])])
    assert "in the next launch: it waits for no credit of rank 0" in text
    assert "rank 1 dispatch" in text
    assert ("rank 0 up." if read else "the host of rank 0") in text


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_rows_that_come_back_say_as_much_as_a_credit(policy):
    """A rank ends its launch when its rows have come back, which they do after all use of what it put."""
    plans = two(policy)
    assert prove([plans[0], without_credits(plans[1])]).world


def test_what_is_put_for_the_caller_must_arrive_before_the_launch_ends():
    """The last put of a core to a peer tells it so before it has run: the peer may hand on what is not there yet."""
    plans = two()
    draft = Draft(plans[1])
    combine = plans[1].op_names.index("combine")
    put = [task for task in draft.tasks() if task.op == combine and task.peer == 0][-1]
    first = next(task for task in draft.tasks() if task.op != combine)
    first.signals.append(put.signals.pop())
    assert "the host of rank 0" in refusal(errors.RaceError, [plans[0], draft.plan()])


def test_a_signal_that_no_peer_counts_is_named():
    plans = two()
    sections = copied(plans[1])
    away = np.flatnonzero(sections["signals"]["rank"] == 0)
    sections["signals"]["event"][away[0]] = 50  # inside the heap, between the words that are counted
    text = refusal(errors.SignalError, [plans[0], remade(plans[1], sections)])
    assert "rank 1 " in text
    assert "of rank 0, which no event of rank 0 counts" in text


def test_a_circle_across_ranks_is_named_with_both_ranks():
    """Each rank multiplies what it receives before it sends: fine alone but for hop levels, together they hang."""
    plans = two()
    turned = []
    for plan in plans:
        sections = copied(plan)
        hops = sections["ops"]["hop"][sections["tasks"]["op"]]
        order = np.argsort(hops != 1, kind="stable")
        sections["tasks"] = sections["tasks"][order]
        sections["queues"]["count"] = 0
        sections["queues"]["begin"] = 0
        sections["queues"]["count"][-1] = len(order)
        # Without what orders them here, only the peers' rows do.
        local = sections["events"]["slot"] == R.NONE
        sections["waits"]["threshold"][local[sections["waits"]["event"]]] = 0
        turned.append(remade(plan, sections))
    text = refusal(errors.HangError, turned)
    assert "rank 0 AIV 2 stands at" in text
    assert "rank 1 AIV 2 stands at" in text
    assert "from rank" in text
    with pytest.raises(errors.HangError, match=r"rank 0's plan has no certificate .*goes down in hop level"):
        proving.prove([turned[0]])


# ---- what a proof says -------------------------------------------------------------------------------------------


def test_a_proof_of_one_rank_says_that_peers_were_taken_on_trust():
    plans = two()
    whole, alone = hm.World(plans).check(), plans[0].check()
    assert whole.world
    assert whole.ranks == 2
    assert whole.tasks == sum(len(plan.tasks) for plan in plans)
    assert not alone.world
    assert any("taken to arrive" in line for line in alone.shown)
    assert not any("taken to arrive" in line for line in whole.shown)
    assert json.loads(json.dumps(whole.to_dict()))["tasks"] == whole.tasks


def test_some_ranks_of_a_world_are_refused():
    plans = list(hm.compile(ffn(4), [LOADS] * 4, world=4).plans)
    with pytest.raises(errors.WorldSizeError, match=r"those of all 4 ranks in order; got rank\(s\) 0, 1"):
        proving.prove(plans[:2])


def test_records_that_cannot_be_read_are_refused_before_anything_is_followed():
    plan = one()
    for section, field, value in (
        ("waits", "event", 999),
        ("signals", "event", 999),
        ("accesses", "tensor", 999),
        ("accesses", "rows", 999),
        ("tasks", "launch", 9),
        ("queues", "begin", 1),
        ("events", "op", 77),
    ):
        sections = copied(plan)
        sections[section][field][0] = value
        with pytest.raises(errors.PlanFormatError, match="cannot be read"):
            remade(plan, sections).check()


# ---- who must be proven ------------------------------------------------------------------------------------------


@pytest.fixture
def proofs(monkeypatch):
    """How many proofs were made."""
    made = []
    find = proving._find
    monkeypatch.setattr(proving, "_find", lambda plans, backend: made.append(len(plans)) or find(plans, backend))
    return made


def inputs(ranks: int = 1) -> dict[str, torch.Tensor]:
    return {
        "x": torch.ones(sum(LOADS), 32),
        "w1": torch.ones(4 // ranks, 32, 32),
        "w2": torch.ones(4 // ranks, 16, 32),
    }


def test_compile_proves_and_the_engine_takes_its_word(proofs):
    plan = hm.compile(ffn(), LOADS)
    assert proofs == [1]
    plan.run(**inputs())
    assert proofs == [1]
    world = hm.compile(ffn(2), [LOADS, LOADS], world=2)
    assert proofs == [1, 2]
    world.run([inputs(2)] * 2)
    assert proofs == [1, 2]


def test_a_plan_made_with_a_certificate_runs_without_a_proof(proofs):
    plan = hm.compile(ffn(), LOADS, prove="certificate")
    plan.run(**inputs())
    assert proofs == []
    assert proof_of([plan]) is None


@pytest.mark.parametrize("form", ["json", "bytes"])
def test_a_loaded_plan_is_proven_once_before_its_first_run(proofs, form):
    plan = hm.compile(ffn(), LOADS, prove=False)
    again = from_json(to_json(plan)) if form == "json" else from_bytes(to_bytes(plan))
    assert proofs == []
    for _ in range(3):
        again.run(**inputs())
    assert proofs == [1]


def test_loaded_plans_of_a_world_are_proven_together(proofs):
    made = hm.compile(ffn(2), [LOADS, LOADS], world=2)
    world = hm.World([from_bytes(to_bytes(plan)) for plan in made.plans])
    proofs.clear()
    world[0].check()
    for _ in range(2):
        world.run([inputs(2)] * 2)
    assert proofs == [1, 2]


def test_copies_are_proven_anew(proofs):
    import pickle

    plan = pickle.loads(pickle.dumps(hm.compile(ffn(), LOADS)))
    plan.run(**inputs())
    assert proofs == [1, 1]


@pytest.mark.parametrize("value", ["full", None, 2])
def test_unknown_ways_to_prove_are_refused(value):
    with pytest.raises(errors.UnknownPolicyError, match="prove is"):
        hm.compile(ffn(), LOADS, prove=value)


def test_a_plan_file_with_two_waits_swapped_by_hand_is_refused_with_the_counterexample():
    plan = hm.compile(ffn(), LOADS, device=SMALL)
    whole = json.loads(to_json(plan))
    waits = whole["waits"]["records"]
    first = int(part(plan.sections, "wait", 0)["event"].size > 0) or 0
    tasks = [t for t in range(len(plan.tasks)) if plan.tasks["wait_count"][t]]
    a, b = (int(plan.tasks["wait_begin"][t]) for t in (tasks[first], tasks[-1]))
    waits[a], waits[b] = waits[b], waits[a]
    edited = from_json(json.dumps(whole))
    with pytest.raises(errors.PlanUnsafe, match=r"waits for rows|writes rows|reads rows") as caught:
        edited.run(**inputs(), timeout=20)
    assert caught.value.counterexample["kind"] in ("hang", "race")
    with pytest.raises(errors.PlanUnsafe):
        edited.run(**inputs(), timeout=20)
