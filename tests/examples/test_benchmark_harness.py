"""The harness of the benchmarks: everyone gets a turn in every round, ratios are taken round by round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
import harness

ROOT = Path(__file__).resolve().parent.parent.parent


def test_contenders_run_in_turn_and_the_first_one_changes():
    calls: list[str] = []
    seconds = harness.interleave({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warm=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", 3)


def test_a_slow_machine_gets_fewer_rounds_but_at_least_one():
    assert len(harness.interleave({"a": lambda: None}, rounds=9, limit_s=0.0)["a"]) == 1


def test_ratios_are_taken_round_by_round():
    own, peer = [1.0, 10.0, 1.0], [2.0, 20.0, 2.0]  # the machine was ten times slower in the second round
    assert harness.times_as_fast(own, peer) == 2.0
    assert harness.spread([1.0, 1.0, 1.0]) == 0.0
    assert harness.spread([3.0]) == 0.0


def test_json_has_medians_ratios_and_the_bound(monkeypatch, capsys):
    rates = harness.Rates(copy=1e9, product={torch.float32: 1e9})
    monkeypatch.setattr(harness, "measure_rates", lambda: rates)
    made = harness.Comparison("a case", {"own": [0.5], "peer": [1.0]}, flops=2.5e8, bytes=1e6, dtype=torch.float32)
    assert harness.main("a benchmark", lambda rounds: [made], ["peer"], ["--json", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    (record,) = json.loads(out)
    assert record["contenders"]["own"]["times_as_fast_as"] == {"peer": 2.0}
    assert record["contenders"]["own"]["of_bound"] == pytest.approx(0.5)
    assert record["bound_by"] == "products"
    assert "a case" in err


def test_the_engines_benchmark_measures_every_shape():
    """It calls the native module below `run`, so nothing else notices when the two drift apart."""
    command = [sys.executable, "benchmarks/engine.py", "--tasks", "2000", "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert {(case["shape"], case["workers"]) for case in cases} == {
        (shape, workers) for shape in ("chain", "flat", "grid") for workers in (1, 2)
    }
    assert all(case["run_ns"] > 0 for case in cases)
