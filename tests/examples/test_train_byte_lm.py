"""The training example learns, and its losses are those of the experts in plain torch, on one rank and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Three runs of 50 steps and interpreters that import torch: a busy machine needs longer than other tests.
pytestmark = pytest.mark.timeout(400)
# A thread a process: more would spin against one another on a machine that does other things as well.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parent.parent.parent


def train(ranks: int, *arguments: str) -> dict[str, Any]:
    """The JSON of a run."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    result = subprocess.run(
        [sys.executable, *start, "examples/train_byte_lm.py", "--json", "--losses", *arguments],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    made: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return made


@pytest.fixture(scope="module")
def plain():
    return train(1, "--steps", "50", "--plain")


@pytest.mark.parametrize("ranks", [1, 2])
def test_fifty_steps_lose_what_plain_torch_loses(plain, ranks):
    made = train(ranks, "--steps", "50")
    assert made["last_loss"] < made["first_loss"] - 2
    assert made["tokens_per_second"] > 0
    assert max(abs(a - b) for a, b in zip(made["losses"], plain["losses"], strict=True)) < 1e-4


def test_plain_torch_over_two_ranks_loses_the_same(plain):
    made = train(2, "--steps", "10", "--plain")
    assert max(abs(a - b) for a, b in zip(made["losses"], plain["losses"][:10], strict=True)) < 1e-4


def test_timelines_of_a_step_are_drawn_and_change_no_loss(plain):
    result = subprocess.run(
        [sys.executable, "examples/train_byte_lm.py", "--steps", "10", "--timeline", "--json", "--losses"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    for words in ("rank 0 of 1, forward", "rank 0 of 1, backward", "w1_grad", "busy"):
        assert words in result.stdout
    losses = json.loads(result.stdout.splitlines()[-1])["losses"]
    assert max(abs(a - b) for a, b in zip(losses, plain["losses"][:10], strict=True)) < 1e-4


def test_a_run_goes_on_from_a_checkpoint_at_another_number_of_ranks(plain, tmp_path):
    train(2, "--steps", "5", "--save", str(tmp_path / "saved"))
    made = train(1, "--steps", "5", "--resume", str(tmp_path / "saved"))
    assert made["steps"] == 10
    assert max(abs(a - b) for a, b in zip(made["losses"], plain["losses"][5:10], strict=True)) < 1e-4
