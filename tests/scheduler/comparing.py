"""What the scheduler's tests share: strategies for whole cases, and a comparison that shows the first difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd.scheduler.policies import POLICIES
from hyper_mpmd.tasks import TaskGraph
from hyper_mpmd.testing.graphs import graphs, loads_of, tiles_of
from hyper_mpmd.testing.worlds import TINY

# Few and odd cores, so that they are scarce and schedules have to choose.
SMALL = TINY.model_copy(update={"name": "small", "aiv": 3, "row_tiles": (32, 16, 8), "col_tiles": (32, 16)})
FREE = SMALL.model_copy(update={"name": "free", "unified": True, "aic": 3, "task_ns": 1, "event_ns": 0, "remote_ns": 0})
DEVICES: tuple[Any, ...] = ("cpu", "ascend-a2", "ascend-a3", SMALL, FREE)


@dataclass
class Case:
    graph: TaskGraph
    loads: dict[str, list[list[int]]]
    device: Any
    policy: str
    tiles: dict[str, tuple[int, int]]

    def compile(self, backend: Any = None) -> list[hm.Plan]:
        options = {"device": self.device, "policy": self.policy, "tiles": self.tiles, "backend": backend}
        return list(hm.compile(self.graph, self.loads, world=self.graph.ranks, **options).plans)


# All there are, and each part of them left out somewhere.
ALL_POLICIES = (
    *POLICIES,
    "serial-no-rotation",
    "O1-no-rotation",
    "O1-no-tiles",
    "O1-no-priorities-no-interleave",
    "published-no-interleave-no-rotation",
)


@st.composite
def cases(draw: st.DrawFn, policies: tuple[str, ...] = ALL_POLICIES, most_ranks: int = 4) -> Case:
    graph = draw(graphs(ranks=draw(st.integers(1, most_ranks))))
    return Case(
        graph,
        draw(loads_of(graph)),
        draw(st.sampled_from(DEVICES)),
        draw(st.sampled_from(policies)),
        draw(st.one_of(st.just({}), tiles_of(graph))),
    )


def assert_same_sections(have: dict[str, Any], want: dict[str, Any]) -> None:
    """Record for record; the message shows the first that differs."""
    assert list(have) == list(want)
    for name, records in want.items():
        assert len(have[name]) == len(records), f"{name}: {len(have[name])} records, wanted {len(records)}"
        different = np.flatnonzero(have[name] != records)
        if len(different):
            first = different[0]
            raise AssertionError(
                f"{name}[{first}] is {have[name][first]}, wanted {records[first]} ({records.dtype.names})"
            )
