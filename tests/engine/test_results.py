"""The native engine computes what plain torch computes, whatever the policy, the device's plan and the workers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm

from .graphs import LOADS, DoubleInPlace, ffn, ffn_inputs, moe, moe_inputs, probe_graph, relative_error


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("device", ["cpu", "ascend-a2", "ascend-a3"])
def test_ffn_equals_the_reference_and_policies_and_workers_agree_bit_for_bit(dtype, limit, device):
    inputs = ffn_inputs(dtype=getattr(torch, dtype))
    outputs = []
    for policy in ("O0", "O1"):
        plan = hm.compile(ffn(dtype=dtype), loads=LOADS, device=device, policy=policy)
        wanted = plan.run(**inputs, engine="reference")["y"]
        for workers in (1, 2, 3, 4):
            out = plan.run(**inputs, workers=workers, timeout=30)["y"]
            assert out.dtype == wanted.dtype
            assert relative_error(out, wanted) <= limit
            outputs.append(out)
    assert all(torch.equal(outputs[0], out) for out in outputs)


def test_bfloat16_rounds_once_from_a_float32_sum():
    inputs = ffn_inputs(dtype=torch.bfloat16)
    out = hm.compile(ffn(dtype="bfloat16"), loads=LOADS).run(**inputs)["y"]
    exact = []
    for expert, rows in enumerate(inputs["x"].split(LOADS)):
        gate, up = (rows.float() @ inputs["w1"][expert].float()).bfloat16().float().chunk(2, dim=1)
        act = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        exact.append(act @ inputs["w2"][expert].float())
    # Each of the three roundings may fall to the other side of a tie; half a bfloat16 step is 2^-9.
    assert relative_error(out, torch.cat(exact)) <= 2**-8


def test_autograd_autocast_and_inference_mode_change_nothing():
    inputs = ffn_inputs()
    plan = hm.compile(ffn(), loads=LOADS)
    plain = plan.run(**inputs)["y"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plan.run(**inputs)["y"], plain)
    with torch.inference_mode():
        assert torch.equal(plan.run(**inputs)["y"], plain)
    with_grad = plan.run(**{name: tensor.clone().requires_grad_() for name, tensor in inputs.items()})["y"]
    assert torch.equal(with_grad, plain)
    assert not with_grad.requires_grad


def test_outputs_of_two_runs_are_separate_tensors():
    inputs = ffn_inputs()
    plan = hm.compile(ffn(), loads=LOADS)
    first = plan.run(**inputs)["y"]
    kept = first.clone()
    plan.run(**{**inputs, "x": inputs["x"] * 3})
    assert torch.equal(first, kept)


def test_no_rows_at_all_make_an_empty_output():
    inputs = {**ffn_inputs(), "x": torch.empty(0, 64)}
    out = hm.compile(ffn(), loads=[0] * 8).run(**inputs)["y"]
    assert out.shape == (0, 64)


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_a_python_kernel_and_an_in_place_op_compute_the_right_thing(policy):
    g = hm.TaskGraph("double")
    rows = g.rows("tokens", groups=3)
    x = g.input("x", (rows, 32))
    w = g.input("w", (3, 32, 48))
    once = g.vector("twice", DoubleInPlace(), g.cube("up", hm.ops.GroupedMatmul(), x, w))
    g.output("y", g.vector("again", DoubleInPlace(), once))
    inputs = {"x": torch.randn(40, 32), "w": torch.randn(3, 32, 48)}
    plan = hm.compile(g, loads=[7, 0, 33], policy=policy, tiles={"up": (8, 16), "twice": (5, 48), "again": (40, 7)})
    for _ in range(3):
        out = plan.run(**inputs, workers=2, timeout=30)["y"]
        assert relative_error(out, plan.run(**inputs, engine="reference")["y"]) <= 1e-5


def test_python_kernel_on_a_plan_without_workspace():
    graph, inputs = probe_graph()
    assert torch.equal(hm.compile(graph).run(**inputs)["y"], inputs["x"] * 2)


PATTERNS = {
    "balanced": lambda t: torch.stack([torch.arange(t) % 8, (torch.arange(t) + 3) % 8], 1),
    "single destination": lambda t: torch.full((t, 2), 5),
    "same expert twice": lambda t: torch.arange(t)[:, None].expand(t, 2) % 8,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("tokens", [[40], [40, 9], [0, 33], [0, 0], [1, 0, 17, 5]], ids=str)
def test_moe_worlds_equal_a_loop_over_tokens(tokens, pattern):
    inputs, counts, expected = moe_inputs([PATTERNS[pattern](t).long().view(t, 2) for t in tokens])
    outputs = []
    for device in ("cpu", "ascend-a3"):
        for policy in ("O0", "O1"):
            world = hm.compile(
                moe(len(tokens)), {"batch": [[t] for t in tokens], "routed": counts}, device=device, policy=policy,
                world=len(tokens), tiles={"up": (16, 32), "down": (16, 32)},
            )  # fmt: skip
            for workers in (1, 2):
                outs = [out["y"] for out in world.run(inputs, workers=workers, timeout=30)]
                for have, want in zip(outs, expected, strict=True):
                    assert relative_error(have, want) <= 1e-5
                outputs.append((device, outs))
    for device, outs in outputs:
        same = next(first for name, first in outputs if name == device)
        assert all(torch.equal(a, b) for a, b in zip(outs, same, strict=True))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.sampled_from([1, 2, 4]))
def test_random_routings_over_worlds_equal_a_loop_over_tokens(data, ranks):
    ids = []
    for _ in range(ranks):
        tokens = data.draw(st.integers(0, 12))
        chosen = data.draw(st.lists(st.integers(0, 7), min_size=2 * tokens, max_size=2 * tokens))
        ids.append(torch.tensor(chosen, dtype=torch.long).view(tokens, 2))
    inputs, counts, expected = moe_inputs(ids)
    loads = {"batch": [[len(chosen)] for chosen in ids], "routed": counts}
    results = []
    for policy in ("O0", "O1"):
        world = hm.compile(moe(ranks), loads, policy=policy, world=ranks)
        outs = [out["y"] for out in world.run(inputs, workers=data.draw(st.integers(1, 4)), timeout=30)]
        for have, want in zip(outs, expected, strict=True):
            assert relative_error(have, want) <= 1e-5
        results.append(outs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("to", "shift"), [("all", 1), ("shift", 1), ("shift", 3)])
def test_put_moves_rows_to_the_ranks_it_names_and_an_output_may_be_what_was_received(to, shift):
    g = hm.TaskGraph("put", ranks=4)
    rows = g.rows("shard")
    x = g.input("x", (rows, 24))
    g.output("y", g.comm("put", hm.ops.Put(to=to, shift=shift), x))
    sizes = [5, 0, 130, 2]
    inputs = [{"x": torch.randn(size, 24)} for size in sizes]
    world = hm.compile(g, [[size] for size in sizes], world=4)
    for _ in range(3):
        outs = world.run(inputs, timeout=30)
        for rank, out in enumerate(outs):
            if to == "all":
                assert torch.equal(out["y"], torch.cat([given["x"] for given in inputs]))
            else:
                assert torch.equal(out["y"], inputs[(rank - shift) % 4]["x"])


def test_measured_timeline_has_every_task_and_changes_no_bit():
    inputs = ffn_inputs()
    plan = hm.compile(ffn(), loads=LOADS)
    out, timeline = plan.run_measured(**inputs)
    assert torch.equal(out["y"], plan.run(**inputs)["y"])
    assert timeline.kind == "measured"
    assert len(timeline.spans) == len(plan.tasks)
    assert (timeline.spans["end_ns"] >= timeline.spans["start_ns"]).all()
    for core in range(len(timeline.cores)):
        mine = timeline.spans[timeline.spans["core"] == core]
        assert (mine["start_ns"][1:] >= mine["end_ns"][:-1]).all()
    # No task starts before what it reads was written: every `act` after some `up`, in real time.
    names = [plan.op_names[op] for op in timeline.spans["op"]]
    first_up = min(s for s, name in zip(timeline.spans["end_ns"], names, strict=True) if name == "up")
    assert all(s >= first_up for s, name in zip(timeline.spans["start_ns"], names, strict=True) if name == "act")
