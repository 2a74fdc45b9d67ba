"""torch.utils.checkpoint in a layer of a pipeline, of both kinds, beside the pipeline's own checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pipesight import GPipe
from pipesight.context import current_microbatch
from support.against_plain import Fn, assert_same, assert_same_state, modes, named, rand, total

kinds = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])


class Checkpointed(nn.Module):
    """Runs a module under torch.utils.checkpoint."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *inputs):
        return torch_checkpoint(self.inner, *inputs, use_reentrant=self.reentrant)


def model_of(reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return nn.Sequential(
        nn.Linear(3, 3), Checkpointed(block, reentrant), nn.Tanh(), Checkpointed(nn.Linear(3, 3), reentrant)
    ).double()


@modes
@kinds
@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 2], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_gradients(balance, grad, reentrant, checkpoint):
    """Gradients are those of the plain model."""
    assert_same(model_of(reentrant), rand(7, 3, grad=grad), balance, chunks=3, checkpoint=checkpoint)


@modes
@kinds
def test_parameter_used_inside_and_outside(reentrant, checkpoint):
    """What a layer uses inside and outside of its checkpoint gets the sum."""
    model = nn.Sequential(
        nn.Linear(3, 3).double(),
        Fn(lambda s, x: torch_checkpoint(lambda t: (t * s.a).sin() * s.b, x, use_reentrant=reentrant) * s.a),
    )
    assert_same(model, rand(5, 3, grad=True), [1, 1], chunks=2, checkpoint=checkpoint)


@modes
@kinds
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a plain model, too
def test_checkpoint_in_a_checkpoint(reentrant, checkpoint):
    """Checkpoints may be nested."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), Checkpointed(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), reentrant))
    model = nn.Sequential(nn.Linear(3, 3), Checkpointed(inner, reentrant), nn.Linear(3, 3)).double()
    assert_same(model, rand(5, 3), [1, 2], chunks=2, checkpoint=checkpoint)


@modes
@kinds
def test_shared_graph(reentrant, checkpoint):
    """Partitions whose backward is one graph, since a layer asked for the micro-batch, are no exception."""
    model = nn.Sequential(
        Fn(lambda s, x: (current_microbatch(), x * s.a)[1]),
        Checkpointed(nn.Linear(3, 3).double(), reentrant),
        Checkpointed(nn.Linear(3, 3).double(), reentrant),
    )
    assert_same(model, rand(5, 3), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
@kinds
def test_dropout_repeats_its_numbers(reentrant, checkpoint):
    """Gradients fit the numbers that forward drew: what was dropped gets none."""
    layer = Checkpointed(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout()), reentrant)
    with torch.no_grad():
        layer.inner[0].weight.copy_(torch.eye(64))
    pipe = GPipe(nn.Sequential(nn.Identity(), layer), [1, 1], chunks=3, checkpoint=checkpoint)
    x = torch.ones(6, 64, requires_grad=True)
    output = pipe(x)
    output.sum().backward()
    assert torch.equal(x.grad, output)
    assert 0 < output.count_nonzero() < output.numel()


@modes
@kinds
def test_hooks_are_called_once_a_batch(reentrant, checkpoint):
    """Hooks of parameters see the sum over the micro-batches, once, and nothing of the stand-ins."""
    plain = model_of(False)
    pipe = GPipe(model_of(reentrant), [2, 2], chunks=3, checkpoint=checkpoint)
    before = list(pipe.parameters())
    seen, after = {}, []
    for name, parameter in named(pipe.named_parameters()).items():
        parameter.register_hook(lambda g, name=name: seen.setdefault(name, []).append(g.clone()))
        parameter.register_post_accumulate_grad_hook(after.append)
    total(pipe(rand(6, 3))).backward()
    total(plain(rand(6, 3))).backward()
    for name, parameter in plain.named_parameters():
        assert len(seen[name]) == 1
        torch.testing.assert_close(seen[name][0], parameter.grad)
    assert len(after) == len(before) == len({id(p) for p in after})
    assert all(one is other for one, other in zip(pipe.parameters(), before, strict=True))


@modes
@pytest.mark.parametrize("place", [1, 3])
def test_failure_puts_the_parameters_back(place, checkpoint):
    """A backward that fails inside of a checkpoint leaves the model as it was."""
    model = model_of(True)
    fail = [True]

    def backward_hook(module, *_):
        if fail[0]:
            raise ValueError("no backward")

    model[place].inner.register_full_backward_hook(backward_hook)
    pipe = GPipe(model, [2, 2], chunks=3, checkpoint=checkpoint)
    before = list(pipe.parameters())
    with pytest.raises(ValueError, match="no backward"):
        pipe(rand(6, 3)).sum().backward()
    assert all(one is other for one, other in zip(pipe.parameters(), before, strict=True))
    assert all(p.grad is None for p in before)
    fail[0] = False
    plain = model_of(True)
    total(plain(rand(6, 3))).backward()
    total(pipe(rand(6, 3))).backward()
    assert_same_state(pipe, plain)


@modes
def test_some_gradients(checkpoint):
    """autograd.grad gives what the graph shows; what only a reentrant checkpoint knows of, it refuses to forget."""
    model = model_of(True)
    pipe = GPipe(copy.deepcopy(model), [2, 2], chunks=3, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match=r"use_reentrant=False"):
        torch.autograd.grad(total(pipe(rand(6, 3))), [pipe[0].weight])
    assert all(p.grad is None for p in pipe.parameters())
