"""Compare a pipeline with the truth: the plain model, run on the same micro-batches one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipesight import GPipe

MODES = ["always", "except_last", "never"]
# With several micro-batches, the second has some of either kind; with one, each has the other kind. "never" has nothing
# of its own: test_checkpoint, the random models and the fuzzers take all three.
modes = pytest.mark.parametrize("checkpoint", ["always", "except_last"])


def rand(*shape, dtype=torch.float64, grad=False):
    """Return numbers that are the same in every run, whatever other tests draw."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_(grad)


def mlp(layers=4, width=3):
    """Return a float64 model of Linear and Tanh by turns."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Tanh() if k % 2 else nn.Linear(width, width) for k in range(layers))).double()


class Fn(nn.Module):
    """A layer made of a function, with two parameters that it may use."""

    def __init__(self, function, width=3):
        super().__init__()
        self.function = function
        self.a = nn.Parameter(rand(width))
        self.b = nn.Parameter(rand(1, width))

    def forward(self, input):
        return self.function(self, input)


def error_of(function, *args):
    """Return the ``RuntimeError`` that a call raises, or ``None``."""
    try:
        function(*args)
    except RuntimeError as error:
        return error
    return None


def tensors_of(value):
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def run_plain(model, input, chunks):
    """Run the micro-batches of ``input`` through a plain model, and put the outputs together."""
    inputs = tensors_of(input)
    parts = list(zip(*(t.chunk(chunks) for t in inputs), strict=True)) if inputs[0].size(0) else [inputs]
    outputs = [model(part[0] if isinstance(input, torch.Tensor) else part) for part in parts]
    gathered = tuple(torch.cat(same) for same in zip(*map(tensors_of, outputs), strict=True))
    return gathered[0] if isinstance(outputs[0], torch.Tensor) else gathered


def total(output):
    """Return a loss that weighs every number of the output differently."""
    loss = torch.zeros((), dtype=torch.float64)
    for t in tensors_of(output):
        if t.requires_grad:
            weights = torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape)
            loss = loss + ((t * t.conj()).real.double() * weights).sum() + t.real.double().sum()
    return loss


def fresh(input):
    """Return leaves with the values of ``input``."""
    copies = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_of(input))
    return copies[0] if isinstance(input, torch.Tensor) else copies


def named(tensors):
    """Return tensors by the names that they have in the plain model."""
    return {name.split(".", 2)[2] if name.startswith("partitions.") else name: t for name, t in tensors}


def assert_equal_tensors(ours, theirs, what, **tolerance):
    assert type(ours) is type(theirs), f"{what}: {ours} instead of {theirs}"
    if theirs is not None:
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{what}: {text}", **tolerance)


def assert_same_state(pipe, plain, **tolerance):
    """Parameters, their gradients and buffers of both models are equal."""
    ours, theirs = named(pipe.named_parameters()), named(plain.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert_equal_tensors(ours[name], parameter, name, **tolerance)
        assert_equal_tensors(ours[name].grad, parameter.grad, f"gradient of {name}", **tolerance)
    ours, theirs = named(pipe.named_buffers()), named(plain.named_buffers())
    assert list(ours) == list(theirs)
    for name, buffer in theirs.items():
        assert_equal_tensors(ours[name], buffer, name, **tolerance)


def assert_same_pass(pipe, plain, input, *, loss=total, **tolerance):
    """One forward and backward of both gives the same outputs, gradients and buffers."""
    ours, theirs = fresh(input), fresh(input)
    output, expected = pipe(ours), run_plain(plain, theirs, pipe.chunks)
    assert isinstance(output, tuple) == isinstance(expected, tuple)
    assert len(tensors_of(output)) == len(tensors_of(expected))
    for k, (a, b) in enumerate(zip(tensors_of(output), tensors_of(expected), strict=True)):
        assert_equal_tensors(a.detach(), b.detach(), f"output {k}", **tolerance)
        assert a.requires_grad == b.requires_grad, f"output {k}"
    if any(t.requires_grad for t in tensors_of(expected)):
        loss(expected).backward()
        loss(output).backward()
    for k, (a, b) in enumerate(zip(tensors_of(ours), tensors_of(theirs), strict=True)):
        assert_equal_tensors(a.grad, b.grad, f"gradient of input {k}", **tolerance)
    assert_same_state(pipe, plain, **tolerance)


def assert_same(model, input, balance, *, chunks, checkpoint, passes=2, loss=total, **tolerance):
    """Several passes of ``model`` as a pipeline are the same as those of the plain one; return both."""
    plain = copy.deepcopy(model)
    pipe = GPipe(model, balance, chunks=chunks, checkpoint=checkpoint)
    for _ in range(passes):
        assert_same_pass(pipe, plain, input, loss=loss, **tolerance)
    return pipe, plain
