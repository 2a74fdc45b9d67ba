"""`dgrad` is the gradient that a layer alone gives to its input, as torch's own backward hooks see it."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import relu_
from torch.utils.checkpoint import checkpoint

from pipesight import GPipe
from pipesight.stats import watch
from support.logged import assert_six, config, values


class Residual(nn.Module):
    """Two layers use one tensor; neither of their gradients is that of the tensor."""

    def __init__(self, inplace=False):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=inplace)

    def forward(self, x):
        return x + self.second(self.act(self.first(x))) * self.second(x)


def model_of(block=Residual):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), block(), block(), nn.Linear(6, 2))


def truth(model, batches):
    """What ``register_full_backward_hook`` is given, by layer and step, in a copy of the model."""
    model, seen, steps = copy.deepcopy(model), {}, []

    def keep(name):
        def after(_, grad_inputs, __):
            seen.setdefault((len(steps), name), []).extend(g.clone() for g in grad_inputs)

        return after

    for name, layer in model.named_modules():
        if name not in ("", "0"):  # their input is not differentiated
            layer.register_full_backward_hook(keep(name))
    for x in batches:
        train(model, [x])
        steps.append(x)
    return seen


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def check(folder, expected):
    found = values(folder)
    assert {key[:2] for key in found} == set(expected)
    for (step, layer), gradients in expected.items():
        assert_six(found, step, layer, "dgrad", *gradients, rtol=1e-5)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, generator=generator) for _ in range(2)]


def test_shared_input(tmp_path):
    """Each layer's own gradient, where several use one tensor; none where nothing is differentiated."""
    model, twin = model_of(), model_of()
    expected = truth(model, batches())
    assert (1, "1.first") in expected
    with watch(model, config(["dgrad"]), log_dir=tmp_path):
        train(model, batches())
    check(tmp_path, expected)
    train(twin, batches())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_pipeline(mode, tmp_path):
    """Micro-batches count together, recomputations once."""
    model = model_of()
    expected = truth(model, batches())
    pipe = GPipe(model, [2, 2], chunks=4, checkpoint=mode)
    with watch(pipe, config(["dgrad"]), log_dir=tmp_path):
        train(pipe, batches())
    check(tmp_path, expected)


def test_torch_checkpoint(tmp_path):
    """Of a recomputed layer, the recomputation is differentiated, and logged once."""

    class Recomputed(Residual):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model = model_of(Recomputed)
    with watch(model, config(["dgrad"]), log_dir=tmp_path):
        train(model, batches())
    check(tmp_path, truth(model_of(Residual), batches()))


class Two(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, two, *, more, mask=None):
        return (self.linear(two.x) * two.scale + more["a"][0]) * mask


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.nested = nn.Linear(4, 4), Nested()

    def forward(self, x):
        y = self.stem(x)
        return self.nested(Two(y, y + 1), more={"a": [y * 2]}, mask=torch.ones(4, dtype=torch.bool))


def test_nested_arguments(tmp_path):
    """Tensors in tuples, mappings and keywords count together; masks do not."""
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(3, 4)
    y = model.stem(x).detach()
    inputs = [tensor.requires_grad_() for tensor in (y, y + 1, y * 2)]
    out = model.nested(Two(*inputs[:2]), more={"a": [inputs[2]]}, mask=torch.ones(4, dtype=torch.bool))
    expected = torch.autograd.grad(out.square().sum(), inputs)
    with watch(model, config(["dgrad"], layers="nested"), log_dir=tmp_path):
        train(model, [x])
    assert_six(values(tmp_path), 0, "nested", "dgrad", *expected, rtol=1e-5)


def test_layers_that_change_their_input(tmp_path):
    """Layers that are declared to work in place have it, and train as they do unwatched."""
    model, twin = model_of(lambda: Residual(inplace=True)), model_of(lambda: Residual(inplace=True))
    expected = truth(model_of(), batches())
    with watch(model, config(["dgrad"]), log_dir=tmp_path):
        train(model, batches())
    check(tmp_path, expected)
    train(twin, batches())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_undeclared_change(tmp_path, capsys):
    """A layer that changes its input unannounced still trains, and a warning says what is missing and what to do."""

    class Changes(nn.Module):
        def forward(self, x):
            return relu_(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Changes(), nn.Linear(4, 2))
    with watch(model, config(["dgrad"]), log_dir=tmp_path):
        train(model, batches())
    assert {key[1] for key in values(tmp_path)} == {"2"}
    stderr = capsys.readouterr().err
    assert stderr.count("'dgrad' of layer '1' is not logged") == 1
    assert "inplace = True" in stderr
