"""MegaMoeExperts over processes: the results of one process on all batches, the same refusals on all ranks."""

import pytest
import torch

from . import jobs
from .reference import PATTERNS
from .test_refusals import bad_calls


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_results_and_gradients_are_those_of_one_process(rank_pools, world, pattern, dtype, limit):
    for errors in rank_pools[world].run(jobs.gradients_job, 64, pattern, dtype, "SGD"):
        assert max(errors.values()) <= limit, errors


@pytest.mark.parametrize(("world", "tokens"), [(2, 64), (4, [3, 64, 0, 17])])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_ranks_that_pull_get_the_results_and_gradients_of_one_process(rank_pools, world, tokens, pattern):
    for errors in rank_pools[world].run(
        jobs.gradients_job, tokens, pattern, torch.float32, "SGD", dispatch_mode="pull"
    ):
        assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(
    ("world", "tokens"), [(2, [0, 9]), (2, [5, 0]), (2, 0), (2, 1), (4, [0, 17, 1, 0]), (4, 0), (4, [3, 64, 30, 2])]
)
def test_ranks_may_have_other_numbers_of_tokens_or_none(rank_pools, world, tokens):
    for errors in rank_pools[world].run(jobs.gradients_job, tokens, "random", torch.float32):
        assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("world", [2, 4])
def test_experts_with_a_limit_follow_one_process(rank_pools, world):
    for errors in rank_pools[world].run(
        jobs.gradients_job, 64, "skewed", torch.float32, "SGD", swiglu_limit=0.75, expert_capacity_factor=4.0
    ):
        assert max(errors.values()) <= 1e-5, errors


def test_adamw_follows_one_process(rank_pools):
    # The first step is the sign of the gradient, and the sign of a tiny one is rounding.
    for errors in rank_pools[2].run(jobs.gradients_job, 40, "skewed", torch.float32, "AdamW"):
        assert max(errors.values()) <= 1e-3, errors


@pytest.mark.parametrize("number", range(len(bad_calls())))
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_what_one_rank_refuses_all_raise_alike_and_the_layer_works_after(rank_pools, bad_rank, number):
    kind, _, _ = bad_calls()[number]
    first, second = rank_pools[2].run(jobs.refusal_job, bad_rank, number)
    assert first == second
    name, bases, text = first
    assert kind.__name__ in bases, name
    assert text.startswith(f"rank {bad_rank}: ")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_k", [2, 3]),
        ("hidden_size", [48, 49]),
        ("max_local_num_tokens", [64, 65]),
        ("num_experts", [8, 16]),
        ("expert_capacity_factor", [None, 1.5]),
        ("dispatch_mode", ["push", "pull"]),
        ("swiglu_limit", [None, 7.0]),
    ],
)
def test_constructor_values_that_differ_are_told_on_all_ranks(rank_pools, name, values):
    first, second = rank_pools[2].run(jobs.differing_job, name, values)
    assert first == second
    assert first[0] == "MegaMoeValueError"
    assert f"{name}={values[0]!r} on rank 0, {values[1]!r} on rank 1" in first[1]


def test_overflow_is_raised_on_all_ranks_before_anything_runs_and_the_layer_works_after(rank_pools):
    for overflow, after in rank_pools[2].run(jobs.overflow_job):
        assert overflow[0] == "CapacityOverflowError"
        assert "capacity overflow: rank 1 would receive 512 rows, the capacity is 256" in overflow[1]
        assert after == ("", "")


def test_no_grad_on_one_rank_alone_is_refused_on_all(rank_pools):
    first, second = rank_pools[2].run(jobs.mixed_no_grad_job)
    assert first == second
    assert "rank 1 wants no gradients" in first[1]


def test_ranks_may_freeze_other_tensors(rank_pools):
    frozen = [["x", "w1"], ["weights", "w2"]]
    assert rank_pools[2].run(jobs.frozen_job, frozen) == [[False, True, False, True], [True, False, True, False]]


def test_layers_that_share_resources_train_like_separate_ones(rank_pools):
    shared, separate = (rank_pools[2].run(jobs.stack_job, value) for value in (True, False))
    assert all(torch.isfinite(weight).all() for rank in shared for weight in rank)
    for ours, theirs in zip(shared, separate, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_layers_that_pull_and_share_resources_train_to_the_bits_of_layers_that_push(rank_pools):
    pull, push = (rank_pools[2].run(jobs.stack_job, True, dispatch_mode=mode) for mode in ("pull", "push"))
    for ours, theirs in zip(pull, push, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_subgroups_each_have_their_experts(rank_pools):
    assert max(rank_pools[4].run(jobs.subgroup_job)) <= 1e-5


def test_recomputation_over_ranks_gives_the_same_gradients(rank_pools):
    assert rank_pools[2].run(jobs.checkpoint_job) == [True, True]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_the_two_rank_example_of_the_guide_runs_on_the_cpu(rank_pools, dtype, limit):
    assert max(rank_pools[2].run(jobs.example_job, dtype)) <= limit


def test_many_steps_leave_no_memory_descriptors_or_threads_behind(rank_pools):
    for memory, descriptors, threads in rank_pools[2].run(jobs.many_steps_job, 300):
        assert memory < 16 << 20
        assert descriptors <= 0
        assert threads <= 0


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp experts"])
def test_data_parallel_weights_are_those_of_one_process_on_the_whole_batch(rank_pools, kind):
    assert max(rank_pools[2].run(jobs.data_parallel_job, kind)) <= 1e-5


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_checkpoint_of_two_ranks_loads_at_any_number_bit_for_bit(rank_pools, world, tmp_path):
    rank_pools[2].run(jobs.save_job, str(tmp_path))
    assert all(rank_pools[world].run(jobs.load_job, str(tmp_path)))


@pytest.mark.slow
def test_a_thousand_steps_leave_no_memory_descriptors_or_threads_behind(rank_pools):
    for memory, descriptors, threads in rank_pools[2].run(jobs.many_steps_job, 1500, timeout=110.0):
        assert memory < 16 << 20
        assert descriptors <= 0
        assert threads <= 0
