"""examples/expert_parallel.py under torchrun, as its docstring says."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel.py"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_example_prints_small_errors_for_all_four_uses(ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), EXAMPLE]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\w+) +(\d) ranks: output (\S+), gradients (\S+)$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in lines] == ["standard_ep", "ep_and_tp", "load_balancing", "dp_ep_tp"]
    for _, size, output, gradients in lines:
        assert int(size) == ranks
        assert 0.0 <= float(output) <= 1e-5
        assert 0.0 < float(gradients) <= 1e-5


def test_the_example_takes_a_nan_for_an_error():
    relative_error = runpy.run_path(str(EXAMPLE))["relative_error"]
    good = torch.tensor([1.0, 2.0])
    nan = torch.tensor([1.0, float("nan")])
    assert relative_error(good, good) == 0.0
    assert relative_error(nan, good) == relative_error(good, nan) == relative_error(good, 0 * good) == float("inf")


def test_the_example_leaves_without_shutting_the_interpreter_down(tmp_path):
    """Which is when a thread of gloo's, freeing its last tensor, would abort the process now and then."""
    mark = tmp_path / "shut down"
    code = f"import atexit, pathlib, runpy; atexit.register(pathlib.Path({str(mark)!r}).touch)"
    code += f"; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [sys.executable, *launch, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "dp_ep_tp" in done.stdout
    assert not mark.exists()
