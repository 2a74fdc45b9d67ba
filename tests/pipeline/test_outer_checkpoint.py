"""``torch.utils.checkpoint`` around a pipeline: gradients are those of the plain model in the same checkpoint."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pipesight import GPipe, context, current_microbatch
from pipesight.skip import pop, skippable, stash
from support.against_plain import MODES, Fn, assert_equal_tensors, assert_same_state, fresh, mlp, rand, run_plain, total

modes = pytest.mark.parametrize("mode", MODES)
reentrants = pytest.mark.parametrize("reentrant", [False, True])


def assert_same_in(around, model, input, balance, *, mode, passes=2, chunks=2):
    """Check that ``around(model, input)`` is the same for a pipeline as for the plain model, state included."""
    plain = copy.deepcopy(model)
    pipe = GPipe(model, balance, chunks=chunks, checkpoint=mode)
    for _ in range(passes):
        ours, theirs = fresh(input), fresh(input)
        output, expected = around(pipe, ours), around(lambda x: run_plain(plain, x, chunks), theirs)
        assert_equal_tensors(output.detach(), expected.detach(), "output")
        total(output).backward()
        total(expected).backward()
        assert_equal_tensors(ours.grad, theirs.grad, "gradient of the input")
        assert_same_state(pipe, plain)


@modes
@reentrants
def test_whole_pipeline(reentrant, mode):
    """A pipeline that is checkpointed as a whole has the gradients of the plain model."""
    assert_same_in(
        lambda model, x: checkpoint(model, x, use_reentrant=reentrant), mlp(), rand(5, 3, grad=True), [2, 2], mode=mode
    )


@modes
def test_input_without_gradient(mode):
    """Without reentrance, the input need not require grad."""
    assert_same_in(lambda model, x: checkpoint(model, x, use_reentrant=False), mlp(), rand(5, 3), [2, 2], mode=mode)


@modes
@pytest.mark.parametrize("stop", [True, False])
def test_early_stop(stop, mode):
    """It does not matter whether recomputation stops as soon as all that is needed is there."""

    def around(model, x):
        with set_checkpoint_early_stop(stop):
            return checkpoint(lambda x: model(x.sin()).cos(), x, use_reentrant=False)

    assert_same_in(around, mlp(), rand(5, 3, grad=True), [2, 2], mode=mode)


@modes
@reentrants
def test_part_of_a_larger_function(reentrant, mode):
    """The checkpoint may hold more than the pipeline, before and after it, and the pipeline twice."""

    def around(model, x):
        return checkpoint(lambda x: model((model(x.sin()) * x).cos()).tanh() * x, x, use_reentrant=reentrant)

    assert_same_in(around, mlp(), rand(5, 3, grad=True), [2, 2], mode=mode)


@modes
def test_checkpoint_in_a_checkpoint(mode):
    """Checkpoints nest."""

    def around(model, x):
        def inner(x):
            return checkpoint(model, x.sin(), use_reentrant=False).cos()

        return checkpoint(lambda x: inner(inner(x)) * x, x, use_reentrant=False)

    assert_same_in(around, mlp(), rand(5, 3, grad=True), [2, 2], mode=mode)


@modes
@reentrants
def test_batch_norm(reentrant, mode):
    """Running statistics are those of the plain model in a checkpoint, which sees each batch twice."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double()
    assert_same_in(
        lambda model, x: checkpoint(model, x, use_reentrant=reentrant), model, rand(6, 3, grad=True), [2, 2], mode=mode
    )


@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, input):
        yield stash("a", input * 2)
        return input


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, input):
        skip = yield pop("a")
        return input + skip.sin()


@modes
def test_skips(mode):
    """Skip connections across partitions are recomputed too."""
    model = nn.Sequential(Stash(), nn.Linear(3, 3).double(), Pop())
    plain = nn.Sequential(Fn(lambda _, x: x), copy.deepcopy(model[1]))
    pipe = GPipe(model, [1, 1, 1], chunks=2, checkpoint=mode)
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    total(checkpoint(pipe, ours, use_reentrant=False)).backward()
    total(plain(theirs) + (theirs * 2).sin()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(pipe[1].weight.grad, plain[1].weight.grad)


@modes
def test_current_microbatch(mode):
    """Tensors that bypass the engine are those of the recomputation."""
    skips = {}

    def keep(s, x):
        skips[current_microbatch()] = x * s.a
        return x

    model = nn.Sequential(Fn(keep), Fn(lambda s, x: x * s.b), Fn(lambda s, x: x + skips.pop(current_microbatch())))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 1, 1], chunks=2, checkpoint=mode)
    for _ in range(2):
        ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
        total(checkpoint(pipe, ours, use_reentrant=False)).backward()
        total(theirs * plain[1].b + theirs * plain[0].a).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        torch.testing.assert_close([pipe[0].a.grad, pipe[1].b.grad], [plain[0].a.grad, plain[1].b.grad])


@modes
@reentrants
def test_dropout_is_repeated(reentrant, mode):
    """The recomputation draws the numbers of the first forward."""
    pipe = GPipe(nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5)), [1, 1, 1], chunks=3, checkpoint=mode)
    x = rand(60, 3, grad=True)
    output = checkpoint(pipe, x, use_reentrant=reentrant)
    output.sum().backward()
    assert 0 < (output != 0).sum() < output.numel()
    assert torch.equal(output != 0, x.grad != 0)


@modes
def test_retained_graph(mode):
    """A retained graph can be differentiated again, and after that no more."""
    pipe, plain = GPipe(mlp(), [2, 2], chunks=2, checkpoint=mode), mlp()
    loss, expected = total(checkpoint(pipe, rand(5, 3), use_reentrant=False)), total(plain(rand(5, 3)))
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        expected.backward(retain_graph=retain)
    assert_same_state(pipe, plain)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@modes
def test_some_gradients(mode):
    """torch.autograd.grad asks for some gradients, and gets these."""
    pipe, plain = GPipe(mlp(), [2, 2], chunks=2, checkpoint=mode), mlp()
    ours, theirs = rand(5, 3, grad=True), rand(5, 3, grad=True)
    output = checkpoint(pipe, ours, use_reentrant=False)
    found = torch.autograd.grad(total(output), [pipe[2].weight, ours])
    torch.testing.assert_close(found, torch.autograd.grad(total(plain(theirs)), [plain[2].weight, theirs]))


@modes
def test_double_backward(mode):
    """create_graph=True gives gradients, which cannot be differentiated again."""
    pipe, plain = GPipe(mlp(), [2, 2], chunks=2, checkpoint=mode), mlp()
    weights = list(pipe.parameters())
    output = checkpoint(pipe, rand(5, 3, grad=True), use_reentrant=False)
    gradients = torch.autograd.grad(total(output), weights, create_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(total(plain(rand(5, 3))), list(plain.parameters())))
    with pytest.raises(RuntimeError, match="does not support double backward"):
        gradients[0].sum().backward()


def test_nothing_is_kept():
    """What the layers save is dropped after the first forward, and after backward."""
    kept = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            kept.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    pipe = GPipe(nn.Sequential(*(Fn(lambda _, x: Keeps.apply(x)) for _ in "ab")), [1, 1], chunks=2, checkpoint="never")
    output = checkpoint(pipe, rand(4, 3, grad=True), use_reentrant=False)
    gc.collect()
    assert len(kept) == 4
    assert not any(ref() for ref in kept)
    output.sum().backward()
    gc.collect()
    assert len(kept) == 8
    assert not any(ref() for ref in kept)


@modes
def test_hooks_inside_the_checkpoint(mode):
    """Saved-tensor hooks of the user's own, inside of the checkpoint, see what the layers save."""
    packed = []

    def around(model, x):
        def function(x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
                return model(x)

        return checkpoint(function, x, use_reentrant=False)

    assert_same_in(around, mlp(), rand(4, 3, grad=True), [2, 2], mode=mode)
    assert torch.Size([2, 3]) in packed


@modes
def test_in_a_layer_of_another_pipeline(mode):
    """A pipeline may be checkpointed by a layer of another one."""

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(lambda x: self.inner(x).sin(), x, use_reentrant=False)

    plain = nn.Sequential(nn.Linear(3, 3).double(), Checkpointed(mlp()))
    ours = copy.deepcopy(plain)
    ours[1].inner = GPipe(ours[1].inner, [2, 2], chunks=2, checkpoint=mode)
    pipe = GPipe(ours, [1, 1], chunks=2, checkpoint=mode)
    a, b = rand(8, 3, grad=True), rand(8, 3, grad=True)
    total(pipe(a)).backward()
    total(plain(b)).backward()
    torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@modes
@reentrants
def test_steps(reentrant, mode):
    """A recomputation is no step of its own, and has the number of the step."""
    seen = []

    class Noting(context.Observer):
        def task_started(self, where):
            seen.append((where.step, where.phase))

    pipe = GPipe(mlp(), [2, 2], chunks=1, checkpoint=mode)
    noting = Noting()
    context.attach(noting)
    try:
        for step in range(2):
            seen.clear()
            total(checkpoint(pipe, rand(4, 3, grad=True), use_reentrant=reentrant)).backward()
            assert {number for number, _ in seen} == {step}
            assert [phase for _, phase in seen].count("forward") == 4
    finally:
        context.detach(noting)


def test_replaced_parameters():
    """Parameters that are others when the checkpoint calls again are an error, not wrong gradients."""
    pipe = GPipe(mlp(), [2, 2], chunks=2, checkpoint="never")

    def function(x):
        state = {name: (p.detach() * 2).requires_grad_() for name, p in pipe.named_parameters()}
        return torch.func.functional_call(pipe, state, (x,))

    loss = total(checkpoint(function, rand(4, 3, grad=True), use_reentrant=False))
    with pytest.raises(RuntimeError, match="replaced between its forward and its recomputation"):
        loss.backward()


def test_frozen_before_backward():
    """Parameters that are frozen between forward and backward get no gradient; the others do."""
    pipe, plain = GPipe(mlp(), [2, 2], chunks=2, checkpoint="never"), mlp()
    loss = total(checkpoint(pipe, rand(4, 3, grad=True), use_reentrant=False))
    pipe[2].weight.requires_grad_(False)
    loss.backward()
    total(plain(rand(4, 3))).backward()
    assert pipe[2].weight.grad is None
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


def test_hooks_that_recompute():
    """Hooks of another checkpoint, which would call the pipeline from its own worker, are a clear error."""
    pipe, x = GPipe(mlp(), [2, 2], chunks=2, checkpoint="never"), rand(4, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: pipe(x) and t):
        output = pipe(x)
    with pytest.raises(RuntimeError, match="saved-tensor hooks that recompute it"):
        total(output).backward()
