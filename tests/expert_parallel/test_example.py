"""examples/expert_parallel.py under torchrun, as its docstring says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
