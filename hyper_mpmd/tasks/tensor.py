"""Row spaces and tensors: what the tasks of a graph read and write."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from hyper_mpmd.tasks.team import Team

DType = Literal["float32", "bfloat16", "float16", "int32", "int64"]
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
FLOATS: tuple[DType, ...] = ("float32", "bfloat16", "float16")  # what matrix products and activations are made of

RouteKind = Literal["scatter", "return", "all", "shift"]
DispatchMode = Literal["push", "pull"]


class Routing(NamedTuple):
    """How a communication op moves rows (see `Route`), and the ranks that it acts within: None for all of them.

    mode: "push": tiles run where the rows lie and write into the receiver's memory. "pull": they run where the rows go
    and read the sender's.
    """

    kind: RouteKind
    shift: int = 0
    team: Team | None = None
    mode: DispatchMode = "push"


class Route(BaseModel):
    """How rows of one row space reach another over the W ranks of a team (None: all ranks).

    scatter: group e of the source goes to the rank that owns e (E / W consecutive groups a rank); on arrival rows are
    ordered by local group, then by source rank. return: the way back. all: every rank's rows go to every rank, ordered
    by source rank. shift: the rows of rank r go to rank (r + shift) mod W. In a team, ranks count from its first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: RouteKind
    parent: str
    shift: int = 0
    team: Team | None = None


class RowSpace(BaseModel):
    """A set of rows whose number comes later, as loads: `groups` counts, rows of one group side by side.

    route: None for a space whose loads the user gives; otherwise how its rows follow from its parent's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    groups: int = Field(gt=0)
    route: Route | None = None


class Tensor(BaseModel):
    """A named tensor of one to three dimensions; the first may be a row space (given by its name)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    shape: tuple[str | int, ...]
    dtype: DType = "float32"

    @property
    def space(self) -> str | None:
        """The name of the row space that the rows of this tensor live in, or None."""
        first = self.shape[0]
        return first if isinstance(first, str) else None

    def describe(self) -> str:
        """Name, shape and dtype for messages: x[tokens, 1024] float32."""
        return f"{self.name}[{', '.join(map(str, self.shape))}] {self.dtype}"
