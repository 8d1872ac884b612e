"""MegaMoeExperts on one rank: outputs and gradients of plain torch, under everything that autograd may do to it."""

import copy
import io
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from hyper_mpmd import MegaMoeExperts

from .reference import EXPERTS, HIDDEN, PATTERNS, SIZES, all_weights, batch, layer, leaves, plain, rel


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_output_and_all_gradients_are_those_of_plain_torch(pattern, dtype, limit):
    module = layer(dtype=dtype)
    x, ids, weights = batch(64, pattern=pattern, dtype=dtype)
    y = module(x, ids, weights)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    want = leaves(x, weights, module.gate_up_weight, module.down_weight)
    expected = plain(want[0], ids, *want[1:])
    expected.backward(dy.double())
    assert rel(y, expected) <= limit
    have = (x, weights, module.gate_up_weight, module.down_weight)
    for own, other in zip(have, want, strict=True):
        assert own.grad.dtype == own.dtype
        assert rel(own.grad, other.grad) <= limit
    for expert in set(range(EXPERTS)) - set(ids.flatten().tolist()):
        assert module.gate_up_weight.grad[expert].count_nonzero() == 0
        assert module.down_weight.grad[expert].count_nonzero() == 0


@pytest.mark.parametrize("limit", [0.75, 1e6])
def test_a_swiglu_limit_clamps_in_both_directions(limit):
    module = layer(swiglu_limit=limit)
    x, ids, weights = batch(64)
    want = leaves(x, weights, module.gate_up_weight, module.down_weight)
    expected = plain(want[0], ids, *want[1:], limit=limit)
    unclamped = plain(want[0], ids, *want[1:])
    assert (rel(unclamped, expected) > 0.1) == (limit < 1)
    y = module(x, ids, weights)
    assert rel(y, expected) <= 1e-5
    expected.square().sum().backward()
    y.square().sum().backward()
    for own, other in zip((x, weights, module.gate_up_weight, module.down_weight), want, strict=True):
        assert rel(own.grad, other.grad) <= 2e-5
    assert copy.deepcopy(module).config.swiglu_limit == limit


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(0, 40), hidden=st.integers(1, 40), inner=st.integers(1, 40), data=st.data())
def test_any_shape_and_routing(tokens, hidden, inner, data):
    experts = data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, experts))
    ids = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, experts - 1), min_size=top_k, max_size=top_k),
                           min_size=tokens, max_size=tokens)), dtype=torch.int64,
    ).view(tokens, top_k)  # fmt: skip
    module = MegaMoeExperts(
        local_num_tokens=tokens, hidden_size=hidden, intermediate_size=inner, num_experts=experts, top_k=top_k
    )
    x, weights = torch.randn(tokens, hidden, requires_grad=True), torch.randn(tokens, top_k, requires_grad=True)
    y = module(x, ids, weights)
    y.square().sum().backward()
    want = leaves(x, weights, module.gate_up_weight, module.down_weight)
    expected = plain(want[0], ids, *want[1:])
    expected.square().sum().backward()
    assert rel(y, expected) <= 1e-5
    for own, other in zip((x, weights, module.gate_up_weight, module.down_weight), want, strict=True):
        assert rel(own.grad, other.grad) <= 2e-5


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_t_may_change_and_leading_dimensions_are_kept(tokens):
    module = layer()
    for count in (64, tokens, 3):
        x, ids, weights = batch(count, seed=count)
        folded = module(x.view(1, count, HIDDEN), ids.int(), weights)
        assert folded.shape == (1, count, HIDDEN)
        assert rel(folded[0], plain(x, ids, weights, module.gate_up_weight, module.down_weight)) <= 1e-5
        folded.sum().backward()
        assert x.grad.shape == x.shape
        assert module.gate_up_weight.grad is not None


def test_a_histogram_gives_the_same_bits_as_counting():
    module = layer()
    x, ids, weights = batch(40)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    y = module(x, ids, weights)
    for histogram in (counts, counts.int(), counts.repeat_interleave(2)[::2]):
        assert torch.equal(module(x, ids, weights, tokens_per_expert=histogram), y)


def test_inputs_and_gradients_may_be_strided_or_expanded():
    module = layer()
    x, ids, weights = batch(30)
    y = module(x, ids, weights)
    wide = x.detach().repeat(1, 2)[:, :HIDDEN].requires_grad_()
    tall = ids.repeat_interleave(2, dim=0)[::2]
    again = module(wide, tall, weights.detach().t().contiguous().t().requires_grad_())
    assert torch.equal(again, y)
    again.sum().backward()  # the gradient of a sum is expanded
    y.backward(torch.ones_like(y))
    assert torch.equal(wide.grad, x.grad)
    one = torch.randn(1, HIDDEN).expand(30, HIDDEN)
    assert torch.equal(module(one, ids, weights), module(one.contiguous(), ids, weights))


@pytest.mark.parametrize("wants", range(1, 16))
def test_frozen_inputs_and_weights_get_no_gradient_and_change_no_other(wants):
    module = layer()
    x, ids, weights = batch(33)
    tensors = (x, weights, module.gate_up_weight, module.down_weight)
    module(x, ids, weights).square().sum().backward()
    every = [tensor.grad.clone() for tensor in tensors]
    for place, tensor in enumerate(tensors):
        tensor.grad = None
        tensor.requires_grad_(bool(wants >> place & 1))
    module(x, ids, weights).square().sum().backward()
    for place, tensor in enumerate(tensors):
        assert torch.equal(tensor.grad, every[place]) if wants >> place & 1 else tensor.grad is None


def test_no_grad_keeps_nothing_for_backward():
    module = layer()
    x, ids, weights = batch(20)
    with torch.no_grad():
        y = module(x, ids, weights)
    assert not y.requires_grad
    with torch.inference_mode():
        assert torch.equal(module(x, ids, weights), y)
    assert torch.equal(module(x, ids, weights).detach(), y)


def test_a_graph_may_be_walked_twice_and_forwards_may_wait_for_their_backwards_in_any_order():
    module = layer()
    batches = [batch(tokens, seed=tokens) for tokens in (10, 64, 0, 33)]
    alone = []
    for x, ids, weights in batches:
        loss = module(x, ids, weights).square().sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
        assert torch.equal(x.grad, 2 * first)
        alone.append(first)
        x.grad = None
    losses = [module(x, ids, weights).square().sum() for x, ids, weights in batches]
    for place in (2, 0, 3, 1):
        losses[place].backward()
    for (x, _, _), want in zip(batches, alone, strict=True):
        assert torch.equal(x.grad, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(reentrant):
    module = layer()
    x, ids, weights = batch(50)
    module(x, ids, weights).square().sum().backward()
    tensors = (x, weights, module.gate_up_weight, module.down_weight)
    want = [tensor.grad.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    checkpoint(module, x, ids, weights, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(tensor.grad, grad) for tensor, grad in zip(tensors, want, strict=True))


def test_a_second_derivative_is_refused():
    module = layer()
    x, ids, weights = batch(5)
    (dx,) = torch.autograd.grad(module(x, ids, weights).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_weights_changed_between_forward_and_backward_are_noticed():
    module = layer()
    x, ids, weights = batch(5)
    loss = module(x, ids, weights).sum()
    with torch.no_grad():
        module.down_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_an_optimizer_follow_plain_torch(optimizer):
    module = layer()
    w1, w2 = leaves(*all_weights())
    ours, theirs = optimizer(module.parameters(), lr=1e-2), optimizer([w1, w2], lr=1e-2)
    for step in range(8):
        x, ids, weights = batch(40, seed=step, pattern=PATTERNS[step % 4])
        for steps, loss in (
            (ours, module(x, ids, weights).square().mean()),
            (theirs, plain(x, ids, weights, w1, w2).square().mean()),
        ):
            steps.zero_grad()
            loss.backward()
            steps.step()
    # AdamW divides by the root of tiny second moments, so rounding shows.
    limit = 1e-5 if optimizer is torch.optim.SGD else 1e-3
    assert rel(module.gate_up_weight, w1) <= limit
    assert rel(module.down_weight, w2) <= limit


def test_weights_may_come_with_the_call():
    bare, module = layer(create_parameters=False), layer()
    x, ids, weights = batch(20)
    assert list(bare.parameters()) == []
    w1, w2 = leaves(module.gate_up_weight, module.down_weight)
    y = bare(x, ids, weights, expert_weights=(w1, w2))
    assert torch.equal(y, module(x, ids, weights))
    y.sum().backward()
    assert w1.grad.shape == w1.shape
    assert w2.grad.shape == w2.shape


def test_copies_pickles_and_state_dicts_carry_the_weights_and_no_resources():
    module = layer()
    x, ids, weights = batch(20)
    y = module(x, ids, weights)
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    loaded = MegaMoeExperts(max_local_num_tokens=64, **SIZES)
    loaded.load_state_dict(torch.load(stream))
    assert set(module.state_dict()) == {"gate_up_weight", "down_weight"}
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(x, ids, weights), y)
        other.close()
    assert torch.equal(module(x, ids, weights), y)


# torch looks at .grad of whatever crosses from one compiled part to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_around_it_can_be_compiled():
    module = layer()
    x, ids, weights = batch(20)

    def model(x):
        return module(x * 2, ids, weights).sin()

    want = model(x)
    have = torch.compile(model, backend="eager")(x)
    assert torch.equal(have, want)
    have.sum().backward()


def test_layers_that_share_resources_compute_what_separate_ones_do():
    def stack(shared):
        layers = [layer() for _ in range(3)]
        if shared:
            MegaMoeExperts.share_execution_resources(layers)
        gradients = []
        for step in range(3):
            losses = []
            for microbatch in range(2):
                x, ids, weights = batch(40, seed=10 * step + microbatch)
                h = x
                for member in layers:
                    h = h + 0.1 * member(h, ids, weights)
                losses.append(h.square().mean())
            for loss in reversed(losses):
                loss.backward()
        for member in layers:
            gradients += [member.gate_up_weight.grad, member.down_weight.grad]
            member.close()
        return gradients

    assert all(torch.equal(a, b) for a, b in zip(stack(False), stack(True), strict=True))


def test_close_is_idempotent_and_the_module_works_as_a_context():
    x, ids, weights = batch(4)
    with layer() as module:
        module(x, ids, weights).sum().backward()
    module.close()
    with pytest.raises(RuntimeError, match="closed"):
        module(x, ids, weights)


def test_a_second_thread_is_refused_while_the_resources_are_in_use():
    module = layer()
    raised = []

    def call():
        try:
            module(*batch(4))
        except RuntimeError as error:
            raised.append(str(error))

    with module._execution.claim():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(raised) == 1
    assert "in use by another thread" in raised[0]
    module(*batch(4))


def test_a_thousand_steps_leave_no_memory_behind():
    module = layer()
    x, ids, weights = batch(16)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    for step in range(600):
        if step == 200:
            before = resident()
        x, ids, weights = batch(16, seed=step)
        module(x, ids, weights).sum().backward()
    assert resident() - before < 8 << 20
