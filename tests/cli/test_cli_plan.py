"""`hyper-mpmd plan` and `show`: what is in a plan, saved and drawn."""

from __future__ import annotations

import json

import pytest

import hyper_mpmd as hm


def test_plan_as_json_tells_tasks_events_bounds_tiles_and_time(call, small):
    result = call("plan", "moe-ffn", *small, "--device", "ascend-a3", "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["tasks"] == sum(record["tasks_by_kind"].values()) > 0
    assert record["events"] > 0
    assert record["predicted_ns"] > 0
    assert record["bound_ns"] == max(record["bounds"].values()) > 0
    assert set(record["tiles"]) == {"permute", "up", "act", "down", "unpermute"}
    assert record["planning_s"] > 0
    assert len(record["hash"]) == 64


def test_plan_of_a_world_has_a_record_a_rank(call, small):
    record = json.loads(call("plan", "moe-ffn", *small, "--ep", 2, "--json").stdout)
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert record["tasks"] == sum(rank["tasks"] for rank in record["ranks"])
    alone = json.loads(call("plan", "moe-ffn", *small, "--ep", 2, "--rank", 1, "--json").stdout)
    assert alone["hash"] == record["ranks"][1]["hash"]


def test_plan_and_show_know_experts_cut_over_ranks(call, small):
    record = json.loads(call("plan", "moe-ffn", *small, "--ep", 2, "--tp", 2, "--json").stdout)
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1, 2, 3]
    assert {"reduce_scatter", "reduce", "all_gather"} < set(record["tiles"])
    shown = call("show", "moe-ffn", *small, "--ep", 2, "--tp", 2)
    assert shown.exit_code == 0, shown.stderr
    assert "reduce_scatter" in shown.stdout


def test_plan_is_the_same_each_time(call, small):
    hashes = {json.loads(call("plan", "moe-ffn", *small, "--json").stdout)["hash"] for _ in range(2)}
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ["ffn.plan.json", "ffn.plan"])
def test_a_saved_plan_loads_and_shows(call, small, tmp_path, name):
    file = tmp_path / name
    result = call("plan", "moe-ffn", *small, "--save", file, "--json")
    assert result.exit_code == 0
    assert str(file) in result.stderr
    assert hm.Plan.load(file).hash == json.loads(result.stdout)["hash"]
    for measured in ([], ["--measured"]):
        shown = call("show", file, *measured)
        assert shown.exit_code == 0, shown.stderr
        assert "unpermute" in shown.stdout


def test_a_world_is_saved_as_a_file_a_rank(call, small, tmp_path):
    call("plan", "moe-ffn", *small, "--ep", 2, "--save", tmp_path / "w.plan")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["w.r0.plan", "w.r1.plan"]
    result = call("show", tmp_path / "w.r1.plan", "--measured")
    assert result.exit_code == 1
    assert "cannot run alone" in result.stderr


def test_options_of_graphs_do_not_go_with_a_plan_file(call, small, tmp_path):
    file = tmp_path / "w.plan"
    call("plan", "moe-ffn", *small, "--save", file)
    assert call("show", file, "--tokens", 3).exit_code == 2
    for option, value in (("--policy", "O0"), ("--device", "ascend-a3"), ("--rank", 0), ("--backend", "python")):
        result = call("show", file, option, value)
        assert result.exit_code == 2
        assert option in result.stderr


def test_more_ranks_than_a_world_can_have_are_refused_at_once(call):
    result = call("plan", "moe-ffn", "--ep", 5000, "--experts", 5000)
    assert result.exit_code == 1
    assert "5000 ranks; it must be from 1 to 4096" in result.stderr


def test_a_file_that_is_no_plan_is_refused(call, tmp_path):
    file = tmp_path / "no.plan"
    file.write_text("hello")
    result = call("show", file)
    assert result.exit_code == 1
    assert "not a plan file" in result.stderr


def test_report_for_people(call, small):
    result = call("plan", "moe-ffn", *small, "--ep", 2)
    assert result.exit_code == 0
    for word in ("dispatch", "combine", "events", "queues", "bound / predicted", "rank 1", "planned in"):
        assert word in result.stdout


@pytest.mark.parametrize("measured", [False, True])
def test_show_as_json_has_spans_of_all_tasks(call, small, measured):
    options = ["--measured"] if measured else []
    record = json.loads(call("show", "moe-ffn", *small, *options, "--json").stdout)
    assert record["kind"] == ("measured" if measured else "predicted")
    tasks = json.loads(call("plan", "moe-ffn", *small, "--json").stdout)["tasks"]
    assert len(record["spans"]["start_ns"]) == tasks


@pytest.mark.timeout(60)
def test_a_large_model_plans_for_an_npu(call):
    sizes = {"--tokens": 4096, "--hidden": 7168, "--intermediate": 2048, "--experts": 256, "--top-k": 8}
    options = [word for option in sizes.items() for word in option]
    result = call("plan", "moe-ffn", "--device", "ascend-a3", *options, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["tasks"] > 1_000
