"""Put: rows written straight into other ranks' tensors, one-sided. Dispatch and Combine are made with it."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hyper_mpmd.tasks.op import CoreKind, Layout, Op
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.team import Team
from hyper_mpmd.tasks.tensor import RouteKind, Routing


class Put(Op):
    """Each rank puts its rows into tensors of the ranks that `to` names; the result is what a rank received.

    to: "all": every rank gets every rank's rows, ordered by source rank (an all-gather). "shift": rank r's rows go to
    rank (r + shift) mod W. "scatter": group e goes to the rank that owns e, E / W consecutive groups a rank; on arrival
    rows are ordered by local group, then source rank. "return": scattered rows go back to where they came from.
    team: the ranks that W and the words above speak of, such as Team(ranks=4, stride=2); None: all ranks. Rows return
    in the team that they were scattered in.

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

    def routing(self) -> Routing:
        return Routing(self.to, self.shift, self.team)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        """The one-rank form: a copy. Over ranks the reference engine moves the rows itself."""
        return inputs[0].clone()
