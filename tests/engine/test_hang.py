"""A launch past its deadline: its error, its data and its file name who waits for whom, and the root cause."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.cli import app
from hyper_mpmd.engine import run as engine
from hyper_mpmd.engine.hang import core_records, hang_report, root_cause
from hyper_mpmd.scheduler.records import CORE, CORE_STATES, NONE
from hyper_mpmd.scheduler.world import World
from hyper_mpmd.testing.explore import explore
from hyper_mpmd.testing.graphs import inputs_for
from hyper_mpmd.testing.mutate import mutate
from hyper_mpmd.testing.worlds import moe_world

from .graphs import PROBE, DoubleInPlace, Probe


@pytest.fixture(autouse=True)
def _files_and_probe(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPER_MPMD_HANG_DIR", str(tmp_path))
    PROBE.clear()
    yield
    PROBE.clear()


def slow_then_after(policy="O1"):
    g = hm.TaskGraph("late")
    x = g.input("x", (32, 16))
    g.output("y", g.vector("after", DoubleInPlace(), g.vector("slow", Probe(), x)))
    return hm.compile(g, policy=policy, tiles={"slow": (32, 16), "after": (16, 16)}, device="ascend-a3")


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_a_slow_task_is_the_root_cause_in_text_data_file_and_command(policy):
    plan, inputs = slow_then_after(policy), {"x": torch.ones(32, 16)}
    PROBE["call"] = lambda tile: time.sleep(0.5)
    with pytest.raises(errors.LaunchTimeout) as caught:
        plan.run(**inputs, workers=3, timeout=0.1)
    text, report = str(caught.value), caught.value.report
    assert len(text.splitlines()) < 25
    assert report["root"]["kind"] == "running"
    assert "is inside slow.t0, which has not ended" in text
    assert {core["state"] for core in report["cores"]} >= {"waiting", "running"}
    waiting = [core for core in report["cores"] if core["state"] == "waiting"]
    assert all(core["signallers"][0] | {"core": ""} == {"rank": 0, "core": "", "task": "slow.t0", "state": "running"}
               for core in waiting)  # fmt: skip
    assert json.loads(caught.value.path.read_text()) == report
    records = core_records(report)
    assert records.tobytes() == caught.value.records.tobytes()
    assert records.nbytes == 64 * np.count_nonzero(plan.sections["queues"]["count"])
    states = [CORE_STATES[state] for state in records["state"].tolist()]
    assert states == [core["state"] for core in report["cores"]]
    assert records["tasks"].sum() == len(plan.tasks)
    assert records["ended"].sum() == 0
    assert (records["elapsed_ns"] >= 0.1e9).all()
    said = CliRunner().invoke(app, ["explain-hang", str(caught.value.path)])
    assert said.exit_code == 0
    assert "root cause: " + report["root"]["text"] in said.stdout
    as_json = CliRunner().invoke(app, ["explain-hang", "--json", str(caught.value.path)])
    assert json.loads(as_json.stdout) == report
    PROBE.clear()
    assert torch.equal(plan.run(**inputs, timeout=30)["y"], inputs["x"] * 4)


def test_the_environment_sets_the_deadline_of_launches_that_were_given_none(monkeypatch):
    plan, inputs = slow_then_after(), {"x": torch.ones(32, 16)}
    PROBE["call"] = lambda tile: time.sleep(0.5)
    monkeypatch.setenv("HYPER_PARALLEL_SHMEM_TIMEOUT_SEC", "0.1")
    with pytest.raises(errors.LaunchTimeout):
        plan.run(**inputs, workers=3)
    assert torch.equal(plan.run(**inputs, workers=3, timeout=30)["y"], inputs["x"] * 4)
    monkeypatch.setenv("HYPER_PARALLEL_SHMEM_TIMEOUT_SEC", "soon")
    with pytest.raises(ValueError, match="HYPER_PARALLEL_SHMEM_TIMEOUT_SEC='soon'"):
        plan.run(**inputs)
    monkeypatch.delenv("HYPER_PARALLEL_SHMEM_TIMEOUT_SEC")
    assert torch.equal(plan.run(**inputs, workers=3)["y"], inputs["x"] * 4)


def test_worlds_made_to_hang_name_a_root_cause_that_is_no_running_task(monkeypatch):
    # The engine takes no plan that is not proven. Here it has to, as far as its own checks let it.
    monkeypatch.setattr(engine, "require_proof", lambda plans: None)
    monkeypatch.setattr(engine, "proof_of", lambda plans: SimpleNamespace(world=True))
    found = []
    for seed in range(60):
        plans = moe_world(seed)
        inputs, mutant = inputs_for(plans[0].graph, plans[0].header.loads, seed=0), mutate(plans, seed)
        if inputs is None or mutant is None or explore(mutant.plans, method="pairs").kind != "hang":
            continue
        try:
            for _ in range(2):
                World(mutant.plans).run(inputs, timeout=0.2)
        except errors.LaunchTimeout as error:
            found.append((error.report["root"]["kind"], mutant.what, str(error)))
        except errors.PlanFormatError:
            continue
    assert {kind for kind, *_ in found} & {"circle", "lost signal"}, found
    assert not [one for one in found if one[0] == "running"]
    assert max(len(text.splitlines()) for *_, text in found) < 25


def test_a_signal_that_never_came_is_told_from_a_task_that_never_ended():
    plan = slow_then_after()
    waits = [task for task in range(len(plan.tasks)) if plan.task_name(task).startswith("after")]
    queue = int(plan.queue_of[waits[0]])
    event = int(plan.sections["waits"]["event"][int(plan.tasks[waits[0]]["wait_begin"])])
    cores = np.zeros(len(plan.sections["queues"]), CORE)
    cores["queue"], cores["task"], cores["event"] = np.arange(len(cores)), NONE, NONE
    waiting = CORE_STATES.index("waiting")
    for name, value in {"state": waiting, "task": waits[0], "event": event, "have": 0, "need": 1}.items():
        cores[name][queue] = value
    report = hang_report([plan], cores, 1.0)
    assert report["root"]["kind"] == "lost signal"
    assert "has 0 of 1" in report["root"]["text"]


def test_cores_that_wait_for_one_another_are_a_circle():
    def core(name, other):
        signaller = {"rank": 0, "core": other, "task": f"t of {other}", "state": "not started"}
        return {"rank": 0, "core": name, "state": "waiting", "task": f"t of {name}", "event": "e", "have": 0, "need": 1,
                "signallers": [signaller]}  # fmt: skip

    root = root_cause({"ranks": 1, "cores": [core("AIV 2", "AIV 0"), core("AIV 0", "AIV 1"), core("AIV 1", "AIV 0")]})
    assert root["kind"] == "circle"
    assert root["text"].endswith("AIV 0, AIV 1")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "hyper-mpmd hang", "version": 1}', '"x"', "\x00"])
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "file.json"
    file.write_text(content)
    said = CliRunner().invoke(app, ["explain-hang", str(file)])
    assert said.exit_code == 1
    assert said.stderr.startswith("hyper-mpmd: HangFileError: ")
    assert len(said.stderr.splitlines()) == 1


def test_where_no_file_can_be_written_the_error_still_tells_all(monkeypatch, tmp_path):
    monkeypatch.setenv("HYPER_MPMD_HANG_DIR", str(tmp_path / "missing"))
    PROBE["call"] = lambda tile: time.sleep(0.3)
    with pytest.raises(errors.LaunchTimeout, match="no file was written") as caught:
        slow_then_after().run(x=torch.ones(32, 16), workers=3, timeout=0.1)
    assert caught.value.path is None
    assert caught.value.report["root"]["kind"] == "running"
