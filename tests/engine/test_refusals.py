"""What `run` refuses, before anything runs, with the names and numbers."""

import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd import errors

from .graphs import LOADS, ffn, ffn_inputs, moe, moe_inputs

ROWS = sum(LOADS)

BAD_INPUTS = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != "w2"}, errors.MissingTensorError, TypeError, ["w2"]),
    "unknown": (lambda t: {**t, "w3": t["w2"]}, errors.MissingTensorError, TypeError, ["w3", "x, w1, w2"]),
    "not a tensor": (lambda t: {**t, "x": t["x"].numpy()}, errors.MissingTensorError, TypeError, ["x", "ndarray"]),
    "shape": (
        lambda t: {**t, "x": t["x"][:-1].contiguous()}, errors.ShapeError, ValueError, [str(ROWS - 1), str(ROWS)]
    ),
    "dtype": (lambda t: {**t, "w1": t["w1"].double()}, errors.DTypeError, TypeError, ["w1", "float64", "float32"]),
    "device": (lambda t: {**t, "x": t["x"].to("meta")}, errors.DeviceMismatchError, ValueError, ["meta", "cpu"]),
    "stride": (
        lambda t: {**t, "x": t["x"].t().contiguous().t()},
        errors.StrideError, ValueError, [f"[1, {ROWS}]", "contiguous"],
    ),
    "layout": (lambda t: {**t, "x": t["x"].to_sparse()}, errors.StrideError, ValueError, ["sparse"]),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs_are_refused_by_name(case, engine):
    change, error, builtin, words = BAD_INPUTS[case]
    with pytest.raises(error) as caught:
        hm.compile(ffn(), loads=LOADS).run(**change(ffn_inputs()), engine=engine)
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, hm.HyperMpmdError)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, 5000])
def test_bad_worker_counts_are_refused(workers):
    with pytest.raises(errors.EngineError, match="workers is"):
        hm.compile(ffn(), loads=LOADS).run(**ffn_inputs(), workers=workers)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_bad_deadlines_are_refused(timeout):
    with pytest.raises(errors.EngineError, match="timeout is"):
        hm.compile(ffn(), loads=LOADS).run(**ffn_inputs(), timeout=timeout)


def test_unknown_engine_is_refused():
    with pytest.raises(errors.EngineError, match="native, reference"):
        hm.compile(ffn(), loads=LOADS).run(**ffn_inputs(), engine="gpu")


def test_a_world_wants_inputs_of_each_rank_and_names_the_rank_whose_input_is_bad():
    inputs, counts, _ = moe_inputs([torch.zeros(4, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.long)])
    loads = {"batch": [[4], [3]], "routed": counts}
    world = hm.compile(moe(2), loads, world=2)
    with pytest.raises(errors.WorldSizeError, match="2 ranks needs inputs for each; got 1"):
        world.run(inputs[:1])
    with pytest.raises(errors.DTypeError, match=r"rank 1: input 'x' is torch\.float64"):
        world.run([inputs[0], {**inputs[1], "x": inputs[1]["x"].double()}])


def test_one_rank_of_a_world_does_not_run_alone():
    inputs, counts, _ = moe_inputs([torch.zeros(4, 2, dtype=torch.long)] * 2)
    plan = hm.compile(moe(2), {"batch": [[4], [4]], "routed": counts}, world=2, rank=1)
    with pytest.raises(errors.EngineError, match="world of 2 cannot run alone"):
        plan.run(**inputs[1])


@pytest.mark.parametrize(("name", "value", "task"), [("gather", 9, "permute"), ("back", -1, "unpermute")])
@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_an_index_out_of_range_ends_the_launch_with_task_and_value(name, value, task, policy):
    inputs, counts, expected = moe_inputs([torch.tensor([[0, 1], [2, 3], [4, 5]])])
    plan = hm.compile(moe(1), {"batch": [3], "routed": counts[0]}, policy=policy)
    bad = {k: v.clone() for k, v in inputs[0].items()}
    bad[name].view(-1)[1] = value
    with pytest.raises(errors.TaskFailedError, match=rf"task {task}\.t0 failed: index {value} at row"):
        plan.run(**bad)
    torch.testing.assert_close(plan.run(**inputs[0])["y"], expected[0])
