"""AllToAllTokenDispatcher: layout, explicit state, any order of calls, threads, and a combine that really overlaps."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import hyper_mpmd as hm
from hyper_mpmd.expert_parallel import AllToAllTokenDispatcher, ExpertParallel, GroupedExperts

from .reference import Model, fill_with_values_of_order_one, full, relative_error
from .whole_batch import worst


def layout_job():
    """The counts [[1,2,3,4],[5,6,7,8]] of two ranks and four experts; a row says (rank, expert, number)."""
    rank = dist.get_rank()
    counts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])[rank]
    x = torch.tensor([[rank, e, n] for e in range(4) for n in range(counts[e])], dtype=torch.float32)
    dispatcher = AllToAllTokenDispatcher(dist.group.WORLD, 4)
    rows, local_counts, scores, context = dispatcher.dispatch(x, counts, x.sum(1))
    assert torch.equal(scores, rows.sum(1))  # scores arrive with their rows
    home = dispatcher.combine(rows, context)
    assert torch.equal(home, x)
    return rows.int().tolist(), local_counts.tolist(), context.send_rows, context.receive_rows


def test_rows_arrive_local_expert_first_then_source_rank(rank_pools):
    results = rank_pools[2].run(layout_job)
    for rank, (rows, counts, send, receive) in enumerate(results):
        first, second = 2 * rank, 2 * rank + 1
        by_source = {0: [1, 2, 3, 4], 1: [5, 6, 7, 8]}
        assert rows == [[s, e, n] for e in (first, second) for s in (0, 1) for n in range(by_source[s][e])]
        assert counts == [by_source[0][first] + by_source[1][first], by_source[0][second] + by_source[1][second]]
        assert send == ((3, 7) if rank == 0 else (11, 15))
        assert receive == ((3, 11) if rank == 0 else (7, 15))


def random_rows(seed, num_experts=4, dim=8):
    """Rows of this rank for one micro-batch; their number differs by rank and micro-batch."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    counts = torch.randint(0, 6, (num_experts,), generator=generator)
    return torch.randn(int(counts.sum()), dim, generator=generator), counts


def interleaved_job():
    """dispatch A, dispatch B, combine A, combine B, backward A, backward B, all with one dispatcher."""
    mesh = hm.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    plain = fill_with_values_of_order_one(GroupedExperts(8, 12, 4))
    spread = ExpertParallel().apply(fill_with_values_of_order_one(GroupedExperts(8, 12, 4)), mesh)
    dispatcher = AllToAllTokenDispatcher(mesh, 4)
    batches = [random_rows(seed) for seed in (1, 2)]
    leaves = [x.clone().requires_grad_() for x, _ in batches]
    sent = [dispatcher.dispatch(x, counts) for x, (_, counts) in zip(leaves, batches, strict=True)]
    done = [spread.compute(one.rows, one.num_tokens_per_expert, None) for one in sent]
    home = [dispatcher.combine(rows, one.context) for rows, one in zip(done, sent, strict=True)]
    errors = {}
    for n, (out, x, (_, counts)) in enumerate(zip(home, leaves, batches, strict=True)):
        (ours,) = torch.autograd.grad(out.square().sum(), x)
        again = x.detach().clone().requires_grad_()
        expected = plain(again, counts)
        (theirs,) = torch.autograd.grad(expected.square().sum(), again)
        errors[f"output {n}"] = relative_error(out, expected)
        errors[f"gradient {n}"] = relative_error(ours, theirs)
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaved_micro_batches(rank_pools, ranks):
    assert worst(rank_pools[ranks].run(interleaved_job))[0] <= 1e-5


def shared_style_job():
    """Two layers, one style object, two forwards of each under way, backward in the other order, one recomputed."""
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    style = ExpertParallel()
    plain, ours = (nn.Sequential(Model(num_experts=4), Model(num_experts=4)) for _ in range(2))
    for layer in ours:
        style.apply(layer.moe.experts, mesh)
    generator = torch.Generator().manual_seed(3)
    everything = [torch.randn(2, 2 + n, 5, 16, generator=generator) for n in range(3)]  # by rank, then batch
    for model, batches in (
        (plain, [x.flatten(0, 1) for x in everything]),
        (ours, [x[mesh.get_rank()] for x in everything]),
    ):
        outputs = [
            checkpoint(model, x.requires_grad_(), use_reentrant=False) if n == 1 else model(x)
            for n, x in enumerate(batches)
        ]
        for n in (1, 0, 2):
            outputs[n].square().sum().backward()
    errors = {}
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if ".experts." in name:  # sums over ranks already; the rest needs reduce_gradients
            errors[name] = relative_error(one.grad, other.grad)
    return errors


def test_layers_that_share_a_style_and_recompute_beside_forward(rank_pools):
    assert worst(rank_pools[2].run(shared_style_job))[0] <= 1e-5


def threads_job(rounds):
    """Two threads, each with layers over a group of its own (one group cannot order two threads), share one style."""
    style = ExpertParallel()
    errors, failures = {}, []

    def work(index, mesh):
        try:
            plain = fill_with_values_of_order_one(GroupedExperts(8, 12, 4), seed=index)
            spread = style.apply(fill_with_values_of_order_one(GroupedExperts(8, 12, 4), seed=index), mesh)
            for n in range(rounds):
                x, counts = random_rows(10 * n + index)
                again = x.clone().requires_grad_()
                out = spread(x.requires_grad_(), counts)
                expected = plain(again, counts)
                out.square().sum().backward()
                expected.square().sum().backward()
                errors[f"thread {index}, output"] = relative_error(out, expected)
                errors[f"thread {index}, gradient"] = relative_error(x.grad, again.grad)
        except BaseException as error:
            failures.append(error)

    groups = [dist.new_group([0, 1]) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",)) for group in groups]
    threads = [threading.Thread(target=work, args=(index, mesh)) for index, mesh in enumerate(meshes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert len(errors) == 4
    return errors


def test_threads(rank_pools):
    assert worst(rank_pools[2].run(threads_job, 10))[0] <= 1e-5


class SaysThatItRan(nn.Module):
    """A shared expert that leaves a note in the store when it runs, and adds nothing."""

    def __init__(self, store, key):
        super().__init__()
        self.store, self.key = store, key

    def forward(self, x):
        self.store.set(self.key, "1")
        return torch.zeros_like(x)


def overlap_job(async_combine):
    """Rank 1 keeps its rows until rank 0's shared expert has run: only a combine that overlaps gets through."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    mesh = hm.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    plain, model = Model(num_experts=4), Model(num_experts=4)
    ExpertParallel(async_combine=async_combine).apply(model.moe.experts, mesh)
    model.moe.shared_expert = SaysThatItRan(store, f"shared expert of rank {rank}")
    plain.moe.shared_expert = None
    compute = model.moe.experts.compute

    def compute_when_rank_0_is_ahead(*args):
        out = compute(*args)
        if rank == 1:
            store.wait(["shared expert of rank 0"], datetime.timedelta(seconds=3))
        return out

    model.moe.experts.compute = compute_when_rank_0_is_ahead
    x = torch.randn(2, 5, 16) + rank
    out = model(x)
    out.square().sum().backward()
    assert full(model.moe.experts.w1.grad).abs().max() > 1e-3
    return {"output": relative_error(out, plain(x))}


def test_shared_expert_runs_while_combine_is_under_way(rank_pools):
    assert worst(rank_pools[2].run(overlap_job, True))[0] <= 1e-5


def test_the_overlap_test_can_fail(rank_pools):
    with pytest.raises(RuntimeError, match=r"overlap_job failed on rank 1(.|\n)*imeout"):
        rank_pools[2].run(overlap_job, False)


def refusals_job():
    mesh = hm.init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    dispatcher = AllToAllTokenDispatcher(mesh["ep"], 4)
    x, counts = torch.randn(8, 3), torch.tensor([2, 2, 2, 2])
    sent = dispatcher.dispatch(x, counts)
    attempts = [
        lambda: AllToAllTokenDispatcher(mesh["ep"], 3),
        lambda: AllToAllTokenDispatcher(mesh, 4),
        lambda: AllToAllTokenDispatcher("ep", 4),
        lambda: dispatcher.dispatch(x, counts[:3]),
        lambda: dispatcher.dispatch(x[:7], counts),
        lambda: dispatcher.combine(sent.rows[:5], sent.context),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def test_refusals_name_both_sides(rank_pools):
    (found, _) = rank_pools[2].run(refusals_job)
    expected = [
        "num_experts=3 is not a multiple of ep=2",
        "works over a 1-D mesh, got 2-D ('ep', 'tp')",
        "group must be a process group or a 1-D DeviceMesh",
        "must be [4], got [3]",
        "adds up to 8 (smallest entry 2), but x has 7 rows",
        "combine got 5 rows for a dispatch that received 8",
    ]
    assert len(found) == len(expected)
    for message, text in zip(found, expected, strict=True):
        assert text in message


def one_bad_rank_job():
    """Rank 0's input is bad, in several ways; what every rank is told, and whether the group still works."""
    dispatcher = AllToAllTokenDispatcher(dist.group.WORLD, 4)
    x, counts = torch.randn(8, 3), torch.tensor([2, 2, 2, 2])
    attempts = [
        (x[:7], counts, None),
        (x, torch.tensor([9, -1, 0, 0]), None),
        (x, counts, torch.ones(5)),
        (x[:0], torch.tensor([0, 0, 0, 1]), None),
    ]
    found = []
    for attempt in attempts:
        good = (x, counts, None if attempt[2] is None else torch.ones(8))
        with pytest.raises(ValueError, match=" ") as refused:
            dispatcher.dispatch(*(attempt if dist.get_rank() == 0 else good))
        found.append(str(refused.value))
    sent = dispatcher.dispatch(x, counts)
    assert torch.equal(dispatcher.combine(sent.rows, sent.context), x)
    return found


def test_a_bad_input_of_one_rank_is_refused_on_every_rank(rank_pools):
    of_rank_0, of_rank_1 = rank_pools[2].run(one_bad_rank_job)
    texts = ["x has 7 rows", "(smallest entry -1), but x has 8 rows", "scores must be [8]", "adds up to 1"]
    for message, text in zip(of_rank_0, texts, strict=True):
        assert text in message
    assert len(of_rank_1) == len(texts)
    for message in of_rank_1:
        assert "ranks [0] of the 2 in the EP group refused" in message


def random_routing_job(cases):
    """dispatch and combine of random counts: home again bit for bit, and every row at its expert in between."""
    dispatcher = AllToAllTokenDispatcher(dist.group.WORLD, 4)
    for matrix in cases:
        counts = torch.tensor(matrix[dist.get_rank()])
        experts = torch.repeat_interleave(torch.arange(4), counts)
        x = torch.stack([experts.float(), torch.arange(len(experts)).float()], 1).requires_grad_()
        rows, local_counts, _, context = dispatcher.dispatch(x, counts)
        first = dist.get_rank() * 4 // dist.get_world_size()
        held = torch.arange(first, first + len(local_counts)).float()
        assert torch.equal(rows[:, 0], torch.repeat_interleave(held, local_counts))
        everyone = torch.tensor(matrix).sum(0)
        assert torch.equal(local_counts, everyone[first : first + len(local_counts)])
        home = dispatcher.combine(rows * 2, context)
        assert torch.equal(home, 2 * x)
        (home * x.detach()).sum().backward()
        assert torch.equal(x.grad, 2 * x.detach())


def check_random_routing(pools, ranks, examples):
    matrix = st.lists(
        st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=4, max_size=4), min_size=ranks, max_size=ranks
    )

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(matrix, min_size=1, max_size=10))
    def check(cases):
        pools[ranks].run(random_routing_job, cases)

    check()


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_routing_goes_there_and_back(rank_pools, ranks):
    check_random_routing(rank_pools, ranks, 10)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_routing_goes_there_and_back_at_length(rank_pools, ranks):
    check_random_routing(rank_pools, ranks, 300)
