"""Every example runs as a user would run it, and checks itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run_script(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["quickstart", "custom_op", "allgather_matmul"])
def test_example_equals_plain_torch(name):
    assert "max relative error against plain torch" in run_script(f"examples/{name}.py")


def test_the_demo_takes_a_text_and_shows_routing_figures_and_timelines(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Of skewed routing there is no end. " * 10)
    out = run_script("examples/demo.py", "--text", str(text), "--tokens", "256", "--rounds", "1")
    for words in (
        "256 bytes",
        "where the text goes",
        "O1, one fused run",
        "torch grouped",
        "agree bit for bit",
        "busy",
    ):
        assert words in out


def test_graphs_of_examples_run_and_plan_from_the_command_line():
    run_script("-m", "hyper_mpmd", "run", "examples/custom_op.py:graph", "--repeat", "1")
    assert "gather" in run_script("-m", "hyper_mpmd", "show", "examples/allgather_matmul.py:graph")
