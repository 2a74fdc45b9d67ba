"""Watching a model: what is logged with no calls in user code, compared with the plain model's own tensors."""

import copy
import io
import pickle
import re
import sys
import threading
from collections import Counter, OrderedDict

import pytest
import torch
import torch.optim.optimizer as optimizers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipesight.stats as debug_api
from pipesight import GPipe
from pipesight.skip import pop, skippable, stash
from pipesight.stats import ConfigError, watch
from support.logged import SIX, assert_six, config, lines, run_ranks, values

ALL = ("activation", "gradient", "weight", "wgrad", "input", "output")


@pytest.fixture(autouse=True)
def _ended():
    yield
    debug_api.end_debug()


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2))


def reference(model, x, layers=None, backward=None):
    """Return the tensors of each layer in one forward and backward of a copy of a model."""
    model = copy.deepcopy(model)
    seen = {}

    def keep(name):
        def before(_, args):
            seen.setdefault((name, "input"), []).extend(a.detach().clone() for a in args)

        def after(_, args, output):
            for tensor in ("activation", "output"):
                seen.setdefault((name, tensor), []).append(output.detach().clone())
            output.register_hook(lambda g: seen.setdefault((name, "gradient"), []).append(g.detach().clone()))

        return before, after

    for name, layer in model.named_modules():
        if name:
            before, after = keep(name)
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after)
    loss = (model(x) ** 2).sum()
    loss.backward()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            seen[name, "weight"], seen[name, "wgrad"] = [layer.weight.detach().clone()], [layer.weight.grad]
    return seen


def train(model, batches, optimizer=None, lr=0.05):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr)
    for x in batches:
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()
    return optimizer


def check(found, iteration, truth, names=None):
    for (layer, tensor), parts in truth.items():
        if names is None or layer in names:
            assert_six(found, iteration, layer, tensor, *parts, rtol=1e-5)


# What is logged


def test_plain_module(tmp_path):
    """All six tensors of every layer, step after step."""
    model, batches = small(), [torch.randn(5, 4) for _ in range(3)]
    truths, twin = [], small()
    for x in batches:
        truths.append(reference(twin, x))
        train(twin, [x])
    with watch(model, config(ALL), log_dir=tmp_path) as watched:
        assert set(watched.layers) == {"0", "1", "2", "3"}
        train(model, batches)
    found = values(tmp_path)
    for i, truth in enumerate(truths):
        check(found, i, truth)
    assert {key[0] for key in found} == {0, 1, 2}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.encoder["b"](self.encoder["a"](x)))


def test_nested_modules(tmp_path):
    """Layers have the names that named_modules() gives them; the pattern chooses among them."""
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(3, 4)
    truth = reference(model, x)
    with watch(model, config(("activation", "gradient", "wgrad"), layers=r"encoder\..*0|head"), log_dir=tmp_path):
        train(model, [x])
    found = values(tmp_path)
    assert {key[1] for key in found} == {"encoder.b.0", "head"}
    check(found, 0, {k: v for k, v in truth.items() if k[1] in ("activation", "gradient", "wgrad")}, {"head"})


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_gpipe(mode, chunks, tmp_path):
    """Under GPipe the values are those of the plain model, under its names; recomputation is not counted."""
    batches = [torch.randn(7, 4) for _ in range(2)]  # uneven micro-batches
    twin, truths = small(), []
    for x in batches:
        truths.append(reference(twin, x))
        train(twin, [x])
    model = GPipe(small(), [1, 2, 1], chunks=chunks, checkpoint=mode)
    with watch(
        model,
        config(ALL, [*SIX, "numel"]),
        log_dir=tmp_path,
    ):
        train(model, batches)
    found = values(tmp_path)
    for i, truth in enumerate(truths):
        check(found, i, truth)
        assert found[i, "1", "activation", "numel"] == found[i, "1", "gradient", "numel"] == 42
    assert {key[1] for key in found} == {"0", "1", "2", "3"}


@settings(max_examples=10, deadline=None)
@given(
    balance=st.sampled_from([[4], [2, 2], [1, 1, 2]]),
    chunks=st.integers(1, 6),
    batch=st.integers(1, 9),
    mode=st.sampled_from(["never", "always", "except_last"]),
)
def test_any_pipeline(tmp_path_factory, balance, chunks, batch, mode):
    """However the model and the batch are cut, the statistics are the same."""
    folder, x = tmp_path_factory.mktemp("run"), torch.randn(batch, 4)
    truth = reference(small(), x)
    model = GPipe(small(), balance, chunks=chunks, checkpoint=mode)
    with watch(model, config(ALL), log_dir=folder):
        train(model, [x])
    check(values(folder), 0, truth)


@skippable(stash=["s"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("s", x)
        return x * 2


@skippable(pop=["s"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("s")
        return x + skip


class Pair(nn.Module):
    def forward(self, x):
        return x, x * 3


class Sum(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


@pytest.mark.parametrize("mode", ["never", "always"])
def test_gpipe_with_skips_and_tuples(mode, tmp_path):
    """Skips between layers and tuples of tensors are seen as they are."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), Stash(), Pair(), Sum(), Pop()]
    x = torch.randn(5, 2)
    y = layers[0](x)
    model = GPipe(nn.Sequential(*layers), [2, 1, 2], chunks=2, checkpoint=mode)
    with watch(model, config(("activation", "gradient", "input")), log_dir=tmp_path):
        (model(x)).sum().backward()
    found = values(tmp_path)
    assert_six(found, 0, "1", "activation", 2 * y)
    assert_six(found, 0, "2", "activation", 2 * y, 6 * y)
    assert_six(found, 0, "3", "input", 2 * y, 6 * y)
    assert_six(found, 0, "4", "activation", 9 * y)
    assert_six(found, 0, "0", "gradient", torch.full((5, 2), 9.0))


class Checkpointed(nn.Module):
    def __init__(self, reentrant, inner=None):
        super().__init__()
        self.block, self.reentrant = inner or nn.Sequential(nn.Linear(4, 4), nn.Tanh()), reentrant
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("pipe", [False, True])
def test_torch_checkpoint(reentrant, pipe, tmp_path):
    """What torch.utils.checkpoint recomputes is not counted, and gradients of it are, once; inside of GPipe too."""
    torch.manual_seed(0)
    inner, x = Checkpointed(reentrant), torch.randn(3, 4, requires_grad=True)
    plain = nn.Sequential(nn.Sequential(inner.block, inner.head))
    truth = reference(plain, x.detach())
    model = GPipe(nn.Sequential(inner), [1], chunks=1, checkpoint="never") if pipe else nn.Sequential(inner)
    with watch(model, config(("activation", "gradient", "input"), ["numel", "mean"]), log_dir=tmp_path):
        (model(x) ** 2).sum().backward()
    found = values(tmp_path)
    for tensor in ("activation", "gradient", "input"):
        for ours, theirs in (("0.block.0", "0.0.0"), ("0.block.1", "0.0.1"), ("0.head", "0.1")):
            (expected,) = truth[theirs, tensor]
            assert found[0, ours, tensor, "numel"] == expected.numel()
            assert found[0, ours, tensor, "mean"] == pytest.approx(expected.double().mean().item(), rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("pipe", [False, True])
def test_the_whole_model_in_a_checkpoint(reentrant, pipe, tmp_path):
    """A model that is checkpointed as a whole is counted once, a pipeline too."""
    x = torch.randn(3, 4, requires_grad=True)
    truth = reference(small(), x.detach())
    model = GPipe(small(), [2, 2], chunks=2) if pipe else small()
    with watch(model, config(("activation", "gradient")), log_dir=tmp_path):
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for _ in range(2):
            (checkpoint(model, x, use_reentrant=reentrant) ** 2).sum().backward()
            optimizer.step()
    found = values(tmp_path)
    for i in range(2):
        check(found, i, {k: v for k, v in truth.items() if k[1] in ("activation", "gradient")})


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_pipeline_in_a_checkpoint(mode, reentrant, tmp_path):
    """A pipeline that a larger model checkpoints is counted once, and so are calls in its layers."""

    class Logs(nn.Module):
        def forward(self, x):
            debug_api.log_tensor_stats("mine", tensor=x, tensor_name="activation")
            return x

    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Logs())
    model = Checkpointed(reentrant, GPipe(block, [2, 1], chunks=2, checkpoint=mode))
    debug_api.initialize(config(("activation", "gradient"), ["numel"]), log_dir=tmp_path)
    x = torch.randn(6, 4, requires_grad=True)
    with watch(model, auto_step=False):
        (model(x) ** 2).sum().backward()
    debug_api.end_debug()
    found = values(tmp_path)
    for layer in ("block.0", "block.1", "block.2"):
        assert found[0, layer, "activation", "numel"] == found[0, layer, "gradient", "numel"] == 24
    assert found[0, "mine", "activation", "numel"] == 24


def test_calls_in_a_checkpoint(tmp_path):
    """An explicit call inside of a checkpointed function counts once; in a gradient hook too."""

    def keep(gradient):
        debug_api.log_tensor_stats("layer", tensor=gradient, tensor_name="gradient")

    class Logs(nn.Module):
        def forward(self, x):
            y = x * 2
            debug_api.log_tensor_stats("layer", tensor=y, tensor_name="activation")
            if y.requires_grad:
                y.register_hook(
                    lambda g: debug_api.log_tensor_stats("layer", tensor=g, tensor_name="gradient") and None
                )
            return y.sin()

    for reentrant in (False, True):
        debug_api.initialize(config(("activation", "gradient"), ["numel"]), log_dir=tmp_path / str(reentrant))
        x = torch.ones(5, requires_grad=True)
        checkpoint(Logs(), x, use_reentrant=reentrant).sum().backward()
        debug_api.end_debug()
        assert list(values(tmp_path / str(reentrant)).values()) == [5, 5]


def test_in_place_after_the_layer(tmp_path):
    """A layer that is changed in place by the next is logged as it was, and so is its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    plain = nn.Sequential(model[0], nn.ReLU(), model[2])
    x = torch.randn(6, 4)
    truth = reference(plain, x)
    with watch(model, config(("activation", "gradient", "input")), log_dir=tmp_path):
        train(model, [x])
    check(values(tmp_path), 0, {k: v for k, v in truth.items() if k[1] in ("activation", "gradient", "input")})


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.twice, self.gives = nn.Linear(3, 3), nn.Linear(3, 3), Gives()
        self.embed, self.wave = nn.Embedding(5, 3), Wave()

    def forward(self, tokens, *, scale):
        x = self.linear(input=self.embed(tokens))
        x = self.twice(self.twice(x))
        x = self.gives(x, scale=scale)["value"]
        self.wave(x)
        return x


class Gives(nn.Module):
    def forward(self, x, *, scale):
        return {"value": x * scale, "index": x.argmax(-1), "more": (None, [x])}


class Wave(nn.Module):
    def forward(self, x):
        return torch.complex(x, x)


def test_odd_layers(tmp_path, capsys):
    """Keyword inputs, dicts, indices, layers called twice and complex outputs."""
    torch.manual_seed(0)
    model, tokens, scale = Odd(), torch.tensor([[1, 2], [3, 4]]), torch.tensor(3.0)
    embedded = model.embed(tokens)
    a = model.linear(embedded)
    b = model.twice(a)
    c = model.twice(b)
    with watch(model, config(("activation", "input", "gradient")), log_dir=tmp_path):
        for _ in range(2):
            model(tokens, scale=scale).sum().backward()
    found = values(tmp_path)
    assert_six(found, 0, "linear", "input", embedded, embedded)
    assert_six(found, 0, "twice", "activation", b, c, b, c)
    assert_six(found, 0, "gives", "activation", c * 3, c, c * 3, c)
    assert_six(found, 0, "gives", "input", c, scale.view(1), c, scale.view(1))
    assert_six(found, 0, "embed", "input", tokens, tokens)
    assert not any(key[1:3] == ("wave", "activation") for key in found)
    assert capsys.readouterr().err.count("cannot be read as real numbers") == 1


def test_tied_weights(tmp_path):
    """A layer with two names is one layer, under the first of them."""
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    with watch(model, config(("activation", "wgrad"), ["numel"]), log_dir=tmp_path):
        train(model, [torch.ones(3, 2)])
    found = values(tmp_path)
    assert found[0, "0", "activation", "numel"] == 12
    assert found[0, "0", "wgrad", "numel"] == 4
    assert {key[1] for key in found} == {"0", "1"}


def test_a_layer_that_returns_a_parameter(tmp_path):
    """The gradient of a leaf is counted once a step, and the parameter keeps no hook."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, _):
            return self.weight

    model = nn.Sequential(Table())
    with watch(model, config(("gradient",), ["numel"]), log_dir=tmp_path):
        train(model, [torch.ones(1)] * 3)
    assert list(values(tmp_path).values()) == [3, 3, 3]
    assert not model[0].weight._backward_hooks


# Steps


def test_evaluation_between_steps_is_not_counted(tmp_path):
    """With auto_step, forwards in eval mode or without gradients are left out and end no step."""
    model, x = small(), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, config(("activation", "input"), ["numel"]), log_dir=tmp_path):
        for _ in range(2):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
            model.eval()
            model(x)
            model.train()
            with torch.inference_mode():
                model(x)
            optimizer.step()
            with torch.no_grad():
                model(x)
    found = values(tmp_path)
    assert found[0, "0", "activation", "numel"] == found[1, "0", "activation", "numel"] == 12
    assert {key[0] for key in found} == {0, 1}


def test_frozen_layers_without_gradients_are_counted(tmp_path):
    """A part that the model itself runs under no_grad belongs to the training step."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    model = Frozen()
    with watch(model, config(("activation",), ["numel"]), log_dir=tmp_path):
        train(model, [torch.ones(3, 2)])
    assert values(tmp_path) == {
        (0, "backbone", "activation", "numel"): 6,
        (0, "head", "activation", "numel"): 3,
    }


def test_gradient_accumulation(tmp_path):
    """Several backwards before an optimizer's step are one value."""
    model, pieces = small(), [torch.randn(n, 4) for n in (2, 3, 1)]
    outputs = [model[0](x) for x in pieces]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, config(("activation", "wgrad")), log_dir=tmp_path):
        for x in pieces:
            (model(x) ** 2).sum().backward()
        grad = model[0].weight.grad.clone()
        optimizer.step()
    found = values(tmp_path)
    assert_six(found, 0, "0", "activation", *outputs)
    assert_six(found, 0, "0", "wgrad", grad)


def test_two_optimizers(tmp_path):
    """Two optimizers that step one after the other end one step; each weight is logged before its own step."""
    model, x = small(), torch.randn(2, 4)
    first, second = torch.optim.SGD(model[:2].parameters(), 0.1), torch.optim.Adam(model[2:].parameters(), 0.1)
    with watch(model, config(("weight", "wgrad"), layers="[02]"), log_dir=tmp_path):
        expected = []
        for _ in range(2):
            model(x).sum().backward()
            expected.append([model[0].weight.detach().clone(), model[2].weight.detach().clone()])
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    found = values(tmp_path)
    assert {key[0] for key in found} == {0, 1}
    for i in range(2):
        assert_six(found, i, "0", "weight", expected[i][0])
        assert_six(found, i, "2", "weight", expected[i][1])


def test_somebody_elses_optimizer(tmp_path):
    """The steps of an optimizer of another model end no step here."""
    model, other = small(), small()
    with watch(model, config(("activation",), ["numel"]), log_dir=tmp_path):
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            train(other, [torch.ones(1, 4)])
    assert values(tmp_path)[0, "0", "activation", "numel"] == 18


def test_no_optimizer(tmp_path):
    """With auto_step=False the user ends steps; weights are logged as they are then."""
    model, x = small(), torch.randn(2, 4)
    with watch(model, config(("weight", "wgrad", "activation")), log_dir=tmp_path, auto_step=False) as watched:
        expected = []
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            expected.append((model[0].weight.detach().clone(), model[0].weight.grad.clone()))
            watched.step()
    found = values(tmp_path)
    for i, (weight, grad) in enumerate(expected):
        assert_six(found, i, "0", "weight", weight)
        assert_six(found, i, "0", "wgrad", grad)
    assert {key[0] for key in found} == {0, 1}


def test_step_is_for_those_who_ask(tmp_path):
    """With auto_step, step() is an error that says what to do."""
    with watch(small(), config(), log_dir=tmp_path) as watched, pytest.raises(RuntimeError, match="auto_step=False"):
        watched.step()


def test_lbfgs(tmp_path):
    """An optimizer with a closure ends one step; the gradients are those of its last call."""
    model, x, calls = small(), torch.randn(5, 4), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        calls.append(model[0].weight.grad.clone())
        return loss

    with watch(
        model,
        config(("activation", "wgrad", "weight"), [*SIX, "numel"]),
        log_dir=tmp_path,
    ):
        for i in range(2):
            before, count = model[0].weight.detach().clone(), len(calls)
            optimizer.step(closure)
            made = len(calls) - count
            last = calls[-1]
            if i == 1:
                check_weight, check_grad, check_calls = before, last, made
    found = values(tmp_path)
    assert {key[0] for key in found} == {0, 1}
    assert found[1, "0", "activation", "numel"] == 30 * check_calls
    assert_six(found, 1, "0", "wgrad", check_grad)
    assert_six(found, 1, "0", "weight", check_weight)


def test_no_gradients_at_the_step(tmp_path):
    """Where zero_grad came before step there is no wgrad, and no error."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, config(("wgrad", "weight"), ["numel"]), log_dir=tmp_path):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()
    assert {key[2] for key in values(tmp_path)} == {"weight"}


def test_parts_called_on_their_own(tmp_path):
    """Steps end too where the model itself is never called, only its parts."""
    model, x = Nested(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, config(("activation", "input"), ["numel"], layers="head"), log_dir=tmp_path):
        for _ in range(3):
            model.head(x).sum().backward()
            optimizer.step()
            model.eval()
            model.head(x)
            model.train()
    found = values(tmp_path)
    assert [found[i, "head", "activation", "numel"] for i in range(3)] == [4, 4, 4]


def test_the_session_of_initialize(tmp_path):
    """Without a configuration, watch logs to the session of initialize(), and calls of step() count once."""
    debug_api.initialize(config(("activation", "mine"), ["numel"], layers="0"), log_dir=tmp_path)
    model = small()
    watched = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        debug_api.log_tensor_stats("0", tensor=torch.ones(2), tensor_name="mine")
        debug_api.step()
    watched.remove()
    debug_api.log_tensor_stats("0", tensor=torch.ones(2), tensor_name="mine")
    debug_api.end_debug()
    found = values(tmp_path)
    assert sorted(key[0] for key in found if key[2] == "mine") == [0, 1, 2]
    assert sorted(key[0] for key in found if key[2] == "activation") == [0, 1]
    with pytest.raises(RuntimeError, match="not initialized"):
        watch(model)


def test_after_end_debug_a_watch_does_nothing(tmp_path):
    """A model still watched when the session ends trains on."""
    debug_api.initialize(config(ALL, ["numel"]), log_dir=tmp_path)
    model = small()
    watched = watch(model)
    train(model, [torch.ones(1, 4)])
    debug_api.end_debug()
    before = lines(tmp_path)
    train(model, [torch.ones(1, 4)] * 2)
    watched.remove()
    assert lines(tmp_path) == before


# Not in the way


def hooks_of(model):
    names = [name for name in vars(nn.Module()) if "hooks" in name]
    return (
        [{name: dict(getattr(module, name)) for name in names if getattr(module, name)} for module in model.modules()],
        dict(optimizers._global_optimizer_pre_hooks),
        dict(optimizers._global_optimizer_post_hooks),
        [bool(p._backward_hooks) for p in model.parameters()],
    )


def test_remove_leaves_no_hook(tmp_path):
    """After remove() the model and torch are as before."""
    model = small()
    before = hooks_of(model)
    watched = watch(model, config(ALL), log_dir=tmp_path)
    assert hooks_of(model) != before
    train(model, [torch.ones(1, 4)])
    watched.remove()
    watched.remove()
    assert hooks_of(model) == before


@pytest.mark.parametrize("pipe", [False, True])
def test_nothing_changes_bit_for_bit(pipe, tmp_path):
    """Outputs, gradients and weights are those of the unwatched model."""

    def build():
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 2)
        )
        return GPipe(model, [3, 2], chunks=2, checkpoint="always") if pipe else model

    results = []
    for watched in (False, True):
        model = build()
        handle = watch(model, config(ALL, on_nonfinite="warn"), log_dir=tmp_path) if watched else None
        torch.manual_seed(2)
        train(model, [torch.randn(6, 4) for _ in range(3)])
        results.append([model(torch.ones(4, 4)), *model.state_dict().values(), *(p.grad for p in model.parameters())])
        if handle:
            handle.remove()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_twice_with_different_configurations(tmp_path):
    """Two watches of one model log apart, and one can go before the other."""
    model = small()
    first = watch(model, config(("activation",), ["numel"], layers="0"), log_dir=tmp_path / "a")
    second = watch(model, config(("gradient",), ["numel"], layers="2"), log_dir=tmp_path / "b")
    optimizer = train(model, [torch.ones(1, 4)])
    first.remove()
    train(model, [torch.ones(1, 4)], optimizer)
    second.remove()
    assert list(values(tmp_path / "a")) == [(0, "0", "activation", "numel")]
    assert list(values(tmp_path / "b")) == [(i, "2", "gradient", "numel") for i in range(2)]


def test_nothing_selected(tmp_path, capsys):
    """A configuration that selects no layer is warned about."""
    with watch(small(), config(layers="none"), log_dir=tmp_path) as watched:
        train(small(), [torch.ones(1, 4)])
    assert watched.layers == {}
    assert "selects no layer of this Sequential" in capsys.readouterr().err


def test_two_sections_claim_one_layer(tmp_path):
    """That is an error when the watch begins; nothing stays attached or open."""
    model = small()
    before = hooks_of(model)
    chosen = config()
    chosen["t"] = config(layers="2")["s"]
    with pytest.raises(ConfigError, match="layer '2' is selected by the sections 's' and 't'"):
        watch(model, chosen, log_dir=tmp_path)
    assert hooks_of(model) == before
    train(model, [torch.ones(1, 4)])
    assert not lines(tmp_path)


def test_an_exception_in_training(tmp_path):
    """What was measured before an exception is logged, the hooks are gone, and the exception is the user's."""
    model = small()
    before = hooks_of(model)

    def fail():
        with watch(model, config(ALL, ["numel"]), log_dir=tmp_path):
            train(model, [torch.ones(1, 4)])
            model(torch.ones(1, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hooks_of(model) == before
    found = values(tmp_path)
    assert found[0, "0", "wgrad", "numel"] == 24
    assert found[1, "0", "activation", "numel"] == 6


def test_copies_of_a_watched_model(tmp_path):
    """A watched model can be copied, pickled and saved; the copies are not watched."""
    model = small()
    with watch(model, config(ALL, ["numel"]), log_dir=tmp_path):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        copies.append(torch.load(stream, weights_only=False))
        x = torch.randn(2, 4)
        for other in copies:
            assert torch.equal(other(x), model(x))
            train(other, [x])
        assert list(model.state_dict()) == list(small().state_dict())
        model.load_state_dict(small(3).state_dict())
    assert values(tmp_path)[0, "0", "activation", "numel"] == 12 * 3
    train(copies[0], [x])


def test_backward_after_remove(tmp_path):
    """A graph made under watch can be run backward after it."""
    model = small()
    debug_api.initialize(config(("gradient",), ["numel"]), log_dir=tmp_path)
    watched = watch(model)
    loss = model(torch.ones(1, 4)).sum()
    watched.remove()
    loss.backward()
    debug_api.end_debug()
    assert not lines(tmp_path)


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")  # of torch itself
def test_torch_func_and_tracing(tmp_path):
    """Under torch.func, torch.export and torch.jit.trace a watched model works as before."""
    model, x = small(), torch.randn(2, 4)
    expected = model(x)
    with watch(model, config(ALL, ["numel"]), log_dir=tmp_path):
        parameters = dict(model.named_parameters())
        grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
        assert set(grads) == set(parameters)
        assert torch.equal(torch.func.vmap(model)(x), torch.func.vmap(small())(x))
        assert torch.equal(torch.jit.trace(model, x)(x), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile, at any graph break
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_wrappers_leave_names_alone(wrap, tmp_path):
    """Layers of a wrapped model have the names they have without the wrapper."""
    torch.compiler.reset()
    model = wrap(small())
    x = torch.randn(3, 4)
    truth = reference(small(), x)
    with watch(model, config(ALL), log_dir=tmp_path):
        train(model, [x, x])
    found = values(tmp_path)
    check(found, 0, truth)
    assert {key[1] for key in found} == {"0", "1", "2", "3"}
    assert {key[0] for key in found} == {0, 1}
    torch.compiler.reset()


def test_names_of_inner_wrappers(tmp_path):
    """What wrappers put into names is left out."""

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._fsdp_wrapped_module = inner

        def forward(self, x):
            return self._fsdp_wrapped_module(x)

    model = nn.Sequential(Wrapped(nn.Linear(2, 2)), nn.Sequential(Wrapped(nn.Linear(2, 2))))
    with watch(model, config(("activation",), ["numel"]), log_dir=tmp_path) as watched:
        train(model, [torch.ones(1, 2)])
    assert set(watched.layers) == {"0", "1", "1.0"}


def test_ddp(tmp_path):
    """Over the ranks of DistributedDataParallel the statistics are those of the whole batch."""
    run_ranks(
        2,
        """
        from pipesight.stats import watch
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        x = torch.arange(40.0).view(10, 4).sin()
        mine = x[:7] if rank == 0 else x[7:]
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        tensors = ("activation", "input", "wgrad", "weight")
        with watch(model, config(tensors, stats=[*SIX, "numel"]), log_dir=folder):
            for i in range(3):
                optimizer.zero_grad()
                (model(mine) ** 2).sum().backward()
                optimizer.step()
        dist.destroy_process_group()
        """,
        tmp_path,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.arange(40.0).view(10, 4).sin()
    truth = reference(model, x)
    for rank in range(2):
        found = values(tmp_path, rank)
        assert {key[0] for key in found} == {0, 1, 2}
        for i in range(3):
            check(found, i, {k: v for k, v in truth.items() if k[1] in ("activation", "input")})
            assert found[i, "0", "wgrad", "mean"] == pytest.approx(truth["0", "wgrad"][0].mean().item() / 2, rel=1e-4)
            assert found[i, "0", "weight", "numel"] == 24  # the copies of other ranks do not count
            assert found[i, "0", "weight", "l2_norm"] == pytest.approx(model[0].weight.norm().item(), rel=1e-6)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of this PyTorch needs a GPU")
@pytest.mark.parametrize("order", ["before", "after"])
def test_fsdp(order, tmp_path):
    """Sharded parameters have the statistics of the whole ones, watched before or after they are sharded."""
    run_ranks(
        2,
        f"""
        from pipesight.stats import watch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        mesh = init_device_mesh("cpu", (2,))
        chosen = config(("activation", "weight", "wgrad"), [*SIX, "numel"])
        if "{order}" == "before":
            watched = watch(model, chosen, log_dir=folder)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        if "{order}" == "after":
            watched = watch(model, chosen, log_dir=folder)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x = torch.arange(40.0).view(10, 4).sin()
        for i in range(2):
            optimizer.zero_grad()
            (model(x[rank * 5:rank * 5 + 5]) ** 2).sum().backward()
            optimizer.step()
        watched.remove()
        dist.barrier()
        os._exit(0)  # FSDP keeps process groups, and torch may abort at exit over them
        """,
        tmp_path,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    truth = reference(model, torch.arange(40.0).view(10, 4).sin())
    for rank in range(2):
        found = values(tmp_path, rank)
        assert {key[0] for key in found} == {0, 1}
        for i in range(2):
            check(found, i, {k: v for k, v in truth.items() if k[1] in ("activation", "weight")})
            assert found[i, "0", "wgrad", "numel"] == 24
            assert found[i, "0", "wgrad", "mean"] == pytest.approx(truth["0", "wgrad"][0].mean().item() / 2, rel=1e-4)
            assert found[i, "0", "weight", "numel"] == 24  # the copies of other ranks do not count
            assert found[i, "0", "weight", "l2_norm"] == pytest.approx(model[0].weight.norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "tensors", "message"),
    [
        (".*", ["activation", "wgrads"], "no tensor 'wgrads'; did you mean 'wgrad'?"),
        (".*", ["activations"], "logs no tensor of this Sequential"),
        ("fc.*", ["activation"], "selects no layer of this Sequential; its layers have names such as ['0']"),
    ],
)
def test_what_a_model_does_not_have(layers, tensors, message, tmp_path, capsys):
    """Names that the configuration has and the model has not are told when the watch begins."""
    watch(nn.Sequential(nn.ReLU()), config(tensors, layers=layers), log_dir=tmp_path).remove()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("exact", [["0", "fc2"], ["fc2"]])
def test_exact_names_that_a_model_does_not_have(exact, tmp_path, capsys):
    """Each of exact_layer_names that is no layer is told when the watch begins, with the nearest that is one."""
    model = nn.Sequential(OrderedDict([("0", nn.ReLU()), ("fc1", nn.Linear(2, 2))]))
    chosen = config()
    chosen["s"]["layers"] = {"exact_layer_names": exact}
    watch(model, chosen, log_dir=tmp_path).remove()
    error = capsys.readouterr().err
    assert error.count("no layer is called") == 1
    assert "no layer is called 'fc2'; did you mean 'fc1'?" in error


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: watch("stats.yaml", model),
            "watch() takes the model first, then the configuration (model: 'stats.yaml', config: Linear); "
            "call watch(model, 'stats.yaml')",
        ),
        (
            lambda model: watch("stats.yaml"),
            "model of watch() must be an nn.Module (model: 'stats.yaml'); call watch(model, 'stats.yaml')",
        ),
        (lambda model: watch(model.forward, {}), "call watch(model, config)"),
        (lambda model: watch(model, model), "a configuration must be a path or a dict (found: Linear)"),
        (lambda model: watch(model, {}, logdir="x"), "watch() takes no argument 'logdir'; did you mean 'log_dir'?"),
        (lambda model: watch(model, config_file="x"), "takes no argument 'config_file'; did you mean 'config'?"),
        (
            lambda model: watch(model, {}, autostep=False, tbwriter=None),
            "no argument 'autostep'; did you mean 'auto_step'?, nor 'tbwriter'; did you mean 'tb_writer'?",
        ),
    ],
)
def test_wrong_arguments(call, message):
    """Arguments in the wrong place or with the wrong name are a TypeError that says the right ones."""
    with pytest.raises(TypeError, match=re.escape(message)):
        call(nn.Linear(2, 2))


def test_a_model_that_is_not_called(tmp_path, capsys):
    """A watch of a model that nobody called says so at its end."""
    with watch(nn.Sequential(nn.ReLU()), config(), log_dir=tmp_path):
        pass
    assert "nothing was logged by watch(): this Sequential was not called" in capsys.readouterr().err


@pytest.mark.parametrize("auto", [True, False])
def test_a_model_in_eval_mode_alone(auto, tmp_path, capsys):
    """A watch that leaves out all that was called says so at its end, and how not to."""
    model = nn.Sequential(nn.ReLU()).eval()
    with watch(model, config(), log_dir=tmp_path, auto_step=auto):
        model(torch.ones(2))
    told = "was called in eval mode or under torch.no_grad() only; pass auto_step=False" in capsys.readouterr().err
    assert told == auto
    assert bool(lines(tmp_path)) != auto


def test_steps_that_never_come(tmp_path, capsys):
    """A configuration of other steps than there were is told at the end."""
    model = nn.Sequential(nn.Linear(2, 2))
    with watch(model, config(start_step=100), log_dir=tmp_path):
        train(model, [torch.ones(2, 2)] * 3)
    assert "the configuration includes none of its steps, 0 to 2" in capsys.readouterr().err


def test_the_end_of_the_session_tells_too(tmp_path, capsys):
    """A session that ends before its watch says what the watch would, once."""
    debug_api.initialize(config(), log_dir=tmp_path)
    watched = watch(nn.Sequential(nn.ReLU()))
    debug_api.end_debug()
    watched.remove()
    assert capsys.readouterr().err.count("was not called") == 1


def test_nothing_is_told_of_a_watch_that_logged(tmp_path, capsys):
    """A watch that logged anything ends without a word, and so does one that an exception ends."""
    model = nn.Sequential(nn.Linear(2, 2))
    with watch(model, config(("weight",)), log_dir=tmp_path / "a"):
        train(model, [torch.ones(2, 2)])
    with pytest.raises(KeyError), watch(model, config(), log_dir=tmp_path / "b"):
        raise KeyError
    assert capsys.readouterr().err == ""


def test_calls_of_a_step(tmp_path):
    """A watched tensor of a pipeline costs a few Python calls, whatever the machine does besides: they are counted."""
    calls, layers, chunks, counting = [], 8, 4, False

    def count(frame, event, _):
        if counting and event == "call" and "/pipesight/stats/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(count)  # the workers of the pipeline, which begin now
    sys.setprofile(count)
    try:
        pipe = GPipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))), [4, 4], chunks=chunks)
        batches, rules = [torch.randn(64, 64)] * 2, config(["activation", "gradient"], layers=r"^\d+$")
        with watch(pipe, rules, log_dir=tmp_path):
            optimizer = train(pipe, batches)
            counting = True
            train(pipe, batches, optimizer)
            counting = False
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    assert layers * chunks * 2 * 2 * 10 < len(calls) < layers * chunks * 2 * 2 * 25, Counter(calls).most_common(9)
