"""The command line in this process: stdout and stderr apart, exit status beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyper_mpmd.cli import app

SMALL = ["--tokens", "64", "--hidden", "64", "--intermediate", "32", "--experts", "4", "--top-k", "2"]


@pytest.fixture
def small() -> list[str]:
    """Options of a moe-ffn that takes no time."""
    return list(SMALL)


@pytest.fixture
def call() -> Callable[..., Any]:
    """call("run", "moe-ffn", ...): the result, with exit_code, stdout and stderr."""

    def invoke(*arguments: object) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="hyper-mpmd")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """A user's file with graphs of several kinds."""
    file = tmp_path / "my_graphs.py"
    file.write_text(
        """
import hyper_mpmd as hm

def graph():
    g = hm.TaskGraph("mine")
    rows = g.rows("rows", groups=2)
    x, w = g.input("x", (rows, 16)), g.input("w", (2, 16, 8))
    g.output("y", g.cube("product", hm.ops.GroupedMatmul(), x, w))
    return g

def graph_with_loads():
    return graph(), {"rows": [5, 0]}

def wrong():
    g = hm.TaskGraph("wrong")
    x, w = g.input("x", (4, 16)), g.input("w", (17, 8))
    g.cube("product", hm.ops.Matmul(), x, w)

def raises():
    return {}["nothing"]

def number():
    return 3
"""
    )
    return file
