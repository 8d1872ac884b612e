"""Combine: expert results travel back to the ranks that sent the tokens."""

from __future__ import annotations

from typing import Literal

from hyper_mpmd.ops.put import Put


class Combine(Put):
    """Put to="return": each row goes back to the place that its token was dispatched from. Always pushed."""

    to: Literal["return"] = "return"
    mode: Literal["push"] = "push"
