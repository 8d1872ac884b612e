"""What a command works on: a built-in graph of given sizes, or a user's own from a file; with its loads and inputs."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hyper_mpmd.errors import GraphFormatError, HyperMpmdError, LoadsError
from hyper_mpmd.scheduler.compile import compile as compile_graph
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.tasks import TaskGraph

BUILT_IN = ("moe-ffn", "moe-ffn-backward")
_DEFAULTS = {"tokens": 1024, "hidden": 1024, "intermediate": 512, "experts": 8, "top_k": 2}
_DEFAULT_ROUTING = "zipf:1.2"


class UsageError(Exception):
    """The command line does not fit together."""


@dataclass(frozen=True)
class Subject:
    """graph, its loads, and `inputs(plans)`: tensors by name for each rank. settings: what it was made from."""

    graph: TaskGraph
    loads: Mapping[str, Any]
    inputs: Callable[[list[Plan]], list[dict[str, Any]]]
    settings: dict[str, Any]

    def compile(self, *, device: str | Device, policy: str, rank: int | None = None, backend: Any = None) -> list[Plan]:
        """The plans of all ranks, or of the one. Not proven yet: `check` does that, or the engine before a run."""
        ranks = self.graph.ranks
        if rank is not None and rank >= ranks:
            raise UsageError(f"--rank is {rank}; the graph has ranks 0 to {ranks - 1}")
        made = compile_graph(
            self.graph, self.loads, device=device, policy=policy, world=ranks, rank=rank, backend=backend, prove=False
        )
        return [made] if isinstance(made, Plan) else list(made.plans)


def make_subject(
    name: str,
    *,
    sizes: dict[str, int | None],
    ep: int | None,
    tp: int | None,
    routing: str | None,
    dtype: str | None,
    dispatch_mode: str | None,
    seed: int,
) -> Subject:
    """name: a built-in graph or FILE.py:FUNCTION. None stands for an option that was not given."""
    if name in BUILT_IN:
        ways = {"dtype": dtype or "float32", "dispatch_mode": dispatch_mode or "push"}
        return _moe(name, sizes, ep or 1, tp or 1, routing or _DEFAULT_ROUTING, ways, seed)
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function:
        raise UsageError(f"no graph is called {name!r}; it must be {', '.join(BUILT_IN)} or FILE.py:FUNCTION")
    options = {**sizes, "tp": tp, "dtype": dtype, "dispatch_mode": dispatch_mode}
    given = [f"--{key.replace('_', '-')}" for key, value in options.items() if value is not None]
    if given:
        raise UsageError(f"{given[0]} is an option of built-in graphs; {name} decides its own sizes")
    return _from_file(Path(file), function, ep, routing, seed)


def _moe(
    name: str, sizes: dict[str, int | None], ep: int, tp: int, pattern: str, ways: dict[str, str], seed: int
) -> Subject:
    from hyper_mpmd.modules.moe_ffn import moe_ffn
    from hyper_mpmd.modules.moe_ffn_backward import moe_ffn_backward
    from hyper_mpmd.modules.routing import is_pattern, make_routing

    n = {key: _DEFAULTS[key] if value is None else value for key, value in sizes.items()}
    build = moe_ffn_backward if name == "moe-ffn-backward" else moe_ffn
    graph = build(n["hidden"], n["intermediate"], n["experts"], n["top_k"], ranks=ep * tp, tp=tp, **ways)  # type: ignore[arg-type]
    tokens = n["tokens"] if is_pattern(pattern) else sizes["tokens"]
    routing = make_routing(pattern, tokens=tokens, experts=n["experts"], top_k=n["top_k"], ranks=ep, tp=tp, seed=seed)

    def inputs(plans: list[Plan]) -> list[dict[str, Any]]:
        from hyper_mpmd.modules.moe_inputs import make_backward_inputs, make_inputs

        make = make_backward_inputs if name == "moe-ffn-backward" else make_inputs
        return make(routing, n["hidden"], n["intermediate"], dtype=ways["dtype"], seed=seed)

    n["tokens"] = max(routing.tokens)
    settings = {"graph": name, **n, "ep": ep, "tp": tp, "routing": pattern, **ways, "seed": seed}
    return Subject(graph, routing.loads(), inputs, settings)


def _from_file(file: Path, function: str, ranks: int | None, loads_file: str | None, seed: int) -> Subject:
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    where = f"{file}:{function}"
    module = _import(file)
    make = getattr(module, function, None)
    if not callable(make):
        raise UsageError(f"{file} defines no function {function!r}")
    made = _call(where, file, make)
    graph, loads = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(graph, TaskGraph):
        raise GraphFormatError(
            f"{where} returned a {type(made).__name__}; it must be a TaskGraph, or a TaskGraph and loads"
        )
    if ranks is not None and ranks != graph.ranks:
        raise UsageError(f"--ep is {ranks}, but {where} makes a graph for {graph.ranks} rank(s)")
    if loads_file is not None:
        loads = _read_loads(Path(loads_file))
    if loads is None and graph.free_spaces:
        names = ", ".join(f"{space.name!r} ({space.groups} counts)" for space in graph.free_spaces)
        raise LoadsError(
            f"{where} gives no loads for row space(s) {names}; return (graph, loads), or pass --routing FILE with JSON "
            'such as {"' + graph.free_spaces[0].name + '": [...]}'
        )

    def inputs(plans: list[Plan]) -> list[dict[str, Any]]:
        from hyper_mpmd.modules.random_inputs import random_inputs

        return random_inputs(plans, seed)

    return Subject(graph, loads or {}, inputs, {"graph": where, "ep": graph.ranks, "seed": seed})


def _read_loads(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise LoadsError(
            f"--routing {str(file)!r}: {error.strerror}; a graph from a file needs a JSON file of loads"
        ) from None
    except ValueError as error:
        raise LoadsError(f"{file} is not JSON: {error}") from None


def _import(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))
    _call(str(file), file, lambda: loader.exec_module(module))
    return module


def _call(where: str, file: Path, function: Callable[[], Any]) -> Any:
    """Call the user's code; what it raises is told with the line of theirs that raised it."""
    try:
        return function()
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
        line = f"line {lines[-1]}: " if lines else ""
        kind = type(error) if isinstance(error, HyperMpmdError) else GraphFormatError
        raise kind(f"{where}: {line}{type(error).__name__}: {error}") from error
