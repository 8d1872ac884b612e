"""Which package may import which, at module level: imports point one way, and torch stays where it is needed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hyper_mpmd"
TORCH_PACKAGES = {"modules", "engine", "expert_parallel", "shmem", "testing", "profiler"}
# Package -> the packages that it may import; what is not listed (the command line, tests' helpers) may import anything.
MAY_IMPORT = {
    "errors": set(),
    "tasks": {"errors"},
    "ops": {"errors", "tasks"},
    "scheduler": {"errors", "tasks", "ops", "_native"},
    "viz": {"errors", "tasks", "ops", "scheduler"},
    "engine": {"errors", "tasks", "ops", "scheduler", "shmem", "_native"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Modules imported when this file is, those for type checkers left out."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    modules = imported(file)
    if part(file) not in TORCH_PACKAGES:
        assert not [name for name in modules if name.split(".")[0] == "torch"]
    allowed = MAY_IMPORT.get(part(file))
    if allowed is not None:
        own = {name.split(".")[1] for name in modules if name.startswith("hyper_mpmd.")}
        assert own - {part(file)} <= allowed
