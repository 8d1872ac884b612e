"""Plans of a layer's steps: exact for the loads that came, kept for loads that come again (recomputation, say)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.modules.mega_config import Config
from hyper_mpmd.modules.moe_ffn import moe_ffn
from hyper_mpmd.modules.moe_ffn_backward import GRADIENTS, moe_ffn_backward
from hyper_mpmd.modules.routing import moe_loads
from hyper_mpmd.scheduler.compile import compile as compile_graph
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.tasks import TaskGraph

_KEPT = 32  # plans
_MOST_RANKS_PROVEN = 16  # together; each rank plans for all of them once, which costs as many plans


class Plans:
    """Of one rank of layers of one config."""

    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._graphs: dict[Hashable, TaskGraph] = {}
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._proven: set[Hashable] = set()

    def forward(self, dtype: Any, keep: bool, tokens: tuple[int, ...], counts: NDArray[np.int64]) -> Plan:
        """keep: with what the backward plan takes. tokens: [EP] and counts: [EP, E], of each team."""
        return self._plan(
            ("forward", dtype, keep), lambda sizes: moe_ffn(*sizes, keep=keep, **self._way(dtype)), tokens, counts
        )

    def backward(self, dtype: Any, wanted: frozenset[Any], tokens: tuple[int, ...], counts: NDArray[np.int64]) -> Plan:
        """wanted: see `moe_ffn_backward`."""
        ordered = [name for name in GRADIENTS if name in wanted]
        return self._plan(
            ("backward", dtype, wanted),
            lambda sizes: moe_ffn_backward(*sizes, wanted=ordered, **self._way(dtype)),
            tokens,
            counts,
        )

    def _way(self, dtype: Any) -> dict[str, Any]:
        config = self._config
        return {
            "ranks": config.ranks,
            "tp": config.tp_size,
            "dtype": dtype,
            "dispatch_mode": config.dispatch_mode,
            "swiglu_limit": config.swiglu_limit,
        }

    def _plan(
        self,
        kind: Hashable,
        build: Callable[[tuple[int, int, int, int]], TaskGraph],
        tokens: tuple[int, ...],
        counts: NDArray[np.int64],
    ) -> Plan:
        key = (kind, tokens, counts.tobytes())
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        config = self._config
        if kind not in self._graphs:
            sizes = (config.hidden_size, config.intermediate_size, config.num_experts, config.top_k)
            self._graphs[kind] = build(sizes)
        graph = self._graphs[kind]
        plan = self._compile(kind, graph, moe_loads(tokens, counts, config.tp_size))
        # Nobody else holds this graph, so the plan need not read its own from the JSON that it carries.
        plan.__dict__["graph"] = graph
        self._plans[key] = plan
        if len(self._plans) > _KEPT:
            self._plans.popitem(last=False)
        return plan

    def _compile(self, kind: Hashable, graph: TaskGraph, loads: Mapping[str, Any]) -> Plan:
        """The first plan of each kind is proven, together with those of all ranks where they are few; later ones differ
        in counts alone and run with the certificate that the engine checks of each."""
        world, rank = self._config.ranks, self._rank
        if kind in self._proven:
            later: Plan = compile_graph(graph, loads, world=world, rank=rank, prove="certificate")
            return later
        together = world <= _MOST_RANKS_PROVEN
        made = compile_graph(graph, loads, world=world, rank=None if together else rank)
        self._proven.add(kind)
        first: Plan = made[rank] if together else made
        return first
