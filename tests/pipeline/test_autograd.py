"""To autograd, optimizers and hooks a pipeline is the plain model: the same outputs, the same gradients."""

from __future__ import annotations

import copy
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from pipesight import GPipe
from support.against_plain import (
    Fn,
    assert_same,
    assert_same_pass,
    assert_same_state,
    error_of,
    fresh,
    mlp,
    modes,
    rand,
    run_plain,
    total,
)


def both(model, balance, chunks, checkpoint, **kwargs):
    """Return a pipeline and its plain twin."""
    plain = copy.deepcopy(model)
    return GPipe(model, balance, chunks=chunks, checkpoint=checkpoint, **kwargs), plain


# Shapes of batches, partitions and inputs.


@modes
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch", [0, 1, 4, 7])
def test_any_batch_and_chunks(batch, chunks, grad, checkpoint):
    """A batch may be empty, smaller than chunks, equal, or not divisible; the input may want a gradient or not."""
    assert_same(mlp(), rand(batch, 3, grad=grad), [1, 2, 1], chunks=chunks, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_any_balance(balance, checkpoint):
    """One partition or one for every layer make no difference."""
    assert_same(mlp(), rand(5, 3, grad=True), balance, chunks=3, checkpoint=checkpoint)


@modes
def test_more_partitions_than_cores(checkpoint):
    """Nine partitions work on however many cores there are."""
    assert_same(mlp(9), rand(11, 3, grad=True), [1] * 9, chunks=5, checkpoint=checkpoint, passes=3)


@modes
def test_identity_partitions(checkpoint):
    """Partitions that hand their input on as it is are transparent."""
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3), nn.Identity(), nn.Identity(), nn.Linear(3, 3), nn.Identity())
    assert_same(model.double(), rand(5, 3, grad=True), [1, 1, 1, 1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("grad", [False, True])
def test_only_identity(grad, checkpoint):
    """A model without parameters gives the input back, and a gradient only if the input wants one."""
    pipe = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint)
    x = rand(4, 3, grad=grad)
    output = pipe(x)
    assert torch.equal(output, x)
    assert output.requires_grad == grad
    assert_same(nn.Sequential(nn.Identity()), x, [1], chunks=2, checkpoint=checkpoint)


@modes
def test_layers_without_parameters(checkpoint):
    """Partitions without parameters pass gradients on."""
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Linear(3, 3), nn.Softplus()).double()
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1, 1], chunks=3, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("grads", [(False, False), (True, False), (False, True), (True, True)])
def test_tuples(grads, checkpoint):
    """Tuples of tensors go in, through and out, whichever of them want gradients."""
    model = nn.Sequential(
        Fn(lambda s, x: (x[0] * s.a, x[1] + s.b)),
        Fn(lambda s, x: (x[0] * x[1], x[1] * s.a, x[0])),
        Fn(lambda s, x: (x[2] + s.a, x[0] + x[1])),
    )
    x = rand(5, 3, grad=grads[0]), rand(5, 1, grad=grads[1])
    assert_same(model, x, [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_tuple_of_one(checkpoint):
    """A tuple of one tensor stays a tuple."""
    model = nn.Sequential(Fn(lambda s, x: (x[0] * s.a,)), Fn(lambda s, x: (x[0] * s.a,)))
    assert_same(model, (rand(5, 3, grad=True),), [1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_tensor_becomes_tuple_and_back(checkpoint):
    """Layers may change between a tensor and tuples at partition boundaries."""
    model = nn.Sequential(
        Fn(lambda s, x: (x, x * s.a)),
        Fn(lambda s, x: x[0] + x[1] * s.b),
        Fn(lambda s, x: (x * s.a,)),
        Fn(lambda s, x: x[0] * s.b),
    )
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_same_tensor_twice(checkpoint):
    """One tensor may be two of the inputs, and two of the outputs; its gradients add up."""
    model = nn.Sequential(Fn(lambda s, x: (x[0] * s.a, x[1])), Fn(lambda s, x: (x[0], x[0], x[1])))
    pipe, plain = both(model, [1, 1], 2, checkpoint)
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    total(pipe((ours, ours))).backward()
    total(run_plain(plain, (theirs, theirs), 2)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert_same_state(pipe, plain)


@modes
def test_integers_and_booleans(checkpoint):
    """Integer and boolean tensors pass through beside the others and come out exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(
        Fn(lambda s, x: (x[0] * s.a, x[1] * 2, ~x[2])),
        Fn(lambda s, x: (x[0].masked_fill(x[2], 0) * s.a, x[1], x[2])),
        Fn(lambda s, x: (x[1] + 1, x[0] * x[1], x[2])),
    )
    x = rand(5, 3, grad=True), torch.arange(15).view(5, 3), rand(5, 3) > 0
    pipe, _ = assert_same(model, x, [1, 1, 1], chunks=2, checkpoint=checkpoint)
    numbers, floats, flags = pipe(x)
    assert (numbers.dtype, flags.dtype) == (torch.int64, torch.bool)
    assert (numbers.requires_grad, floats.requires_grad, flags.requires_grad) == (False, True, False)


@modes
def test_embedding_first(checkpoint):
    """Integers alone may go in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 3), nn.Tanh()).double()
    assert_same(model, torch.arange(10).view(5, 2), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_batch_dimension_that_changes(checkpoint):
    """A layer may change the number of rows: each micro-batch gives as many as it likes."""
    model = nn.Sequential(Fn(lambda s, x: (x * s.a).flatten(0, 1)), Fn(lambda s, x: x[1:] * s.b))
    assert_same(model, rand(5, 4, 3, grad=True), [1, 1], chunks=3, checkpoint=checkpoint)


@modes
def test_inner_shapes_and_dtypes_that_change(checkpoint):
    """Shape and dtype may differ from partition to partition."""
    model = nn.Sequential(
        Fn(lambda s, x: (x * s.a).float()), Fn(lambda s, x: x.unsqueeze(1).half()), Fn(lambda s, x: x.double() * s.b)
    )
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex(checkpoint):
    """Complex tensors and parameters get the gradients that autograd gives them."""
    model = nn.Sequential(nn.Linear(3, 3), Fn(lambda s, x: x * s.a), nn.Linear(3, 3)).to(torch.complex128)
    x = torch.complex(rand(5, 3), rand(5, 3) + 1).requires_grad_()
    assert_same(model, x, [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_complex_and_real(checkpoint):
    """Gradients pass from complex to real and back at partition boundaries."""
    model = nn.Sequential(
        nn.Linear(4, 4).double(), Fn(lambda s, x: torch.fft.rfft(x) * s.a), Fn(lambda s, x: (x * s.a).abs())
    )
    assert_same(model, rand(5, 4, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_strided_inputs(checkpoint):
    """Inputs may be transposed, expanded or slices of something else."""
    model = mlp()
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [2, 2], chunks=2, checkpoint=checkpoint)
    for make in (lambda t: t.T, lambda t: t[:, 0].expand(4, 3), lambda t: t.T[::2]):
        ours, theirs = rand(3, 4, grad=True), rand(3, 4, grad=True)
        total(pipe(make(ours))).backward()
        total(plain(make(theirs))).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert_same_state(pipe, plain)


# Ways to call backward.


@modes
def test_output_used_twice(checkpoint):
    """An output that two losses use gets both gradients."""
    assert_same(
        mlp(),
        rand(5, 3, grad=True),
        [2, 2],
        chunks=2,
        checkpoint=checkpoint,
        loss=lambda y: total(y) + (y.sin() * y).sum(),
    )


@modes
@pytest.mark.parametrize("used", [0, 1])
def test_output_unused(used, checkpoint):
    """An output that no loss uses takes nothing away from the others."""
    model = nn.Sequential(Fn(lambda s, x: (x * s.a, x * s.b)), Fn(lambda s, x: (x[0] * s.a, x[1] * s.b)))
    assert_same(
        model, rand(5, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint, loss=lambda y: y[used].square().sum()
    )


@modes
def test_part_of_an_output_used(checkpoint):
    """A loss may use some rows, and so some micro-batches, only."""
    assert_same(
        mlp(), rand(6, 3, grad=True), [2, 2], chunks=3, checkpoint=checkpoint, loss=lambda y: y[:2].square().sum()
    )


@modes
def test_several_forwards_one_backward(checkpoint):
    """The losses of several mini-batches may be added before one backward."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    xs = [rand(n, 3) for n in (4, 5, 6)]
    sum(total(pipe(x)) for x in xs).backward()
    sum(total(plain(x)) for x in xs).backward()
    # Rows have other weights in the loss of a whole mini-batch, but chunks do not matter to it.
    assert_same_state(pipe, plain)


@modes
def test_backwards_in_another_order(checkpoint):
    """Several mini-batches may be under way, and their backwards come in any order."""
    pipe, plain = both(mlp(), [1, 2, 1], 2, checkpoint)
    xs = [rand(n, 3, grad=True) for n in (4, 5, 6)]
    ours, theirs = [fresh(x) for x in xs], [fresh(x) for x in xs]
    losses = [total(pipe(x)) for x in ours]
    expected = [total(plain(x)) for x in theirs]
    for k in (1, 2, 0):
        losses[k].backward()
        expected[k].backward()
        torch.testing.assert_close(ours[k].grad, theirs[k].grad)
        assert_same_state(pipe, plain)


@modes
def test_output_of_one_pass_is_input_of_the_next(checkpoint):
    """A model may be applied to its own output before backward."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    total(pipe(pipe(pipe(ours)))).backward()
    total(plain(plain(plain(theirs)))).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert_same_state(pipe, plain)


@modes
def test_retained_graph(checkpoint):
    """With retain_graph, backward can run again and gives the same again."""
    pipe, plain = both(mlp(), [1, 2, 1], 3, checkpoint)
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    loss, expected = total(pipe(ours)), total(plain(theirs))
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        expected.backward(retain_graph=retain)
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert_same_state(pipe, plain)


@modes
def test_backward_of_each_output(checkpoint):
    """The outputs of one forward may be differentiated one after the other."""
    model = nn.Sequential(Fn(lambda s, x: (x * s.a, x * s.b)), Fn(lambda s, x: (x[0] * s.a, x[1] * x[0] * s.b)))
    pipe, plain = both(model, [1, 1], 2, checkpoint)
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    outputs, expected = pipe(ours), plain(theirs)
    for k in (0, 1, 0):
        outputs[k].square().sum().backward(retain_graph=True)
        expected[k].square().sum().backward(retain_graph=True)
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert_same_state(pipe, plain)


@modes
@pytest.mark.parametrize("retained", [0, 2])
def test_second_backward_without_retained_graph(retained, checkpoint):
    """Without retain_graph, a second backward says what to do, and leaves the gradients alone."""
    pipe = GPipe(mlp(), [2, 2], chunks=2, checkpoint=checkpoint)
    output = pipe(rand(5, 3))
    for _ in range(retained):
        output.sum().backward(retain_graph=True)
    output.sum().backward()
    before = [p.grad.clone() for p in pipe.parameters()]
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time.*retain_graph=True"):
        output.sum().backward()
    for parameter, gradient in zip(pipe.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)
    total(pipe(rand(5, 3))).backward()


@modes
def test_double_backward_is_an_error(checkpoint):
    """Gradients made with create_graph are right, and differentiating them again says that it cannot be done."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    (gradient,) = torch.autograd.grad(total(pipe(ours)), ours, create_graph=True)
    (expected,) = torch.autograd.grad(total(plain(theirs)), theirs, create_graph=True)
    torch.testing.assert_close(gradient.detach(), expected.detach())
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match="does not support double backward"):
        gradient.square().sum().backward()


@modes
def test_autograd_grad(checkpoint):
    """torch.autograd.grad gives gradients of the input, of all or some parameters, and accumulates nothing."""
    pipe, plain = both(mlp(6), [2, 2, 2], 2, checkpoint)
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    for pick in (lambda m, x: [x], lambda m, x: list(m.parameters()), lambda m, x: [list(m.parameters())[3], x]):
        gradients = torch.autograd.grad(total(pipe(ours)), pick(pipe, ours))
        expected = torch.autograd.grad(total(plain(theirs)), pick(plain, theirs))
        torch.testing.assert_close(gradients, expected)
    assert ours.grad is None
    assert all(p.grad is None for p in pipe.parameters())


@modes
def test_backward_with_inputs(checkpoint):
    """backward(inputs=...) accumulates into those alone."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    for model in (pipe, plain):
        total(model(rand(5, 3))).backward(inputs=[list(model.parameters())[1]])
    assert_same_state(pipe, plain)


@modes
def test_retained_gradient_of_the_output(checkpoint):
    """retain_grad works on the output and on an input that is no leaf."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    kept = []
    for model in (pipe, plain):
        x = rand(5, 3, grad=True) * 2
        y = model(x)
        x.retain_grad()
        y.retain_grad()
        total(y).backward()
        kept.append([x.grad, y.grad])
    torch.testing.assert_close(*kept)


@modes
def test_explicit_output_gradient(checkpoint):
    """backward(gradient) takes any gradient, also an expanded one."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    for gradient in (rand(5, 3), rand(1, 3).expand(5, 3), rand(3, 5).T):
        pipe(rand(5, 3)).backward(gradient)
        plain(rand(5, 3)).backward(gradient)
        assert_same_state(pipe, plain)


@modes
def test_parameter_gradient_is_not_the_callers_tensor(checkpoint):
    """The gradient that the caller passed to backward is left alone when gradients accumulate."""
    layer = Fn(lambda s, x: x + s.b)
    pipe = GPipe(nn.Sequential(layer), [1], chunks=2, checkpoint=checkpoint)
    gradient = torch.ones(1, 3, dtype=torch.float64)
    for _ in range(2):
        pipe(rand(1, 3)).backward(gradient)
    assert torch.equal(gradient, torch.ones(1, 3, dtype=torch.float64))
    assert torch.equal(layer.b.grad, 2 * gradient)


@modes
def test_gradients_share_no_memory(checkpoint):
    """Scaling one gradient in place, as gradient clipping does, changes no other."""
    layers = [Fn(lambda s, x: x + s.b) for _ in range(3)]
    pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    x, c = rand(1, 3, grad=True), rand(1, 3, grad=True)
    (pipe(x) + c).sum().backward()
    gradients = [layer.b.grad for layer in layers] + [x.grad, c.grad]
    for gradient in gradients:
        gradient.mul_(2)
    assert all(torch.equal(g, torch.full_like(g, 2)) for g in gradients)


@modes
def test_gradient_accumulation(checkpoint):
    """Gradients of three mini-batches add up, and zero_grad starts anew, with and without set_to_none."""
    pipe, plain = both(mlp(), [1, 2, 1], 3, checkpoint)
    for round_ in range(3):
        for n in (4, 5, 6):
            assert_same_pass(pipe, plain, rand(n, 3, grad=True))
        pipe.zero_grad(set_to_none=bool(round_))
        plain.zero_grad(set_to_none=bool(round_))
        assert_same_state(pipe, plain)


# Modes.


@modes
def test_no_grad(checkpoint):
    """Under no_grad the output is the plain model's and wants no gradient."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    with torch.no_grad():
        output = pipe(rand(5, 3, grad=True))
        torch.testing.assert_close(output, plain(rand(5, 3)))
    assert not output.requires_grad


@modes
def test_inference_mode(checkpoint):
    """Under inference_mode the output is an inference tensor, and training goes on afterwards."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    seen = []
    pipe[1].register_forward_hook(lambda *_: seen.append(torch.is_inference_mode_enabled()))
    with torch.inference_mode():
        output = pipe(rand(5, 3, grad=True))
        torch.testing.assert_close(output, plain(rand(5, 3)))
    assert output.is_inference()
    assert seen == [True, True]
    assert_same_pass(pipe, plain, rand(5, 3, grad=True))


@modes
def test_eval(checkpoint):
    """In eval the output is the plain model's, and gradients too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.9), nn.Linear(3, 3)).double()
    model[1].running_mean.fill_(0.3)
    pipe, plain = both(model.eval(), [1, 1, 2], 2, checkpoint)
    assert not pipe.training
    assert_same_pass(pipe, plain, rand(5, 3, grad=True))


@modes
def test_autocast(checkpoint):
    """Layers run under the caller's autocast, also when they are recomputed after it has ended."""
    pipe, plain = both(mlp().float(), [2, 2], 1, checkpoint)
    x = rand(4, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = pipe(x), plain(x)
    assert output.dtype == expected.dtype == torch.bfloat16
    output.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert_same_state(pipe, plain, rtol=0, atol=0)


# Which tensors want gradients.


@modes
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_frozen_layers(frozen, grad, checkpoint):
    """Frozen layers, first, middle, last or all, get no gradients; the others get theirs."""
    model = mlp(6)
    for k in frozen:
        model[2 * k].requires_grad_(False)
    assert_same(model, rand(5, 3, grad=grad), [2, 2, 2], chunks=2, checkpoint=checkpoint)


@modes
def test_all_frozen_and_no_input_gradient(checkpoint):
    """If nothing wants a gradient, neither does the output."""
    pipe = GPipe(mlp().requires_grad_(False), [2, 2], chunks=2, checkpoint=checkpoint)
    assert not pipe(rand(5, 3)).requires_grad


@modes
def test_frozen_parameters_of_a_layer(checkpoint):
    """Some parameters of a layer may be frozen."""
    model = mlp(6)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert_same(model, rand(5, 3), [2, 2, 2], chunks=2, checkpoint=checkpoint)


@modes
def test_freezing_as_training_goes_on(checkpoint):
    """Layers may be frozen and released from step to step."""
    pipe, plain = both(mlp(6), [2, 2, 2], 2, checkpoint)
    for frozen in ({0}, {1, 2}, set(), {2}):
        for k in range(3):
            pipe[2 * k].requires_grad_(k not in frozen)
            plain[2 * k].requires_grad_(k not in frozen)
        assert_same_pass(pipe, plain, rand(5, 3, grad=True))


@modes
@pytest.mark.parametrize("later", [False, True])
def test_freezing_between_forward_and_backward(later, checkpoint):
    """What is frozen or released after forward gets what the plain model gives it, as GAN training needs."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    for model in (pipe, plain):
        model[2].requires_grad_(not later)
        output = model(rand(5, 3))
        model[2].requires_grad_(later)
        total(output).backward()
    assert_same_state(pipe, plain)


@modes
def test_unused_parameters(checkpoint):
    """A parameter that is not used has no gradient, rather than zeros."""
    model = nn.Sequential(Fn(lambda s, x: x * s.a), Fn(lambda s, x: x * s.b), Fn(lambda s, x: x))
    pipe, _ = assert_same(model, rand(5, 3), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    assert pipe[0].b.grad is None
    assert pipe[2].a.grad is None


@modes
def test_parameter_used_in_some_microbatches(checkpoint):
    """A parameter that only some micro-batches use gets their gradients."""
    model = nn.Sequential(
        Fn(lambda s, x: x * (s.a if x[0, 0] > 0 else s.b)), Fn(lambda s, x: x * s.a if x[0, 0] > 0.5 else x)
    )
    x = rand(6, 3)
    x[:, 0] = torch.tensor([1, -1, 0.1, -1, 1, 1])
    assert_same(model, x.requires_grad_(), [1, 1], chunks=6, checkpoint=checkpoint)


@modes
def test_parameters_shared_within_a_layer(checkpoint):
    """A parameter that two modules of one layer share gets one gradient, the sum."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x).tanh())

    torch.manual_seed(0)
    assert_same(
        nn.Sequential(Tied(), nn.Linear(3, 3)).double(),
        rand(5, 3, grad=True),
        [1, 1],
        chunks=2,
        checkpoint=checkpoint,
    )


@modes
def test_layer_called_twice_within_a_layer(checkpoint):
    """A module that its layer calls several times gets the sum of the gradients."""
    model = nn.Sequential(nn.Linear(3, 3).double(), Fn(lambda s, x: (x * s.a).sin() * s.a + s.b * s.b))
    assert_same(model, rand(5, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("place", [0, 1, 2])
def test_layer_that_detaches(place, checkpoint):
    """Behind a layer that detaches nothing gets a gradient, in front of it everything does."""
    layers = [Fn(lambda s, x: x * s.a) for _ in range(3)]
    layers[place] = Fn(lambda s, x: x.detach() * s.a)
    assert_same(nn.Sequential(*layers), rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_layer_whose_output_wants_no_gradient(checkpoint):
    """A layer with parameters whose output does not depend on them cuts the graph and breaks nothing."""
    model = nn.Sequential(
        Fn(lambda s, x: x * s.a), Fn(lambda s, x: (x * s.a).detach().round()), Fn(lambda s, x: x * s.b)
    )
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_last_layer_that_detaches(checkpoint):
    """A model whose output wants no gradient gives right numbers, and no parameter gets a gradient."""
    model = nn.Sequential(Fn(lambda s, x: x * s.a), Fn(lambda s, x: (x * s.a).detach()))
    pipe, _ = assert_same(model, rand(5, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)
    assert not pipe(rand(5, 3)).requires_grad
    assert all(p.grad is None for p in pipe.parameters())


@modes
def test_graph_cut_in_some_microbatches(checkpoint):
    """A layer may detach in some micro-batches only."""
    model = nn.Sequential(Fn(lambda s, x: x * s.a), Fn(lambda s, x: (x if x[0, 0] > 0 else x.detach()) * s.b))
    x = rand(6, 3)
    x[:, 0] = torch.tensor([1, -1, 1, -1, -1, 1]) * rand(3).sign()[0]
    assert_same(model, x.requires_grad_(), [1, 1], chunks=6, checkpoint=checkpoint)


@modes
def test_detached_beside_differentiable(checkpoint):
    """Of the tensors between two partitions, some may be detached."""
    model = nn.Sequential(Fn(lambda s, x: (x * s.a, (x * s.b).detach())), Fn(lambda s, x: (x[0] * x[1] * s.a, x[1])))
    assert_same(model, rand(5, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_target_that_must_not_want_a_gradient(checkpoint):
    """A float that wants no gradient may pass a partition on its way to a loss that has no derivative for it."""
    model = nn.Sequential(
        Fn(lambda s, x: (x[0] * s.a, x[1])), Fn(lambda s, x: F.soft_margin_loss(x[0] * s.a, x[1], reduction="none"))
    )
    assert_same(model, (rand(5, 3), rand(5, 3).sign()), [1, 1], chunks=2, checkpoint=checkpoint)


# Layers with ways of their own.


@modes
def test_output_changed_in_place_by_the_caller(checkpoint):
    """The caller may change the output in place: gradients are those of the changed output."""
    for chunks in (1, 3):
        pipe, plain = both(mlp(3), [2, 1], chunks, checkpoint)
        for model in (pipe, plain):
            output = model(rand(5, 3))
            output.add_(1)
            output[1].mul_(2)
            total(output).backward()
        assert_same_state(pipe, plain)


@modes
@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_changed_in_place_by_the_caller(chunks, checkpoint):
    """Each of several outputs may be changed in place by the caller."""
    model = nn.Sequential(nn.Linear(3, 3).double(), Fn(lambda s, x: (x * s.a, x + s.b)))
    pipe, plain = both(model, [1, 1], chunks, checkpoint)
    for each in (pipe, plain):
        first, second = each(rand(4, 3))
        first.mul_(2)
        second.relu_()
        total((first, second)).backward()
    assert_same_state(pipe, plain)


@modes
def test_output_that_is_a_partitions_input_changed_in_place(checkpoint):
    """If the caller's change spoils what backward needs, there is an error, or the gradient is right."""
    pipe = GPipe(nn.Sequential(Fn(lambda s, x: (x, x * s.a))), [1], chunks=1, checkpoint=checkpoint)
    first, second = pipe(rand(4, 3) * 1)
    first.add_(5)
    error = error_of(second.sum().backward)
    if error is not None:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(pipe[0].a.grad, rand(4, 3).sum(0))


@modes
def test_input_changed_in_place_before_backward(checkpoint):
    """If the caller overwrites the input before backward, there is an error or the gradient is right."""
    pipe = GPipe(nn.Sequential(Fn(lambda s, x: x * s.a)), [1], chunks=2, checkpoint=checkpoint)
    x = rand(4, 3)
    loss = pipe(x).sum()
    x.add_(1)
    error = error_of(loss.backward)
    if error is not None:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(pipe[0].a.grad, rand(4, 3).sum(0))


@modes
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_in_place_first_layer(place, chunks, checkpoint):
    """A partition may begin with a layer that works in place, the first partition too."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]
    layers.insert(place, nn.ReLU(inplace=True))
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    balance = [4] if place == 0 else [place, 4 - place]
    pipe, plain = both(model, balance, chunks, checkpoint)
    ours, theirs = rand(6, 3, grad=True), rand(6, 3, grad=True)
    total(pipe(ours * 2)).backward()
    total(plain(theirs * 2)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert_same_state(pipe, plain)


@modes
@pytest.mark.parametrize("chunks", [1, 2])
def test_in_place_first_layer_after_identity(chunks, checkpoint):
    """An in-place layer may come first behind a partition that hands the caller's input on."""
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(3, 3)).double()
    pipe, plain = both(model, [1, 2], chunks, checkpoint)
    total(pipe(rand(4, 3))).backward()
    total(plain(rand(4, 3))).backward()
    assert_same_state(pipe, plain)


@modes
def test_in_place_first_layer_on_a_leaf(checkpoint):
    """A leaf that wants a gradient is not overwritten by a first layer that works in place."""
    pipe = GPipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3).double()), [1, 1], checkpoint=checkpoint)
    x = rand(4, 3, grad=True)
    error = error_of(lambda: total(pipe(x)).backward())
    assert error is None or "in-place" in str(error)
    assert torch.equal(x, rand(4, 3))


@modes
def test_in_place_on_tuples(checkpoint):
    """A layer that says it works in place may change each tensor of a tuple."""

    class Both(nn.Module):
        inplace = True

        def forward(self, x):
            return x[0].mul_(2), x[1].relu_()

    model = nn.Sequential(Fn(lambda s, x: (x * s.a, x + s.b)), Both(), Fn(lambda s, x: x[0] * x[1] * s.a))
    assert_same(model, rand(5, 3, grad=True), [1, 2], chunks=2, checkpoint=checkpoint)


@modes
def test_in_place_without_saying_so(checkpoint):
    """A layer that changes its input and does not say so: right gradients, or an error that names the way out."""
    model = nn.Sequential(nn.Linear(3, 3).double(), Fn(lambda s, x: x.mul_(2) * s.a))
    pipe, plain = both(model, [1, 1], 2, checkpoint)
    total(run_plain(plain, rand(4, 3), 2)).backward()
    error = error_of(lambda: total(pipe(rand(4, 3))).backward())
    if error is not None:
        assert checkpoint != "never"
        assert "inplace = True" in str(error)
    else:
        assert_same_state(pipe, plain)


@modes
def test_in_place_on_what_the_partition_before_needs(checkpoint):
    """Overwriting what an earlier layer has saved is an error, as in the plain model, or does no harm."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.ReLU(inplace=True)).double()
    pipe, plain = both(model, [2, 1], 2, checkpoint)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total(plain(rand(4, 3))).backward()
    error = error_of(lambda: total(pipe(rand(4, 3))).backward())
    if error is not None:
        assert "modified by an inplace operation" in str(error)
    else:
        out_of_place = nn.Sequential(copy.deepcopy(plain[0]), nn.Sigmoid(), nn.ReLU())
        out_of_place.zero_grad()
        total(out_of_place(rand(4, 3))).backward()
        torch.testing.assert_close(pipe[0].weight.grad, out_of_place[0].weight.grad)


@modes
def test_layer_that_returns_its_input(checkpoint):
    """A layer may return its very input beside something new."""
    model = nn.Sequential(Fn(lambda s, x: (x, x * s.a)), Fn(lambda s, x: (*x, x[0] * x[1] * s.b)))
    assert_same(model, rand(5, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_layers_that_return_views(checkpoint):
    """Layers may return views of their input: slices, transposes, expansions."""
    model = nn.Sequential(
        Fn(lambda s, x: (x * s.a).unsqueeze(1).expand(-1, 4, -1)),
        Fn(lambda s, x: x.transpose(1, 2)),
        Fn(lambda s, x: x[:, 1:]),
        Fn(lambda s, x: x.flatten(1).split(4, dim=1)),
    )
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_layer_that_returns_its_parameter(checkpoint):
    """A layer may return its parameter as it is or expanded."""
    model = nn.Sequential(Fn(lambda s, x: (x, s.b, s.a.expand(x.size(0), 3))), Fn(lambda s, x: x[0] * x[1] + x[2]))
    assert_same(model, rand(5, 3, grad=True), [1, 1], chunks=5, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_sparse_embedding(chunks, checkpoint):
    """Sparse gradients stay sparse and add up over micro-batches and mini-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 3), nn.Tanh()).double()
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 2], chunks=chunks, checkpoint=checkpoint)
    x = torch.tensor([[0, 1], [1, 1], [9, 0], [3, 3], [1, 9]])
    for _ in range(2):
        total(pipe(x)).backward()
        total(plain(x)).backward()
        assert pipe[0].weight.grad.is_sparse
        torch.testing.assert_close(pipe[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())
        torch.testing.assert_close(pipe[1].weight.grad, plain[1].weight.grad)


@modes
def test_lstm(checkpoint):
    """An LSTM with its flat weights, two layers, both directions, gets the plain model's gradients."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x):
            output, (h, _) = self.lstm(x)
            return output, h.transpose(0, 1).contiguous()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 3), Recurrent(), Fn(lambda s, x: x[0].mean((1, 2))[:, None] * x[1].sum((1, 2))[:, None] * s.b)
    ).double()
    pipe, _ = assert_same(model, rand(5, 4, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    assert all(a is b for a, b in zip(pipe[1].lstm._flat_weights, pipe[1].lstm.parameters(), strict=True))


@modes
@pytest.mark.parametrize("parametrized", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_weights(parametrized, checkpoint):
    """Parametrized weights get the plain model's gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(parametrized(nn.Linear(3, 3).double()) for _ in range(3)))
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm(checkpoint):
    """Weights that a pre-forward hook makes anew in every forward get the plain model's gradients."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(torch.nn.utils.weight_norm(nn.Linear(3, 3).double()) for _ in range(3))))
    pipe, plain = GPipe(models[0], [1, 2], chunks=2, checkpoint=checkpoint), models[1]
    for _ in range(2):
        assert_same_pass(pipe, plain, rand(5, 3, grad=True))


@modes
def test_custom_function(checkpoint):
    """A custom autograd function in a layer has its backward called once per micro-batch."""
    calls = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            calls.append(gradient.shape)
            return gradient * ctx.saved_tensors[0] * 2

    model = nn.Sequential(nn.Linear(3, 3).double(), Fn(lambda s, x: Scale.apply(x) * s.a))
    pipe, _ = assert_same(model, rand(4, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)
    calls.clear()
    total(pipe(rand(4, 3))).backward()
    assert calls == [(2, 3), (2, 3)]


@pytest.mark.slow
@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_random_models(data):
    """Whatever the layers, balance, chunks, batch, mode and frozen parameters: the same as the plain model."""
    kinds = [
        lambda: nn.Linear(3, 3),
        nn.Tanh,
        nn.Identity,
        lambda: nn.ReLU(inplace=True),
        lambda: nn.LayerNorm(3),
        lambda: nn.BatchNorm1d(3),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()),
        lambda: Fn(lambda s, x: x * s.a),
    ]
    # An in-place layer behind one that saves its output or hands its input on is an error in the plain model too.
    picks = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=7), "layers")
    picks = [2 if k == 3 and (not n or picks[n - 1] not in (0, 4, 5, 7)) else k for n, k in enumerate(picks)]
    torch.manual_seed(0)
    model = nn.Sequential(*(kinds[k]() for k in picks)).double()
    cuts = data.draw(st.sets(st.integers(1, max(1, len(picks) - 1))), "cuts") if len(picks) > 1 else set()
    ends = [0, *sorted(cuts), len(picks)]
    for parameter in model.parameters():
        parameter.requires_grad_(data.draw(st.booleans(), "trained"))
    rows = data.draw(st.integers(0, 9), "rows")
    chunks = data.draw(st.integers(1, 6), "chunks")
    if 5 in picks:  # batch normalisation needs two rows
        rows, chunks = max(4, rows), min(2, chunks)
    assert_same(
        model,
        rand(rows, 3, grad=data.draw(st.booleans(), "input wants a gradient")),
        [b - a for a, b in pairwise(ends)],
        chunks=chunks,
        checkpoint=data.draw(st.sampled_from(["always", "except_last", "never"]), "checkpoint"),
        rtol=1e-6,
        atol=1e-8,
    )


# Hooks.


@modes
def test_parameter_hooks_see_the_whole_gradient_once(checkpoint):
    """Tensor.register_hook on a parameter fires once a mini-batch with the sum over micro-batches."""
    pipe, plain = both(mlp(), [2, 2], 3, checkpoint)
    seen = {pipe: [], plain: []}
    for model in (pipe, plain):
        for parameter in model.parameters():
            parameter.register_hook(seen[model].append)
        for _ in range(2):
            model.zero_grad()
            total(model(rand(6, 3))).backward()
    assert len(seen[pipe]) == len(seen[plain]) == 8
    ours, theirs = (sorted(gradients, key=lambda g: (g.dim(), g.sum().item())) for gradients in seen.values())
    torch.testing.assert_close(ours, theirs)


@modes
@pytest.mark.parametrize("when", ["before", "between"])
def test_parameter_hooks_change_the_gradient_once(when, checkpoint):
    """A hook that scales the gradient does so once, also when it came after forward."""
    pipe, plain = both(mlp(), [2, 2], 3, checkpoint)
    for model in (pipe, plain):
        handles = []
        if when == "before":
            handles = [p.register_hook(lambda g: g * 3) for p in model.parameters()]
        loss = total(model(rand(6, 3)))
        if when == "between":
            handles = [p.register_hook(lambda g: g * 3) for p in model.parameters()]
        loss.backward()
        for handle in handles:
            handle.remove()
        total(model(rand(6, 3))).backward()
    assert_same_state(pipe, plain)


@modes
def test_parameter_hook_that_is_any_object(checkpoint):
    """A hook may be any callable, such as a mock."""
    pipe = GPipe(mlp(), [2, 2], chunks=3, checkpoint=checkpoint)
    hook = Mock(return_value=None)
    pipe[0].weight.register_hook(hook)
    total(pipe(rand(6, 3))).backward()
    hook.assert_called_once()


@modes
def test_post_accumulate_hooks_fire_once(checkpoint):
    """register_post_accumulate_grad_hook fires once a mini-batch, when the whole gradient is in place."""
    pipe, plain = both(mlp(), [2, 2], 3, checkpoint)
    total(plain(rand(6, 3))).backward()
    seen = []
    names = {p: name for name, p in zip(plain.state_dict(), pipe.parameters(), strict=True)}
    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append((names[p], p.grad.clone())))
    total(pipe(rand(6, 3))).backward()
    assert sorted(name for name, _ in seen) == sorted(names.values())
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, gradient in seen:
        torch.testing.assert_close(gradient, expected[name])


@modes
def test_optimizer_in_backward(checkpoint):
    """A parameter may be stepped and its gradient dropped in a post-accumulate hook."""
    pipe, plain = both(mlp(), [2, 2], 3, checkpoint)
    for model in (pipe, plain):

        def step(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        total(pipe(rand(6, 3))).backward()
        total(plain(rand(6, 3))).backward()
        assert_same_state(pipe, plain)


@modes
def test_multi_grad_hook(checkpoint):
    """register_multi_grad_hook over all parameters fires once a mini-batch with their whole gradients."""
    pipe, plain = both(mlp(), [2, 2], 3, checkpoint)
    total(plain(rand(6, 3))).backward()
    seen = []
    handle = torch.autograd.graph.register_multi_grad_hook(list(pipe.parameters()), seen.append)
    total(pipe(rand(6, 3))).backward()
    handle.remove()
    assert len(seen) == 1
    torch.testing.assert_close(list(seen[0]), [p.grad for p in plain.parameters()])


@modes
def test_input_and_output_hooks(checkpoint):
    """Tensor hooks on the input and output of the pipeline fire once, and may change the gradient."""
    pipe, plain = both(mlp(), [2, 2], 3, checkpoint)
    seen = []
    for model in (pipe, plain):
        x = rand(6, 3, grad=True)
        x.register_hook(lambda g: g * 2)
        y = model(x)
        y.register_hook(lambda g: g * 3)
        total(y).backward()
        seen.append(x.grad)
    torch.testing.assert_close(*seen)
    assert_same_state(pipe, plain)


@modes
def test_layer_hooks(checkpoint):
    """Forward hooks on a layer run with it and may change what goes in and out."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    calls = {pipe: [], plain: []}
    for model in (pipe, plain):
        for layer in model:
            layer.register_forward_pre_hook(lambda _, x, m=model: (calls[m].append("pre"), (x[0] * 2,))[1])
            layer.register_forward_hook(lambda _, x, y, m=model: (calls[m].append("post"), y + 1)[1])
    assert_same_pass(pipe, plain, rand(6, 3, grad=True))
    recomputed = {"always": 2, "except_last": 1, "never": 0}[checkpoint]
    assert len(calls[plain]) == 2 * 2 * 4
    assert len(calls[pipe]) == 2 * 4 * (2 + recomputed)


@modes
@pytest.mark.parametrize("grad", [False, True])
def test_layer_backward_hooks(grad, checkpoint):
    """Full backward hooks on layers fire once a micro-batch with its gradients, and may change them."""
    pipe, plain = both(mlp(6), [2, 2, 2], 2, checkpoint)
    seen = {pipe: [], plain: []}
    for model in (pipe, plain):
        layer = model[3]
        layer.register_full_backward_pre_hook(lambda _, out, m=model: (seen[m].append(out), (out[0] * 2,))[1])
        layer.register_full_backward_hook(lambda _, in_, out, m=model: (seen[m].append(in_ + out), (in_[0] * 3,))[1])
    assert_same_pass(pipe, plain, rand(6, 3, grad=grad))
    assert len(seen[pipe]) == len(seen[plain]) == 4
    ours, theirs = (sorted(s, key=lambda g: (len(g), g[0].sum().item())) for s in seen.values())
    torch.testing.assert_close(ours, theirs)


@modes
def test_hooks_on_the_pipeline(checkpoint):
    """All kinds of module hooks work on the pipeline itself, once a mini-batch."""
    pipe, plain = both(mlp(), [2, 2], 2, checkpoint)
    seen = {pipe: [], plain: []}
    for model in (pipe, plain):
        log = seen[model]
        model.register_forward_pre_hook(lambda _, x, log=log: (log.append(x), (x[0] * 2,))[1])
        model.register_forward_hook(lambda _, x, y, log=log: (log.append((y,)), y + 1)[1])
        model.register_full_backward_pre_hook(lambda _, out, log=log: (log.append(out), (out[0] * 2,))[1])
        model.register_full_backward_hook(lambda _, in_, out, log=log: (log.append(in_ + out), (in_[0] * 3,))[1])
        x = rand(6, 3, grad=True)
        total(model(x)).backward()
        log.append((x.grad,))
    assert len(seen[pipe]) == 5
    torch.testing.assert_close(seen[pipe], seen[plain])
    assert_same_state(pipe, plain)


# Tensors that would lose their gradient.


@modes
@pytest.mark.parametrize("saved", [False, True])
def test_leaf_that_is_no_parameter(saved, checkpoint):
    """A tensor that a layer uses without owning it gets its gradient, also through a graph of its own."""
    leaf = rand(3, grad=True)
    expected = rand(3, grad=True)
    hooks = []
    leaf.register_hook(hooks.append)
    for _ in range(2):
        outside = leaf.exp() if saved else leaf
        pipe = GPipe(
            nn.Sequential(mlp(1), Fn(lambda s, x, o=outside: x * s.a + o)), [1, 1], chunks=2, checkpoint=checkpoint
        )
        total(pipe(rand(4, 3))).backward()
        plain_outside = expected.exp() if saved else expected
        plain = nn.Sequential(*copy.deepcopy(list(pipe)[:1]), Fn(lambda s, x, o=plain_outside: x * s.a + o))
        plain[1].a = pipe[1].a
        total(plain(rand(4, 3))).backward()
        torch.testing.assert_close(leaf.grad, expected.grad)
    assert len(hooks) == 2


@modes
def test_leaf_that_is_no_parameter_later(checkpoint):
    """Such a tensor gets its gradient also if it turns up only after some passes, and ``autograd.grad`` gives it."""
    leaf = rand(3, grad=True)
    pipe = GPipe(nn.Sequential(Fn(lambda s, x: (x * s.a, x * s.a * leaf))), [1], chunks=2, checkpoint=checkpoint)
    pipe(rand(4, 3))[0].sum().backward()
    assert leaf.grad is None
    pipe(rand(4, 3))[1].sum().backward()
    expected = (rand(4, 3) * pipe[0].a).sum(0).detach()
    torch.testing.assert_close(leaf.grad, expected)
    (gradient,) = torch.autograd.grad(pipe(rand(4, 3))[1].sum(), [leaf])
    torch.testing.assert_close(gradient, expected)


@modes
@pytest.mark.parametrize("rows", [(0,), (1, 3), (3,)])
def test_leaf_that_is_no_parameter_in_some_microbatches(rows, checkpoint):
    """Such a tensor gets its gradient also if only some micro-batches use it, whichever they are."""
    x = rand(4, 3)
    x[:, 0] = -1
    x[list(rows), 0] = 1
    gradients = []
    for piped in (True, False):
        leaf = rand(3, grad=True)
        model = nn.Sequential(Fn(lambda s, x, leaf=leaf: x * s.a + (leaf if x[0, 0] > 0 else 0)))
        output = GPipe(model, [1], chunks=4, checkpoint=checkpoint)(x) if piped else run_plain(model, x, 4)
        total(output).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
