"""Routing patterns: seeded, K different experts a token, counts as asked for."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hyper_mpmd.errors import LoadsError
from hyper_mpmd.modules.routing import make_routing, sort_by_expert


@pytest.mark.parametrize("pattern", ["balanced", "zipf:0.5", "zipf:3", "single"])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "ranks"), [(0, 4, 2, 1), (1, 4, 4, 2), (100, 16, 6, 4)])
def test_every_token_picks_k_different_experts(pattern, tokens, experts, top_k, ranks):
    routing = make_routing(pattern, tokens=tokens, experts=experts, top_k=top_k, ranks=ranks, seed=1)
    assert len(routing.ids) == ranks
    for ids in routing.ids:
        assert ids.shape == (tokens, top_k)
        assert all(len(set(row)) == top_k for row in ids.tolist())
    assert routing.counts.shape == (ranks, experts)
    assert routing.counts.sum() == tokens * top_k * ranks


def test_balanced_counts_differ_by_at_most_one():
    counts = make_routing("balanced", tokens=100, experts=7, top_k=3, ranks=2).counts
    assert np.ptp(counts.sum(axis=0)) <= 1
    assert np.ptp(counts[0]) <= 1


def test_a_higher_exponent_is_more_skewed_and_one_order_holds_for_all_ranks():
    mild, steep = (
        make_routing(f"zipf:{s}", tokens=4000, experts=16, top_k=2, ranks=2, seed=3).counts for s in ("0.3", "1.5")
    )
    assert steep.max() > mild.max()
    assert steep[0].argmax() == steep[1].argmax()


def test_seeds_decide_and_nothing_else_does():
    first, again, other = (
        make_routing("zipf:1.2", tokens=50, experts=8, top_k=2, seed=seed).ids[0] for seed in (5, 5, 6)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_a_file_of_counts_gives_these_counts(tmp_path):
    file = tmp_path / "counts.json"
    counts = [[4, 0, 3, 1], [2, 2, 1, 1]]
    file.write_text(json.dumps(counts))
    routing = make_routing(str(file), tokens=None, experts=4, top_k=2, ranks=2)
    assert routing.counts.tolist() == counts
    assert routing.tokens == [4, 3]
    assert all(len(set(row)) == 2 for ids in routing.ids for row in ids.tolist())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[5, 0, 1, 0]", "expert 0 has 5 rows, but 3 tokens"),
        ("[1, 1, 1, 0]", "not a multiple"),
        ("[-1, 1, 1, 1]", "smallest count is -1"),
        ("[1, 1]", r"\[1, 2\]"),
        ("[1.5, 1, 1, 1]", "float64"),
        ("not json", "not a JSON array"),
        ("[[1], [1, 2]]", "not a JSON array"),
    ],
)
def test_wrong_counts_are_refused_with_the_number(tmp_path, text, words):
    file = tmp_path / "counts.json"
    file.write_text(text)
    with pytest.raises(LoadsError, match=words):
        make_routing(str(file), tokens=None, experts=4, top_k=2)


def test_tokens_that_contradict_the_file_are_refused(tmp_path):
    file = tmp_path / "counts.json"
    file.write_text("[1, 1, 1, 1]")
    with pytest.raises(LoadsError, match="those of 2 tokens, but 9"):
        make_routing(str(file), tokens=9, experts=4, top_k=2)


def test_sorting_by_expert_and_back_is_the_identity():
    ids = make_routing("zipf:1", tokens=30, experts=8, top_k=3, seed=2).ids[0]
    gather, back = sort_by_expert(ids)
    flat = ids.ravel()
    routed = np.empty_like(flat)
    routed[back.ravel()] = flat
    assert (np.diff(routed) >= 0).all()
    assert (gather[back] == np.arange(30)[:, None]).all()
