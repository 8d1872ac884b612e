"""Dispatch: tokens, in expert order, travel to the ranks that own their experts."""

from __future__ import annotations

from typing import Literal

from hyper_mpmd.ops.put import Put


class Dispatch(Put):
    """Put to="scatter": rows of expert e go to the rank that owns it, E / W consecutive experts a rank."""

    to: Literal["scatter"] = "scatter"
