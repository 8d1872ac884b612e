"""Routes within teams of ranks: what arrives where, against plain torch, and teams that cannot be."""

from __future__ import annotations

import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd import errors, ops
from hyper_mpmd.tasks import Team

RANKS, COLS = 8, 3
TEAMS = {
    Team(4, 2): [[0, 2, 4, 6], [1, 3, 5, 7]],
    Team(2): [[0, 1], [2, 3], [4, 5], [6, 7]],
    Team(2, 2): [[0, 2], [1, 3], [4, 6], [5, 7]],
    Team(2, 4): [[0, 4], [1, 5], [2, 6], [3, 7]],
    Team(8): [list(range(8))],
    Team(1): [[rank] for rank in range(8)],
}
COUNTS = torch.randint(0, 5, (RANKS, 8), generator=torch.Generator().manual_seed(1))


def test_teams_share_out_the_ranks():
    for team, wanted in TEAMS.items():
        assert sorted({tuple(team.members(rank)) for rank in range(RANKS)}) == sorted(map(tuple, wanted))
        for rank in range(RANKS):
            assert team.members(rank)[team.place(rank)] == rank == team.member(rank, team.place(rank))


def moved(team, *kinds, shift=0):
    """Rows that travelled through a graph of puts one after another: what each rank sent and received, per group."""
    graph = hm.TaskGraph("moves", ranks=RANKS)
    tensor = graph.input("x", (graph.rows("rows", groups=8), COLS))
    for number, kind in enumerate(kinds):
        within = None if kind == "return" else team
        tensor = graph.comm(f"put{number}", ops.Put(to=kind, shift=shift, team=within), tensor)
    graph.output("y", tensor)
    world = hm.compile(graph, COUNTS.tolist(), world=RANKS, tiles={f"put{n}": (2, 1) for n in range(len(kinds))})
    sent = [torch.randn(int(counts.sum()), COLS) for counts in COUNTS]
    received = [out["y"] for out in world.run([{"x": x} for x in sent], workers=1)]
    reference = [out["y"] for out in world.run([{"x": x} for x in sent], engine="reference")]
    assert all(torch.equal(a, b) for a, b in zip(received, reference, strict=True))
    return [x.split(counts.tolist()) for x, counts in zip(sent, COUNTS, strict=True)], received


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_groups_are_scattered_over_the_members_of_a_team(team):
    sent, received = moved(team, "scatter")
    owned = 8 // team.ranks
    for members in TEAMS[team]:
        for place, rank in enumerate(members):
            groups = range(place * owned, (place + 1) * owned)
            assert torch.equal(received[rank], torch.cat([sent[s][group] for group in groups for s in members]))


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_scattered_rows_return_to_where_they_came_from(team):
    sent, received = moved(team, "scatter", "return")
    assert all(torch.equal(torch.cat(mine), back) for mine, back in zip(sent, received, strict=True))


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_all_rows_reach_each_member_in_order_of_rank(team):
    sent, received = moved(team, "all")
    for members in TEAMS[team]:
        for rank in members:
            assert torch.equal(received[rank], torch.cat([torch.cat(sent[s]) for s in members]))


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_rows_are_shifted_round_each_team(team):
    sent, received = moved(team, "shift", shift=3)
    for members in TEAMS[team]:
        for place, rank in enumerate(members):
            assert torch.equal(received[rank], torch.cat(sent[members[(place - 3) % len(members)]]))


def test_one_route_after_another_along_both_axes_of_a_grid():
    graph = hm.TaskGraph("grid", ranks=4)
    rows = graph.rows("rows", groups=2)
    x = graph.input("x", (rows, COLS))
    across = graph.comm("across", ops.Dispatch(team=Team(2, 2)), x)
    along = graph.comm("along", ops.Put(to="all", team=Team(2)), across)
    graph.output("along", along)
    graph.output("home", graph.comm("home", ops.Combine(), across))
    counts = [[3, 1], [0, 2], [4, 4], [5, 0]]
    sent = [torch.randn(sum(mine), COLS) for mine in counts]
    parts = [x.split(mine) for x, mine in zip(sent, counts, strict=True)]
    outputs = hm.compile(graph, counts, world=4).run([{"x": x} for x in sent], workers=1)
    for rank, out in enumerate(outputs):
        expert = rank // 2
        both = [torch.cat([parts[source][expert] for source in (column, column + 2)]) for column in (0, 1)]
        assert torch.equal(out["along"], torch.cat(both))
        assert torch.equal(out["home"], sent[rank])


def build(ranks, *puts, groups=4):
    graph = hm.TaskGraph("g", ranks=ranks)
    tensor = graph.input("x", (graph.rows("rows", groups=groups), COLS))
    for number, put in enumerate(puts):
        tensor = graph.comm(f"put{number}", put, tensor)


@pytest.mark.parametrize(
    ("ranks", "puts", "words"),
    [
        (4, [ops.Put(team=Team(3))], ["'put0'", "3 ranks", "do not share out 4"]),
        (4, [ops.Put(team=Team(2, 4))], ["'put0'", "2 ranks, 4 apart", "do not share out 4"]),
        (1, [ops.Put(team=Team(2))], ["'put0'", "do not share out 1 ranks"]),
        (6, [ops.Dispatch(team=Team(3, 2))], ["4 groups of 'rows'", "over 3 ranks"]),
        (
            4,
            [ops.Dispatch(team=Team(2, 2)), ops.Combine(team=Team(2))],
            ["'put1'", "teams of 2 ranks, 2 apart", "not in teams of 2 ranks, 1 apart", "leave the team out"],
        ),
        (4, [ops.Dispatch(), ops.Combine(team=Team(2))], ["return in all ranks", "not in teams of 2"]),
    ],
)
def test_teams_that_do_not_fit_are_refused(ranks, puts, words):
    with pytest.raises(errors.WorldSizeError) as caught:
        build(ranks, *puts)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("team", [(0, 1), (2, 0), (2, -1), (2, 1, 1), 2])
def test_teams_that_are_none_are_refused(team):
    with pytest.raises(errors.OpParameterError, match="team"):
        ops.Put(team=team)


def test_a_team_of_all_ranks_is_no_team():
    graph = hm.TaskGraph("g", ranks=4)
    x = graph.input("x", (graph.rows("rows", groups=4), COLS))
    one = graph.comm("one", ops.Dispatch(team=Team(4)), x)
    other = graph.comm("other", ops.Dispatch(), x)
    assert one.space == other.space == "rows.scatter"
