"""What a MegaMoeExperts layer is made for: its sizes, checked before anything else exists."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

from hyper_mpmd.modules.mega_errors import MegaMoeValueError
from hyper_mpmd.ops.swiglu import LEAST_LIMIT, MOST_LIMIT
from hyper_mpmd.tasks import DispatchMode

_ROUND = 128  # rows: receive capacities are multiples of it


@dataclass(frozen=True)
class Config:
    """The constructor's values. Layers of equal config may share resources; ranks must agree on it.

    local_num_tokens: T of every call, or None; max_local_num_tokens: the largest T, or None. Exactly one is given.
    """

    local_num_tokens: int | None
    max_local_num_tokens: int | None
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ep_size: int
    tp_size: int
    expert_capacity_factor: float | None
    dispatch_mode: DispatchMode
    swiglu_limit: float | None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "ep_size"):
            _check_int(name, getattr(self, name), least=1)
        if (self.local_num_tokens is None) == (self.max_local_num_tokens is None):
            raise MegaMoeValueError(
                f"give exactly one of local_num_tokens (T of every call) and max_local_num_tokens (the largest T); got "
                f"{self.local_num_tokens!r} and {self.max_local_num_tokens!r}"
            )
        for name in ("local_num_tokens", "max_local_num_tokens"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, least=0)
        if self.top_k > self.num_experts:
            raise MegaMoeValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.num_experts % self.ep_size:
            raise MegaMoeValueError(
                f"num_experts={self.num_experts} is not a multiple of ep_size={self.ep_size}: every rank holds as many"
            )
        if self.intermediate_size % self.tp_size:
            raise MegaMoeValueError(
                f"intermediate_size={self.intermediate_size} is not a multiple of the {self.tp_size} ranks of "
                "tp_group: every rank holds as much of each expert"
            )
        factor = self.expert_capacity_factor
        if factor is not None:
            number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
            if not number or not math.isfinite(factor) or factor < 1:
                raise MegaMoeValueError(
                    f"expert_capacity_factor={factor!r}; it must be a finite number of at least 1, or None: "
                    "room for every row"
                )
        limit = self.swiglu_limit
        if limit is not None:
            number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if not number or not LEAST_LIMIT <= limit <= MOST_LIMIT:
                raise MegaMoeValueError(
                    f"swiglu_limit={limit!r}; it must be a float32 above 0, such as 7.0, or None: nothing is clamped"
                )
        if self.dispatch_mode not in get_args(DispatchMode):
            raise MegaMoeValueError(f"dispatch_mode={self.dispatch_mode!r}; it must be 'push' or 'pull'")

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def local_intermediate(self) -> int:
        return self.intermediate_size // self.tp_size

    @property
    def ranks(self) -> int:
        """All ranks that the layer runs over."""
        return self.ep_size * self.tp_size

    @property
    def most_tokens(self) -> int:
        tokens = self.local_num_tokens if self.local_num_tokens is not None else self.max_local_num_tokens
        assert tokens is not None
        return tokens

    @property
    def capacity(self) -> int:
        """Rows that a rank can receive: EP * T * K, or ceil(T * K * factor), rounded up to 128."""
        rows = self.most_tokens * self.top_k
        factor = self.expert_capacity_factor
        wanted = rows * self.ep_size if factor is None else math.ceil(rows * factor)
        return -(-wanted // _ROUND) * _ROUND

    def difference(self, other: Config) -> tuple[str, Any, Any] | None:
        """(name, this one's value, the other's) of the first value that differs."""
        theirs = asdict(other)
        for name, value in asdict(self).items():
            if theirs[name] != value:
                return name, value, theirs[name]
        return None


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MegaMoeValueError(f"{name}={value!r}; it must be an int {'> 0' if least else '>= 0'}")
