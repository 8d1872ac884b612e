"""What expert_parallel refuses: each error carries the values, the limit and what to do."""

from __future__ import annotations

import math
from typing import Any

from hyper_mpmd.errors import HyperMpmdError


class ExpertParallelError(HyperMpmdError, ValueError):
    """A size, a mesh or a tensor that cannot work."""


class ExpertParallelTypeError(HyperMpmdError, TypeError):
    """Something of the wrong type: a module, a dtype, a group."""


def check_size(name: str, value: Any) -> int:
    """`value`, if it is an int above 0 (a bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ExpertParallelError(f"{name} must be an int > 0, got {value!r}")
    return value


def check_finite(name: str, value: float, *, above_zero: bool) -> float:
    """`value`, if it is finite and at least 0, or above 0 where `above_zero`."""
    try:
        finite = math.isfinite(value)
    except TypeError:
        raise ExpertParallelTypeError(f"{name} must be a number, got {value!r}") from None
    if not finite or value < 0 or (above_zero and value == 0):
        raise ExpertParallelError(f"{name} must be finite and {'>' if above_zero else '>='} 0, got {value!r}")
    return float(value)


def check_divides(whole_name: str, whole: int, part_name: str, part: int, fix: str) -> None:
    """Refuses when `part` does not divide `whole`, naming both."""
    if whole % part:
        raise ExpertParallelError(f"{whole_name}={whole} is not a multiple of {part_name}={part}: {fix}")
