"""Teams: the ranks that a route acts within, where that is not all of them.

Ranks over two kinds of parallelism form a grid, and communication runs along one of its axes: experts are shared out
over ranks that are `stride` apart, the shards of one expert lie on ranks side by side.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from hyper_mpmd.errors import WorldSizeError


class Team(NamedTuple):
    """`ranks` ranks, `stride` apart. The teams of one stride share out all ranks, and each rank is in one of them.

    Of 8 ranks, Team(4, 2) makes {0, 2, 4, 6} and {1, 3, 5, 7}; Team(2) makes {0, 1}, {2, 3}, {4, 5} and {6, 7}.
    """

    ranks: Annotated[int, Field(ge=1)]
    stride: Annotated[int, Field(ge=1)] = 1

    def place(self, rank: int) -> int:
        """The place of a rank in its team, from 0."""
        return rank % (self.ranks * self.stride) // self.stride

    def member(self, rank: int, place: int) -> int:
        """The rank at a place of the team that `rank` is in."""
        return rank + (place - self.place(rank)) * self.stride

    def members(self, rank: int) -> range:
        """The team of a rank, in order."""
        first = self.member(rank, 0)
        return range(first, first + self.ranks * self.stride, self.stride)


def check_team(where: str, team: Team | None, ranks: int) -> Team | None:
    """The team as graphs keep it: None where it is all ranks. WorldSizeError where it does not share out the ranks."""
    if team is None:
        return None
    team = Team(*team)
    if ranks % (team.ranks * team.stride):
        raise WorldSizeError(
            f"{where}: teams of {team.ranks} ranks, {team.stride} apart, do not share out {ranks} ranks; "
            f"{team.ranks} * {team.stride} must divide {ranks}"
        )
    if team.ranks == 1:
        team = Team(1)
    return None if team.ranks == ranks else team
