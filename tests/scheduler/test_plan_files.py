"""Plan files: what was saved comes back, in either form; a damaged file is refused in words and never believed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from comparing import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.scheduler import records as R
from hyper_mpmd.scheduler.plan_file import from_bytes, from_json, to_bytes, to_json

LOADS = [5, 0, 33, 7]
NUMBERS = (0, 1, 2, 3, 63, 64, 1000, 2**31 - 1, 2**31, R.MAX_INDEX, R.NONE)


def ffn(ranks: int = 1) -> hm.TaskGraph:
    g = hm.TaskGraph("ffn", ranks=ranks)
    x = g.input("x", (g.rows("tokens", groups=4), 32))
    w1, w2 = g.input("w1", (4 // ranks, 32, 32)), g.input("w2", (4 // ranks, 16, 32))
    rows = g.comm("dispatch", hm.ops.Dispatch(), x) if ranks > 1 else x
    rows = g.vector("act", hm.ops.SwiGLU(), g.cube("up", hm.ops.GroupedMatmul(), rows, w1))
    rows = g.cube("down", hm.ops.GroupedMatmul(), rows, w2)
    g.output("y", g.comm("combine", hm.ops.Combine(), rows) if ranks > 1 else rows)
    return g


def inputs(ranks: int = 1) -> dict[str, torch.Tensor]:
    return {
        "x": torch.ones(sum(LOADS), 32),
        "w1": torch.ones(4 // ranks, 32, 32),
        "w2": torch.ones(4 // ranks, 16, 32),
    }


def damaged(plan: hm.Plan, section: str, record: int, field: str, value: Any) -> str:
    """The plan's JSON with one number changed."""
    whole = json.loads(to_json(plan))
    whole[section]["records"][record][whole[section]["fields"].index(field)] = value
    return json.dumps(whole)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_both_forms_give_the_same_plan_back(case):
    for plan in case.compile():
        for again in (from_json(to_json(plan)), from_bytes(to_bytes(plan))):
            assert again == plan
            assert again.header == plan.header
            assert again.report() == plan.report()


def test_a_loaded_plan_runs(tmp_path):
    plan = hm.compile(ffn(), LOADS)
    for name in ("ffn.plan.json", "ffn.plan"):
        plan.save(tmp_path / name)
        assert torch.equal(hm.Plan.load(tmp_path / name).run(**inputs())["y"], plan.run(**inputs())["y"])


@pytest.mark.parametrize("field", ["dtype", "role", "storage", "most_rows", "rows", "cols", "offset"])
def test_a_tensor_that_is_not_the_graphs_is_refused(field):
    """The engine takes shapes from these records, memory comes from the graph: believed, this wrote past the end."""
    plan = hm.compile(ffn(), LOADS)
    for record in range(len(plan.sections["tensors"])):
        value = int(plan.sections["tensors"][field][record]) + 64
        with pytest.raises(errors.PlanFormatError, match=rf"'tensors', record {record}: .* should be"):
            from_json(damaged(plan, "tensors", record, field, value))


def test_an_op_that_is_not_the_graphs_is_refused():
    plan = hm.compile(ffn(), LOADS)
    with pytest.raises(errors.PlanFormatError, match=r"'ops', record 0: .* should be"):
        from_json(damaged(plan, "ops", 0, "kernel", R.KERNELS["nop"]))


@pytest.mark.parametrize("loads", [{}, {"tokens": [[1, 2]]}, {"tokens": [[5, 0, -1, 7]]}, {"tokens": [[5, 0, 34, 7]]}])
def test_loads_that_the_plan_was_not_made_for_are_refused(loads):
    whole = json.loads(to_json(hm.compile(ffn(), LOADS)))
    whole["header"]["loads"] = loads
    with pytest.raises(errors.PlanFormatError, match=r"loads of 'tokens'|no loads|should be"):
        from_json(json.dumps(whole))


@pytest.mark.parametrize(
    ("section", "field", "words"),
    [
        ("tasks", "op", r"op is 1000; there are 3 ops"),
        ("tasks", "wait_begin", r"wait_begin is 1000; those of the records before end at 0"),
        ("queues", "kind", r"kind is 1000; there are 3 core kinds"),
        ("signals", "event", r"signals of this rank, record 0: event is 1000; there are \d+ events"),
        ("launches", "dependency_count", r"dependency_count of section 'launches' add up to 1000"),
    ],
)
def test_a_record_that_points_out_of_the_file_is_refused(section, field, words):
    with pytest.raises(errors.PlanFormatError, match=words):
        from_json(damaged(hm.compile(ffn(), LOADS), section, 0, field, 1000))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_changed_number_is_refused_in_words_or_harmless(data):
    plan = hm.compile(ffn(), LOADS, policy=data.draw(st.sampled_from(["O0", "O1"])))
    section = data.draw(st.sampled_from([name for name, found in plan.sections.items() if found.dtype.names]))
    records = plan.sections[section]
    if not len(records):
        return
    field = data.draw(st.sampled_from(records.dtype.names))
    number = data.draw(st.integers(0, len(records) - 1))
    value = data.draw(st.sampled_from([n for n in NUMBERS if n <= np.iinfo(records.dtype[field]).max]))
    try:
        found = from_json(damaged(plan, section, number, field, value))
        found.report()
        found.timeline()
        found.run(**inputs(), timeout=20)
    except errors.LaunchTimeout:
        raise  # a launch that hangs is refused, not waited for
    except hm.HyperMpmdError:
        pass


def test_a_file_cut_short_anywhere_is_refused():
    image, text = to_bytes(hm.compile(ffn(), LOADS)), to_json(hm.compile(ffn(), LOADS))
    for end in range(0, len(image), 97):
        with pytest.raises(errors.PlanFormatError):
            from_bytes(image[:end])
    for end in range(0, len(text) - 1, 97):
        with pytest.raises(errors.PlanFormatError):
            from_json(text[:end])


def test_a_world_of_plans_that_do_not_belong_together_is_refused():
    """Different widths were believed: one rank wrote past the end of the other's buffer."""

    def made(loads=LOADS, **options):
        return hm.compile(ffn(2), [LOADS, loads], world=2, **options)

    first, second = made().plans
    for plans, words in (
        ([], "got none"),
        ([first], "got rank 0 of 2"),
        ([second, first], "got rank 1 of 2, rank 0 of 2"),
        ([first, first], "got rank 0 of 2, rank 0 of 2"),
    ):
        with pytest.raises(errors.WorldSizeError, match=words):
            hm.World(plans)
    wider = hm.TaskGraph("ffn", ranks=2)
    wider.output("y", wider.comm("dispatch", hm.ops.Dispatch(), wider.input("x", (wider.rows("t", groups=4), 64))))
    for other, name in (
        (hm.compile(wider, [LOADS, LOADS], world=2), "graph"),
        (made([1, 2, 3, 4]), "loads"),
        (made(tiles={"up": (3, 16)}), "tiles"),
    ):
        with pytest.raises(errors.PlanFormatError, match=f"rank 1's plan was made with other {name} than rank 0's"):
            hm.World([first, other[1]])
    assert hm.World([first, made(policy="O0")[1]]).run([inputs(2), inputs(2)])


def test_a_launch_that_waits_for_its_own_credit_is_refused():
    """Peers give it once they have finished, so it would never come."""
    plans = list(hm.compile(ffn(2), [LOADS, LOADS], world=2).plans)
    credits = np.flatnonzero(plans[1].sections["events"]["op"] == R.NONE)
    wait = int(np.flatnonzero(np.isin(plans[1].sections["waits"]["event"], credits))[0])
    plans[1] = from_json(damaged(plans[1], "waits", wait, "threshold", 1))
    with pytest.raises(errors.SignalError, match=r"the credit of rank 0.* of its own launch"):
        hm.World(plans).run([inputs(2), inputs(2)], timeout=20)
