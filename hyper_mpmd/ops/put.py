"""Put: rows written straight into other ranks' tensors, or read from them. Dispatch and Combine are made with it."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hyper_mpmd.tasks.op import CoreKind, Layout, Op
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.team import Team
from hyper_mpmd.tasks.tensor import DispatchMode, RouteKind, Routing


class Put(Op):
    """Each rank puts its rows into tensors of the ranks that `to` names; the result is what a rank received.

    to: "all": every rank gets every rank's rows, ordered by source rank (an all-gather). "shift": rank r's rows go to
    rank (r + shift) mod W. "scatter": group e goes to the rank that owns e, E / W consecutive groups a rank; on arrival
    rows are ordered by local group, then source rank. "return": scattered rows go back to where they came from.
    team: the ranks that W and the words above speak of, such as Team(ranks=4, stride=2); None: all ranks. Rows return
    in the team that they were scattered in.
    mode: "push": the sender writes into the receiver's symmetric memory, once the receiver has given credit. "pull":
    the sender's rows lie in symmetric memory and the receiver reads them, tile by tile, as they are made; the sender's
    launch ends when all have been read. Rows to be pulled must be made by a task of their own rank: no graph input,
    nothing that a Put received (PullSourceError).

    Input: [R] or [R, C] in a row space, any dtype. Output: the same columns, in the row space that the route makes of
    the senders'. On one rank it is a copy.
    """

    core: ClassVar[CoreKind] = "comm"
    native: ClassVar[str | None] = "copy"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols=None,
        by_group=True,
        inputs=((Access("rows", "all"),),),
        outputs=((Access("rows", "all"),),),
        cut_cols=False,
        flops_per_point=0,
    )

    to: RouteKind = "all"
    shift: int = Field(default=1, ge=0)
    team: Team | None = None
    mode: DispatchMode = "push"

    def routing(self) -> Routing:
        return Routing(self.to, self.shift, self.team, self.mode)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        """The one-rank form: a copy. Over ranks the reference engine moves the rows itself."""
        return inputs[0].clone()
