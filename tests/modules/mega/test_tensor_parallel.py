"""MegaMoeExperts with each expert cut over ranks: the results of one process with whole experts on all batches."""

import pytest
import torch

from . import tp_jobs
from .reference import PATTERNS


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("ep", "tp"), [(2, 2), (1, 2)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_results_and_gradients_are_those_of_one_process(rank_pools, ep, tp, pattern, dtype, limit):
    for errors in rank_pools[ep * tp].run(tp_jobs.gradients_job, ep, tp, 64, pattern, dtype):
        assert max(errors.values()) <= limit, errors


@pytest.mark.parametrize(
    ("ep", "tp", "tokens"), [(2, 2, 0), (2, 2, [0, 9]), (2, 2, [1, 64]), (1, 2, 0), (1, 2, 1), (1, 4, 3), (1, 4, 50)]
)
def test_teams_may_have_other_numbers_of_tokens_or_none(rank_pools, ep, tp, tokens):
    for errors in rank_pools[ep * tp].run(tp_jobs.gradients_job, ep, tp, tokens, "random", torch.float32):
        assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(("ep", "tp"), [(2, 2), (1, 2)])
def test_bits_repeat_and_are_the_same_on_all_of_a_team(rank_pools, ep, tp):
    made = rank_pools[ep * tp].run(tp_jobs.bits_job, ep, tp)
    for rank, own in enumerate(made):
        assert own == made[rank - rank % tp]


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("tokens", "MegaMoeValueError", "different tokens: tokens 9 on rank 2, 8 on rank 3"),
        ("ids", "MegaMoeValueError", "different tokens: topk_ids digest"),
        ("refused", "MegaMoeValueError", "rank 3: topk_ids[0, 0] is"),
    ],
)
def test_a_rank_that_brings_other_tokens_than_its_team_is_told_on_all_ranks(rank_pools, what, kind, text):
    told = rank_pools[4].run(tp_jobs.team_job, 2, 2, what, 3)
    assert told == [told[0]] * 4
    assert told[0][0] == kind
    assert text in told[0][1]


@pytest.mark.parametrize(
    ("case", "kind", "texts"),
    [
        ("the same group twice", "MegaMoeValueError", ["ep_group of 2 ranks", "tp_group of 2 ranks", "2 x 2"]),
        ("tp_group first", "MegaMoeValueError", ["ep_group of 2 ranks", "do not form a grid", '("ep", "tp")']),
        ("all ranks as ep_group", "MegaMoeValueError", ["ep_size=2, but all ranks has 4", "give the ep_group"]),
        (
            "an intermediate size that does not divide",
            "MegaMoeValueError",
            ["intermediate_size=25 is not a multiple of the 2 ranks of tp_group"],
        ),
        ("a group of others", "MegaMoeValueError", ["is not a member of tp_group"]),
        ("no group", "MegaMoeTypeError", ["tp_group is a list"]),
    ],
)
def test_groups_that_do_not_fit_are_refused_on_all_ranks(rank_pools, case, kind, texts):
    for name, told in rank_pools[4].run(tp_jobs.grid_refusal_job, case):
        assert name == kind
        assert all(text in told for text in texts), told


def test_grids_may_be_parts_of_the_ranks(rank_pools):
    assert max(rank_pools[8].run(tp_jobs.two_grids_job)) <= 1e-5


def test_layers_that_share_resources_train_like_separate_ones(rank_pools):
    shared, separate = (rank_pools[4].run(tp_jobs.stack_job, value) for value in (True, False))
    for ours, theirs in zip(shared, separate, strict=True):
        assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 1)), ((2, 2), (1, 4)), ((2, 2), (4, 1)), ((1, 1), (2, 2))])
def test_a_checkpoint_of_one_grid_loads_on_another_bit_for_bit(rank_pools, saved, loaded, tmp_path):
    rank_pools[saved[0] * saved[1]].run(tp_jobs.save_job, *saved, str(tmp_path))
    assert all(rank_pools[loaded[0] * loaded[1]].run(tp_jobs.load_job, *loaded, str(tmp_path)))


def test_ddp_around_experts_on_a_grid_gives_the_weights_of_one_process(rank_pools):
    assert max(rank_pools[4].run(tp_jobs.data_parallel_job)) <= 1e-5


def test_copies_work_and_what_cannot_be_right_is_refused(rank_pools):
    for same, pickled, gathered in rank_pools[4].run(tp_jobs.copies_job):
        assert same
        assert "cannot be pickled" in pickled
        assert "cannot be gathered by its placements" in gathered
