"""Starting the command: help at once, and nothing heavy imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], ("torch", "numpy", "pydantic", "hyper_mpmd._native")),
        # typer itself reads options with pydantic once a command is chosen
        (["run", "--help"], ("torch", "numpy", "hyper_mpmd._native")),
        (["plan", "--nonsense"], ("torch", "numpy", "hyper_mpmd._native")),
    ],
)
def test_help_and_usage_errors_import_nothing_heavy(arguments, unwanted):
    code = (
        f"import sys, json; sys.argv = ['hyper-mpmd', *{arguments}]\n"
        "from hyper_mpmd.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print(json.dumps([name for name in {unwanted} if name in sys.modules]))"
    )
    result = python("-c", code)
    assert json.loads(result.stdout.splitlines()[-1]) == [], result.stderr


def test_help_answers_at_once():
    """Half a second on a quiet machine; the best of a few here, with room for a busy one."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = python("-m", "hyper_mpmd", "--help")
        times.append(time.perf_counter() - start)
        assert result.returncode == 0
        assert all(command in result.stdout for command in ("run", "plan", "show"))
    assert min(times) < 1.0, times


def test_json_alone_is_on_stdout_of_a_process():
    result = python(
        "-m", "hyper_mpmd", "run", "moe-ffn", "--tokens", "8", "--hidden", "16", "--intermediate", "16", "--json"
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["bit_identical"] is True


def test_a_refusal_is_one_line_on_stderr():
    result = python("-m", "hyper_mpmd", "run", "moe-ffn", "--device", "gpu")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "UnknownDeviceError" in result.stderr


NO_NATIVE = "import sys; sys.modules['hyper_mpmd._native'] = None\n"


def test_a_native_module_that_cannot_be_imported_is_one_line():
    code = NO_NATIVE + "sys.argv = ['hyper-mpmd', 'run', 'moe-ffn']\nfrom hyper_mpmd.cli import main\nmain()"
    result = python("-W", "ignore", "-c", code)
    assert result.returncode == 1
    assert result.stderr.startswith("hyper-mpmd: the native module cannot be imported (")
    assert result.stderr.endswith("run `make setup`\n")
    assert len(result.stderr.splitlines()) == 1


def test_planning_without_the_native_module_warns_once_and_plans():
    code = NO_NATIVE + (
        "import warnings\n"
        "from hyper_mpmd.scheduler.backend import PythonBackend, get_backend\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    made = [get_backend(None) for _ in range(3)] + [get_backend('python')]\n"
        "print(len(seen), 'make setup' in str(seen[0].message), all(isinstance(one, PythonBackend) for one in made))"
    )
    assert python("-c", code).stdout.split() == ["1", "True", "True"]
