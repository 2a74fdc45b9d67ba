"""`Pipeline` runs a model as it is: control flow, keywords, dicts, tied weights, tensors that jump over partitions."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline, context


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(drop), nn.Linear(width, width))

    def forward(self, x: Tensor, memory: Tensor, *, scale: float = 1.0) -> Tensor:
        y: Tensor = x + scale * self.mlp(self.norm(x)) * memory.mean(-1, keepdim=True)
        return y


class Model(nn.Module):
    """Ties its head to its embedding; every block uses a tensor of the first partition; the loss is inside."""

    def __init__(self, blocks: int = 4, width: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.gate = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Any]:
        x = memory = self.embed(ids)
        states = []
        for k, block in enumerate(self.blocks):
            x = block(x, memory, scale=0.5 if k % 2 else 1.0)
            states.append(x)
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        x = x * self.gate + memory
        logits = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "states": tuple(states)}


CUTS = ["blocks.1", "blocks.2", "head"]


def make(**settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings)


def batch(samples: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (samples, 5), generator=generator)
    return {"ids": ids, "mask": (torch.rand(samples, 5, generator=generator) > 0.3).float(), "labels": ids.roll(1, 1)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    found, truth = gradients(one), gradients(other)
    assert found.keys() == truth.keys() != set()
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("cuts", [[], CUTS[:1], CUTS])
@pytest.mark.parametrize("chunks", [1, 3])
def test_output_and_gradients_are_the_models(cuts: list[str], chunks: int, checkpoint: Any) -> None:
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), cuts, chunks=chunks, checkpoint=checkpoint)
    for _ in range(2):  # the second time, units are not looked into
        truth, found = plain(**batch()), pipe(**batch())
        assert type(found) is dict
        torch.testing.assert_close(found["logits"], truth["logits"])
        torch.testing.assert_close(found["states"], truth["states"])
        torch.testing.assert_close(found["loss"], truth["loss"])
        truth["loss"].backward()
        found["loss"].backward()
        assert_same_gradients(pipe, plain)


def test_gradients_of_any_output_arrive() -> None:
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=2)
    for model in (plain, pipe):
        found = model(**batch())
        (found["states"][0].sum() + found["states"][3].square().sum()).backward()
    assert_same_gradients(pipe, plain)


def test_gradient_of_an_input() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(3))

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            memory = x * table
            for block in self.blocks:
                x = block(x, memory)
            return x + table

    plain = Embedded()
    pipe = Pipeline(copy.deepcopy(plain), ["blocks.1", "blocks.2"], chunks=2)
    results = []
    for model in (plain, pipe):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(4, 3, 8, generator=generator, requires_grad=True)
        table = torch.randn(1, 3, 8, generator=generator, requires_grad=True)
        model(x, table).square().sum().backward()
        results.append((x.grad, table.grad))
    torch.testing.assert_close(results[0], results[1])


def test_a_tensor_that_a_later_partition_changes_in_place() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x) * 2
            z = self.layers[1](y.clone())
            y.mul_(z)  # a statement: the name goes on to mean the same tensor
            return self.layers[2](z) + y  # type: ignore[no-any-return]

    plain = Changing()
    pipe = Pipeline(copy.deepcopy(plain), ["layers.1", "layers.2"], chunks=2)
    x = torch.randn(4, 4)
    torch.testing.assert_close(pipe(x), plain(x))
    plain(x).sum().backward()
    pipe(x).sum().backward()
    assert_same_gradients(pipe, plain)


class Filling(nn.Module):
    """Each block writes a part of what the model returns, which the first one has made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        filled = torch.empty(x.size(0), 3, 4)
        for k, layer in enumerate(self.layers):
            x = layer(x).tanh()
            filled[:, k] = x
        return filled


@pytest.mark.parametrize("schedule", [None, "zero-bubble"])
def test_a_buffer_that_every_partition_writes_into(schedule: str | None) -> None:
    plain = Filling()
    plain(x := torch.randn(4, 4)).square().sum().backward()
    options: Any = {"loss": lambda output: output.square().sum(), "loss_weight": "sum"}
    pipe = Pipeline(Filling(), ["layers.1", "layers.2"], chunks=2, schedule=schedule or "gpipe", **options)
    if schedule is None:
        pipe(x).square().sum().backward()
    else:
        pipe.step(x)
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("uses_base", [False, True])
def test_a_view_that_a_later_partition_changes_is_refused(uses_base: bool) -> None:
    """The plain model changes its base, too; the gradient of that would be lost."""

    class Changing(Filling):
        def forward(self, x: Tensor) -> Tensor:
            base = self.layers[0](x) * 2
            view = base[:, :2]
            y = self.layers[1](base if uses_base else x)
            view.add_(y[:, :2])
            return self.layers[2](y) + base  # type: ignore[no-any-return]

    pipe = Pipeline(Changing(), ["layers.1", "layers.2"], chunks=2)
    with pytest.raises(RuntimeError, match=r"partition 1 changed a tensor of shape \(2, 2\) in place that shares"):
        pipe(torch.randn(4, 4))


def test_a_cut_that_is_called_without_gradients() -> None:
    """What stands there for a tensor of an earlier partition is used with gradients later."""

    class Gated(Filling):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            with torch.no_grad():
                gate = self.layers[1](y)
            return self.layers[2](y) * gate  # type: ignore[no-any-return]

    plain = Gated()
    pipe = Pipeline(copy.deepcopy(plain), ["layers.1", "layers.2"], chunks=2)
    for model in (plain, pipe):
        model(torch.ones(4, 4)).square().sum().backward()
    assert_same_gradients(pipe, plain)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def test_an_autograd_function_between_units() -> None:
    """It comes to no function mode, and is given a tensor of an earlier partition."""

    class Adversarial(Filling):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            return self.layers[2](self.layers[1](first).tanh() + Reversal.apply(first))  # type: ignore[no-any-return]

    plain = Adversarial()
    pipe = Pipeline(copy.deepcopy(plain), ["layers.1", "layers.2"], chunks=2)
    for model in (plain, pipe):
        model(torch.ones(4, 4)).square().sum().backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize(("unused", "checkpoint"), [(None, "never"), (True, "always")])
def test_gradients_in_a_forward(unused: bool | None, checkpoint: Any) -> None:
    """Those of what one partition computes are right, others are refused: only a part of the graph is there."""

    class Forces(Filling):
        def forward(self, x: Tensor, *, before: bool) -> Tensor:
            start = self.layers[0](x).detach().requires_grad_() if before else x
            x = self.layers[1](self.layers[0](start)).tanh()
            start = start if before else x.detach().requires_grad_()
            energy = self.layers[3]((x if before else start) * start).sum()
            (force,) = torch.autograd.grad(energy, start, create_graph=True, allow_unused=unused)
            return force + self.layers[2](x)  # type: ignore[no-any-return]

    plain = Forces()
    plain.layers.append(nn.Sequential(plain.layers[2], nn.Tanh()))  # a unit that is checkpointed
    pipe = Pipeline(copy.deepcopy(plain), ["layers.1"], chunks=2, checkpoint=checkpoint)
    for model in (plain, pipe):
        model(torch.ones(4, 4), before=False).square().sum().backward()
    assert_same_gradients(pipe, plain)
    with pytest.raises(RuntimeError, match=r"the model differentiates in partition 1, by torch\.autograd"):
        pipe(torch.ones(4, 4), before=True)


def test_dropout_repeats_itself_when_recomputed_and_with_a_seed() -> None:
    found = []
    for checkpoint in ("never", "always", "always"):
        pipe = Pipeline(make(drop=0.5), CUTS, chunks=3, checkpoint=checkpoint)
        torch.manual_seed(7)
        pipe(**batch())["loss"].backward()
        found.append(gradients(pipe))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=0)


def test_batch_norm_is_updated_once_a_micro_batch() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Conv1d(2, 2, 3), nn.BatchNorm1d(2), nn.ReLU(True)) for _ in range(3)))

    plain, pipe = net(), Pipeline(net(), ["1", "2"], chunks=2, checkpoint="always")
    x = torch.randn(4, 2, 16)
    for part in x.chunk(2):
        plain(part).sum().backward()
    pipe(x).sum().backward()
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
    assert_same_gradients(pipe, plain)


def test_names_are_the_models() -> None:
    model = make()
    names, state = [name for name, _ in model.named_parameters()], list(model.state_dict())
    pipe = Pipeline(model, CUTS, chunks=2)
    assert pipe.module is model
    assert [name for name, _ in pipe.named_parameters()] == names
    assert list(pipe.state_dict()) == state
    assert inspect.signature(pipe.forward) == inspect.signature(make().forward)
    pipe.load_state_dict(make().state_dict())
    assert pipe.eval().module.training is False
    assert pipe.to(torch.float64).module.head.weight.dtype == torch.float64


def test_copies_are_pipelines_of_their_own() -> None:
    pipe = Pipeline(make(), CUTS, chunks=3)
    pipe(**batch())["loss"].backward()
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert twin.module is not pipe.module
        assert twin.head.weight is twin.embed.weight
        twin.zero_grad()
        twin(**batch())["loss"].backward()
        assert_same_gradients(twin, pipe)


def test_partitions_say_which_units_they_ran() -> None:
    pipe = Pipeline(make(), CUTS, chunks=2)
    pipe(**batch())
    units = [[name for name, _ in partition.named_children()] for partition in pipe.partitions]
    assert units == [["embed", "blocks.0"], ["blocks.1"], ["blocks.2", "blocks.3"], ["head"]]


class Spy(context.Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def task_started(self, where: context.Where) -> None:
        self.seen.append((where.phase, where.partition, where.microbatch))

    def layer_started(self, where: context.Where) -> None:
        self.seen.append((where.phase, where.partition, where.microbatch, where.layer))


def test_observers_see_tasks_and_units() -> None:
    pipe = Pipeline(make(), CUTS[:1], chunks=2, checkpoint="always")
    spy = Spy()
    context.attach(spy)
    try:
        pipe(**batch())["loss"].backward()
    finally:
        context.detach(spy)
    tasks = [seen for seen in spy.seen if len(seen) == 3]
    phases = ("forward", "recompute", "backward")
    assert sorted(tasks) == sorted((phase, j, i) for phase in phases for j in (0, 1) for i in (0, 1))
    layers = [("forward", 0, 0, "embed"), ("forward", 0, 0, "blocks.0")]
    layers += [("forward", 1, 0, f"blocks.{k}") for k in (1, 2, 3)] + [("forward", 1, 0, "head")]
    layers += [("recompute", 1, 1, f"blocks.{k}") for k in (1, 2, 3)] + [("backward", 1, 1, "head")]
    assert {*layers} <= {*spy.seen}


def test_errors_of_the_model_say_where() -> None:
    class Failing(Block):
        def forward(self, x: Tensor, memory: Tensor, *, scale: float = 1.0) -> Tensor:
            raise ZeroDivisionError("no")

    model = make()
    model.blocks[2] = Failing(8)
    pipe = Pipeline(model, CUTS, chunks=3)
    with pytest.raises(ZeroDivisionError) as caught:
        pipe(**batch())
    assert caught.value.__notes__ == ["in partition 2, layer 'blocks.2', micro-batch 0, forward"]
    model.blocks[2] = model.blocks[1]


def test_an_empty_batch_is_named() -> None:
    class Flat(Filling):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(len(x), -1)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="cannot reshape") as error:
        Pipeline(Flat(), ["layers.1"], chunks=2)(torch.ones(0, 4))
    assert "the batch has no samples, as 'x' has none" in error.value.__notes__


def test_a_cut_that_is_called_twice_or_too_late_is_refused() -> None:
    class Twice(Model):
        def forward(self, ids: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
            x = self.embed(ids)
            return self.blocks[1](self.blocks[1](x, x), x)

    with pytest.raises(RuntimeError, match=r"'blocks\.1', which begins partition 1, .* called more than once"):
        Pipeline(Twice(), ["blocks.1"], chunks=2)(batch()["ids"])
    with pytest.raises(RuntimeError, match="list the cuts in the order in which the model calls them"):
        Pipeline(make(), ["blocks.2", "blocks.1"], chunks=2)(**batch())


def test_state_kept_between_calls_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.one(x)
            if self.kept is not None:
                y = self.two(y + self.kept)
            self.kept = y
            return self.two(y)  # type: ignore[no-any-return]

    pipe = Pipeline(Recurrent(), ["two"], chunks=1)
    pipe(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError):
        pipe(torch.randn(2, 4)).sum().backward()


def test_a_tensor_kept_in_a_dict_is_told() -> None:
    """The next micro-batch, or the next call, finds one whose graph is that of another."""

    class Caching(Filling):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            weight = self.kept.setdefault("weight", self.layers[0].weight.exp())
            return self.layers[1](x @ weight)  # type: ignore[no-any-return]

    plain = Caching()
    pipe = Pipeline(copy.deepcopy(plain), ["layers.1"])
    for model in (plain, pipe):
        model(torch.ones(2, 4)).sum().backward()
    assert_same_gradients(pipe, plain)
    for chunks in (1, 2):
        pipe = Pipeline(Caching(), ["layers.1"], chunks=chunks)
        with pytest.raises(RuntimeError, match=r"detach\(\) (of it there|what it keeps)"):
            [pipe(torch.ones(2, 4)).sum().backward() for _ in range(2)]


def test_a_unit_that_is_registered_before_the_cut_and_called_after_it() -> None:
    """Where it belongs is found by several micro-batches at once; those after them count its gradient once."""

    class Zipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.second = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for one, two in zip(self.first, self.second, strict=True):
                x = two(one(x).tanh())
                time.sleep(0.005)  # so that micro-batches are under way at once
            return x

    torch.manual_seed(0)
    plain = Zipped()
    pipe = Pipeline(copy.deepcopy(plain), ["first.1", "first.2"], chunks=12)
    x = torch.randn(12, 4)
    pipe(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_gradients(pipe, plain)


def test_without_gradients_and_in_eval() -> None:
    plain = make(drop=0.5).eval()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=4)
    with torch.no_grad():
        found = pipe(**batch(7))
    torch.testing.assert_close(found["logits"], plain(**batch(7))["logits"])
    assert not found["logits"].requires_grad


def test_autocast_casts_tied_weights_in_each_partition() -> None:
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=3)
    with torch.autocast("cpu", torch.bfloat16):
        for part in range(3):
            rows = {name: value[2 * part : 2 * part + 2] for name, value in batch().items()}
            (plain(**rows)["loss"] / 3).backward()
        loss = pipe(**batch())["loss"]
    loss.backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(pipe)[name], gradient, rtol=2e-2, atol=2e-3, msg=name)


def test_frozen_parameters_get_no_gradient() -> None:
    plain = make()
    for module in (plain.embed, plain.blocks[0]):
        module.requires_grad_(False)
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=2, checkpoint="always")
    for model in (plain, pipe):
        model(**batch())["loss"].backward()
    assert_same_gradients(pipe, plain)
    assert "embed.weight" not in gradients(pipe)


def test_the_first_call_can_be_verified() -> None:
    for drop in (0.0, 0.5):
        pipe = Pipeline(make(drop=drop), CUTS, chunks=3, verify=True)
        state = copy.deepcopy(pipe.state_dict())
        pipe(**batch())["loss"].backward()
        torch.testing.assert_close(pipe.state_dict(), state, rtol=0, atol=0)


def test_a_difference_is_found_and_named() -> None:
    class Forgetful(Model):
        """Computes something else when another thread calls it, as a model with a global cache may."""

        def forward(self, ids: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
            found = super().forward(ids, **kwargs)
            if threading.current_thread() is not threading.main_thread():
                found["logits"] = found["logits"] + 1e-2
            return found

    torch.manual_seed(0)
    pipe = Pipeline(Forgetful(), CUTS, chunks=2, verify=True)
    with pytest.raises(RuntimeError, match=r"'output\.logits' differs from the plain model's by up to 0\.01"):
        pipe(**batch())


def test_a_cut_that_is_not_called_leaves_its_partition_idle() -> None:
    class Skipping(Model):
        def forward(self, ids: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
            x = self.embed(ids)
            return self.blocks[3](self.blocks[0](x, x), x)

    torch.manual_seed(0)
    plain = Skipping()
    pipe = Pipeline(copy.deepcopy(plain), ["blocks.1", "blocks.3"], chunks=2)
    with pytest.warns(RuntimeWarning, match=r"did not call 'blocks\.1' in this mini-batch"):
        found = pipe(batch()["ids"])
    found.square().sum().backward()
    plain(batch()["ids"]).square().sum().backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_step_leaves_nothing_to_the_garbage_collector(checkpoint: Any) -> None:
    """What it did would hold activations until the collector comes."""
    pipe = Pipeline(make(), CUTS, chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        pipe(**batch())["loss"].backward()
    gc.collect()
    gc.disable()
    try:
        pipe(**batch())["loss"].backward()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [type(value) for value in gc.garbage if isinstance(value, Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
