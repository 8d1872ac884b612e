"""What tests of hyper_mpmd need, and tests of a user's own ops.

Here are the ranks that start once, run job after job and never hang the test that waits (these need torch);
`hyper_mpmd.testing.graphs` holds hypothesis strategies for graphs and loads, `hyper_mpmd.testing.ops` holds
`assert_op_legal`, `hyper_mpmd.testing.adverse` makes launches slow in odd places, or breaks them.
`hyper_mpmd.testing.explore` runs a small world in every order, `mutate` breaks one, `worlds` makes some at random,
`draft` takes a plan apart.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["RankPool", "RankPools", "RankError", "RankFailed", "RankDied", "RanksTimedOut"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hyper_mpmd.testing' has no attribute {name!r}")
    return getattr(importlib.import_module("hyper_mpmd.testing.ranks"), name)
