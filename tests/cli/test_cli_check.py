"""`hyper-mpmd check`: proofs and counter-examples, for people and for scripts."""

from __future__ import annotations

import json

import pytest

import hyper_mpmd as hm


@pytest.mark.parametrize(
    "options", [(), ("--ep", 2), ("--policy", "O0"), ("--backend", "python"), ("--device", "ascend-a3")]
)
def test_check_says_what_was_proven(call, small, options):
    result = call("check", "moe-ffn", *small, *options)
    assert result.exit_code == 0, result.stderr
    assert "proven" in result.stdout
    assert "every threshold is the number of its signals" in result.stdout
    record = json.loads(call("check", "moe-ffn", *small, *options, "--json").stdout)
    assert record["proven"] is True
    assert record["tasks"] > 0
    assert record["pairs"] > 0
    assert record["seconds"] > 0


def test_check_of_one_rank_says_that_it_is_one(call, small):
    result = call("check", "moe-ffn", *small, "--ep", 2, "--rank", 1)
    assert result.exit_code == 0
    assert "proven for rank 1 alone" in result.stdout
    assert "taken to arrive" in result.stdout


def saved(call, small, tmp_path, *options):
    call("plan", "moe-ffn", *small, *options, "--save", tmp_path / "w.json")
    return sorted(tmp_path.glob("w*.json"))


def test_check_of_plan_files_proves_them_together(call, small, tmp_path):
    files = saved(call, small, tmp_path, "--ep", 2)
    record = json.loads(call("check", *files, "--json").stdout)
    assert record["world"] is True
    assert record["ranks"] == 2
    wrong = call("check", *reversed(files))
    assert wrong.exit_code == 1
    assert "in order" in wrong.stderr


def edit(file, change):
    whole = json.loads(file.read_text())
    change(whole)
    file.write_text(json.dumps(whole))


def no_waits_of_act(whole):
    ops = [node["name"] for node in json.loads(whole["header"]["graph"])["tasks"]]
    fields = whole["tasks"]["fields"]
    for task in whole["tasks"]["records"]:
        if ops[task[fields.index("op")]] == "act":
            begin = task[fields.index("wait_begin")]
            for wait in whole["waits"]["records"][begin : begin + task[fields.index("wait_count")]]:
                wait[1] = 0


def test_check_shows_a_race_with_the_cores_it_is_about(call, small, tmp_path):
    (file,) = saved(call, small, tmp_path, "--device", "ascend-a3")
    edit(file, no_waits_of_act)
    result = call("check", file)
    assert result.exit_code == 1
    assert "RaceError" in result.stdout
    assert "[act.t0]" in result.stdout
    assert "as it was scheduled" in result.stdout
    assert "AIV" in result.stdout
    record = json.loads(call("check", file, "--json").stdout)
    assert record["proven"] is False
    assert record["error"] == "RaceError"
    assert record["counterexample"]["second"]["task"].startswith("act")


def test_check_shows_a_hang_with_the_queues_that_stand(call, small, tmp_path):
    (file,) = saved(call, small, tmp_path, "--device", "ascend-a3")

    def wait_for_itself(whole):
        column = {name: n for n, name in enumerate(whole["tasks"]["fields"])}
        task = next(t for t in whole["tasks"]["records"] if t[column["wait_count"]] and t[column["signal_count"]])
        _, event = whole["signals"]["records"][task[column["signal_begin"]]]
        threshold = whole["events"]["records"][event][0]
        whole["waits"]["records"][task[column["wait_begin"]]] = [event, threshold]

    edit(file, wait_for_itself)
    result = call("check", file)
    assert result.exit_code == 1
    assert "HangError: AI" in result.stdout
    assert "the same task" in result.stdout
    assert "[up.e" in result.stdout
    record = json.loads(call("check", file, "--json").stdout)
    assert len(record["counterexample"]["circle"]) == 1


def test_options_of_planning_do_not_go_with_plan_files(call, small, tmp_path):
    (file,) = saved(call, small, tmp_path)
    for option in (("--policy", "O0"), ("--tokens", 3)):
        assert call("check", file, *option).exit_code == 2
    assert call("check", file, "--backend", "python").exit_code == 0
    assert call("check", "moe-ffn", "moe-ffn").exit_code == 2


def test_a_saved_plan_that_is_checked_is_the_one_that_was_planned(call, small, tmp_path):
    (file,) = saved(call, small, tmp_path)
    assert json.loads(call("check", file, "--json").stdout)["hash"] == hm.Plan.load(file).hash
