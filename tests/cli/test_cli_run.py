"""`hyper-mpmd run`: right numbers, the same bits, JSON that scripts can rely on, refusals in a line."""

from __future__ import annotations

import json

import pytest
import torch

from hyper_mpmd.engine.compare import digest, max_rel_error


@pytest.mark.parametrize("ep", [1, 2])
def test_the_issue_s_command_is_right_and_bit_identical(call, ep):
    sizes = {"--tokens": 1024, "--hidden": 1024, "--intermediate": 512, "--experts": 8, "--top-k": 2}
    options = [word for option in sizes.items() for word in option]
    result = call("run", "moe-ffn", *options, "--json", "--ep", ep, "--repeat", 1)
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["max_rel_error"] <= 1e-5
    assert record["bit_identical"] is True
    assert set(record["policies"]) == {"O0", "O1"}
    assert record["max_rel_error"] == max(policy["max_rel_error"] for policy in record["policies"].values())
    assert all(policy["output_sha256"] == record["output_sha256"] for policy in record["policies"].values())
    assert all(policy["tasks_per_second"] > 0 for policy in record["policies"].values())


def test_one_policy_runs_alone(call, small):
    record = json.loads(call("run", "moe-ffn", *small, "--policy", "O0", "--json").stdout)
    assert list(record["policies"]) == ["O0"]
    assert record["bit_identical"] is True


def test_the_output_does_not_depend_on_workers_or_ranks_sharing_them(call, small):
    digests = {
        json.loads(call("run", "moe-ffn", *small, "--ep", 2, "--json", "--workers", workers).stdout)["output_sha256"]
        for workers in (1, 3)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("routing", ["balanced", "zipf:2", "single"])
def test_16_bits_under_every_routing(call, small, routing, dtype):
    result = call("run", "moe-ffn", *small, "--dtype", dtype, "--routing", routing, "--repeat", 1, "--json")
    assert result.exit_code == 0, result.stdout + result.stderr


@pytest.mark.parametrize("ep", [1, 2])
def test_the_backward_graph_runs_by_name(call, small, ep):
    record = json.loads(call("run", "moe-ffn-backward", *small, "--ep", ep, "--repeat", 1, "--json").stdout)
    assert record["graph"] == "moe-ffn-backward"
    assert record["max_rel_error"] <= 1e-5
    assert record["bit_identical"] is True


@pytest.mark.parametrize("graph", ["moe-ffn", "moe-ffn-backward"])
@pytest.mark.parametrize("options", [[], ["--processes"], ["--tp", 2]], ids=str)
def test_pull_gives_the_bits_of_push(call, small, graph, options):
    pull, push = (
        json.loads(
            call("run", graph, *small, "--ep", 2, *options, "--dispatch-mode", mode, "--repeat", 1, "--json").stdout
        )
        for mode in ("pull", "push")
    )
    assert (pull["dispatch_mode"], push["dispatch_mode"]) == ("pull", "push")
    assert pull["output_sha256"] == push["output_sha256"]
    assert pull["max_rel_error"] <= 1e-5


@pytest.mark.parametrize("graph", ["moe-ffn", "moe-ffn-backward"])
@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2)])
def test_experts_cut_over_ranks_run_by_option(call, small, graph, ep, tp):
    record = json.loads(call("run", graph, *small, "--ep", ep, "--tp", tp, "--repeat", 1, "--json").stdout)
    assert (record["ep"], record["tp"]) == (ep, tp)
    assert record["max_rel_error"] <= 1e-5
    assert record["bit_identical"] is True


def test_counts_from_a_file_decide_the_tokens(call, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text("[10, 0, 7, 3]")
    result = call("run", "moe-ffn", "--experts", 4, "--top-k", 2, "--hidden", 64, "--routing", file, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["tokens"] == 10


def test_people_get_a_table(call, small):
    result = call("run", "moe-ffn", *small)
    assert result.exit_code == 0
    assert "O0" in result.stdout
    assert "the same bits in every run" in result.stdout


def test_a_graph_from_a_file_runs_on_inputs_at_random(call, graph_file, tmp_path):
    assert call("run", f"{graph_file}:graph_with_loads").exit_code == 0
    loads = tmp_path / "loads.json"
    loads.write_text('{"rows": [3, 4]}')
    assert call("run", f"{graph_file}:graph", "--routing", loads).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nothing"], 2, "moe-ffn-backward or FILE.py:FUNCTION"),
        (["moe-ffn", "--tokens", "0"], 2, "--tokens"),
        (["moe-ffn", "--policy", "O7"], 2, "O7"),
        (["moe-ffn", "--no-such-option"], 2, "--no-such-option"),
        (["missing.py:graph"], 2, "no file"),
        (["moe-ffn", "--device", "gpu"], 1, "no device is called 'gpu'"),
        (["moe-ffn", "--experts", "3", "--ep", "2"], 1, "3 experts"),
        (["moe-ffn", "--intermediate", "9", "--tp", "2"], 1, "intermediate is 9, which tp=2 does not divide"),
        (["moe-ffn", "--ep", "64", "--tp", "100"], 1, "6400 ranks"),
        (["missing.py:graph", "--tp", "2"], 2, "--tp is an option of built-in graphs"),
        (["moe-ffn", "--top-k", "9"], 1, "top_k is 9"),
        (["moe-ffn", "--routing", "zipf:much"], 1, "zipf:S"),
        (["moe-ffn", "--routing", "missing.json"], 1, "missing.json"),
    ],
)
def test_refusals_name_what_is_wrong(call, arguments, status, words):
    result = call("run", *arguments, "--json")
    assert result.exit_code == status, result.stderr
    assert result.stdout == ""
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("graph", 1, "gives no loads for row space(s) 'rows' (2 counts)"),
        ("wrong", 1, "line 17: ShapeError: task 'product'"),
        ("raises", 1, "line 20: KeyError: 'nothing'"),
        ("number", 1, "returned a int"),
        ("absent", 2, "defines no function 'absent'"),
    ],
)
def test_a_user_s_file_that_is_wrong_is_told_where(call, graph_file, function, status, words):
    result = call("run", f"{graph_file}:{function}")
    assert result.exit_code == status
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_a_kernel_that_computes_something_else_is_a_wrong_result(call, tmp_path):
    file = tmp_path / "wrong_kernel.py"
    file.write_text(
        """
from typing import ClassVar
import hyper_mpmd as hm
from hyper_mpmd.tasks import Access, Op, TensorType, TileRule

class Double(Op):
    core: ClassVar[str] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0", cols="in0.1", inputs=((Access("rows", "cols"),),), outputs=((Access("rows", "cols"),),)
    )
    def shapes(self, inputs):
        return (TensorType(inputs[0].shape, inputs[0].dtype),)
    def reference(self, layout, x):
        return x * 2
    def kernel(self, tile, x, y):
        y.copy_(x * 2.001)

def graph():
    g = hm.TaskGraph("double")
    g.output("y", g.vector("twice", Double(), g.input("x", (g.rows("rows"), 8))))
    return g, 20
"""
    )
    result = call("run", f"{file}:graph", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["max_rel_error"] == pytest.approx(5e-4, rel=1e-2)
    assert record["bit_identical"] is True
    assert "wrong" in call("run", f"{file}:graph").stdout


def test_what_does_not_fit_into_memory_is_refused_before_anything_is_made(call):
    sizes = {"--hidden": 1 << 15, "--intermediate": 1 << 15, "--experts": 4096, "--tokens": 4, "--routing": "balanced"}
    result = call("run", "moe-ffn", *(word for option in sizes.items() for word in option))
    assert result.exit_code == 1
    assert "TiB" in result.stderr


def test_error_is_relative_to_the_largest_reference_and_sees_nan():
    reference = [{"y": torch.tensor([4.0, -8.0])}]
    assert max_rel_error([{"y": torch.tensor([4.0, -7.0])}], reference) == 0.125
    assert max_rel_error([{"y": torch.tensor([4.0, float("nan")])}], reference) == float("inf")
    assert max_rel_error([{"y": torch.zeros(0)}], [{"y": torch.zeros(0)}]) == 0.0


def test_digest_follows_ranks_in_order_and_takes_bfloat16():
    a, b = {"y": torch.ones(2, dtype=torch.bfloat16)}, {"y": torch.zeros(2, dtype=torch.bfloat16)}
    assert digest([a, b]) != digest([b, a])


@pytest.mark.parametrize(("graph", "ep", "tp"), [("moe-ffn", 2, 1), ("moe-ffn", 2, 2), ("moe-ffn-backward", 1, 2)])
def test_processes_give_the_bits_of_one_process(call, graph, ep, tp):
    sizes = {"tokens": 96, "hidden": 64, "intermediate": 32, "experts": 4, "ep": ep, "tp": tp, "repeat": 2}
    options = ["run", graph, "--json", *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    records = []
    for extra in ([], ["--processes"]):
        result = call(*options, *extra)
        assert result.exit_code == 0, result.stderr
        records.append(json.loads(result.stdout))
    assert [record["processes"] for record in records] == [False, True]
    assert records[0]["output_sha256"] == records[1]["output_sha256"]
    assert records[1]["bit_identical"] is True
    assert records[1]["max_rel_error"] <= 1e-5
