"""What a model writes into attributes of its modules is read by the micro-batch that wrote it, and by no other."""

from __future__ import annotations

import copy
import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipesight import GPipe, Pipeline


class Block(nn.Module):
    """Uses what the model has written, and writes what the model uses; other micro-batches overtake meanwhile."""

    def __init__(self, model: list[nn.Module]) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)
        self.model = model
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        self.aux = self.gate(x).square().mean(1)
        model: Any = self.model[0]
        y: Tensor = self.layer(x).tanh() * model.mask + model.first
        return y


class Model(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block([self]) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.mask, self.first, self.states = (x > 0).float(), x * self.blocks[0].layer.bias, [x]
        for block in self.blocks:
            self.states.append(block(self.states[-1]))
        return torch.stack(self.states, 1), sum(block.aux for block in self.blocks)  # type: ignore[return-value]


class Context:
    """A plain object that the model and its blocks share."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.seen: list[tuple[str, Tensor]] = []

    def see(self, block: nn.Module, args: Any, y: Tensor) -> None:
        self.first = y


class Filling(Model):
    """Fills what was there before: a list, a dict with a list in it, an object, and what a hook of a block sees."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        self.found: dict[str, Any] = {"masks": []}
        self.context = self.blocks[0].context = self.blocks[2].context = Context()  # type: ignore[assignment]
        found, self.seen = self.found, Context()
        self.blocks[1].register_forward_hook(lambda block, args, y: found.update(hooked=y))
        self.blocks[2].register_forward_hook(self.seen.see)

    mask = property(lambda self: self.found["masks"][0])
    first = property(lambda self: self.context.first)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.found["masks"].clear()
        self.found["masks"].append((x > 0).float())
        self.context.first = x * self.blocks[0].layer.bias
        self.context.seen = []
        self.states[:] = [x]
        for block in self.blocks:
            self.states.append(block(self.states[-1]))
            if hasattr(block, "context"):
                block.context.seen.append(("aux", block.aux))
        hooked = self.found["hooked"] - self.states[2] + self.seen.first - self.states[3]
        aux = sum(tensor for _, tensor in self.context.seen) + self.blocks[1].aux
        return torch.stack(self.states, 1), aux + hooked.sum(1)


CUTS = ["blocks.1", "blocks.2"]


def objective(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().sum() + output[1].sum()


@pytest.mark.parametrize("schedule", [None, "1f1b", "zero-bubble"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [Model, Filling])
def test_each_micro_batch_reads_its_own(kind: type[Model], checkpoint: Any, schedule: str | None) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain = kind()
    expected = plain(x)
    objective(expected).backward()
    options: Any = {"checkpoint": checkpoint, "loss": objective, "loss_weight": "sum"}
    pipe = Pipeline(kind(), CUTS, chunks=3, schedule=schedule or "gpipe", **options)
    for call in (1, 2):
        pipe.zero_grad()
        if schedule is None:
            output = pipe(x)
            torch.testing.assert_close(output, expected)
            objective(output).backward()
        else:
            torch.testing.assert_close(pipe.step(x), objective(expected).detach())
        for (name, truth), parameter in zip(plain.named_parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, truth.grad, msg=name)
        assert pipe.calls == 3 * call  # what a micro-batch did not write itself goes on


def test_copies_and_pickles_are_of_the_models_class() -> None:
    pipe = Pipeline(Model(), CUTS, chunks=2)
    with torch.no_grad():
        output = pipe(x := torch.randn(4, 4))
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert {type(module) for module in other.module.modules()} == {Model, Block, nn.ModuleList, nn.Linear}
        with torch.no_grad():
            torch.testing.assert_close(other(x), output)


def test_a_tensor_that_is_left_there_cannot_be_differentiated() -> None:
    """The loss would lack what other micro-batches add to it."""
    pipe = Pipeline(Model(), CUTS, chunks=2)
    output = pipe(torch.randn(4, 4))
    assert pipe.blocks[1].aux.shape == (2,)
    with pytest.raises(RuntimeError, match=r"Block\.aux is a tensor with a graph that one micro-batch has left there"):
        (objective(output) + pipe.blocks[1].aux.sum()).backward()


class Keeping(Model):
    """Keeps something from one call for the next: reads it in the first partition, writes it in the last."""

    state: Any = None
    memory: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.kept: Any = {"dict": {}, "list": [], "ring": deque([torch.zeros(4)], 1), "object": Context()}.get(kind)
        self.register_buffer("buffer", torch.zeros(4))
        self.settings = {"scale": 0}
        self.array = np.zeros(4, dtype=np.float32)
        self.keep = _keeper()

    def forward(self, x: Tensor) -> Any:
        read, write = WAYS[self.kind]
        before = _far(self) if self.kind == "global" else read(self)
        states, aux = super().forward(x if before is None else x + before)
        write(self, states[:, -1].detach().mean(0))
        return states, aux


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Any]]] = {
    "attribute": (lambda m: m.state, lambda m, new: setattr(m, "state", new)),
    "number": (lambda m: m.state, lambda m, new: setattr(m, "state", (m.state or 0) + 1)),
    "new list": (lambda m: m.state and m.state[0], lambda m, new: setattr(m, "state", [new])),
    "dict": (lambda m: m.kept.get("state"), lambda m, new: m.kept.update(state=new)),
    "list": (lambda m: m.kept[-1] if m.kept else None, lambda m, new: m.kept.append(new)),
    "ring": (lambda m: m.kept[0], lambda m, new: m.kept.append(new)),
    "object": (lambda m: m.kept.first, lambda m, new: setattr(m.kept, "first", new)),
    "numbers": (lambda m: m.settings["scale"], lambda m, new: m.settings.update(scale=m.settings["scale"] + 1)),
    "buffer": (lambda m: m.buffer, lambda m, new: m.buffer.copy_(new)),
    "new buffer": (lambda m: m.buffer, lambda m, new: setattr(m, "buffer", new)),
    "class": (lambda m: m.memory.get("state"), lambda m, new: m.memory.update(state=new)),
    "global": (lambda m: None, lambda m, new: GLOBAL.update(state=new)),
    "data": (lambda m: m.buffer, lambda m, new: m.buffer.data.copy_(new)),
    "new data": (lambda m: m.buffer, lambda m, new: setattr(m.buffer, "data", new)),
    "array": (lambda m: torch.from_numpy(m.array.copy()), lambda m, new: np.copyto(m.array, new.numpy())),
    "closure": (lambda m: m.keep(), lambda m, new: m.keep(new)),
}
GLOBAL: dict[str, Tensor] = {}


def _far(_: nn.Module) -> Tensor | None:
    return GLOBAL.get("state")


def _keeper() -> Callable[..., Any]:
    kept: list[Tensor] = []

    def keep(new: Tensor | None = None) -> Tensor | None:
        if new is not None:
            kept[:] = [new]
        return kept[0] if kept else None

    return keep


@pytest.mark.parametrize("kind", WAYS)
def test_a_state_for_the_next_call_is_refused(kind: str) -> None:
    """The next micro-batch reads it before it is written, wherever it is. One after the other, they train as ever."""
    batches = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1))
    pipe = Pipeline(Keeping(kind), CUTS, chunks=2)
    with pytest.raises(RuntimeError, match=r"one call of the model for the next|the next call of|another (one|micro)"):
        [pipe(x) for x in batches]
    Keeping.memory.clear()
    GLOBAL.clear()
    expected = [objective(plain(x)).item() for plain in [Keeping(kind)] for x in batches]
    Keeping.memory.clear()
    GLOBAL.clear()
    pipe = Pipeline(Keeping(kind), CUTS)
    for x, truth in zip(batches, expected, strict=True):
        assert objective(pipe(x)).item() == pytest.approx(truth, rel=1e-5)
    Keeping.memory.clear()
    GLOBAL.clear()


@pytest.mark.parametrize("kind", ["list", "buffer"])
def test_a_state_that_begins_later(kind: str) -> None:
    """It is noticed in the mini-batch in which it begins, and refused in the next one."""

    class Late(Keeping):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if late else Model.forward(self, x)

    late, x, pipe = False, torch.randn(4, 4), Pipeline(Late(kind), CUTS, chunks=2)
    for _ in range(3):
        pipe(x)
    late = True
    with pytest.warns(RuntimeWarning, match=rf"changed Late.{'kept' if kind == 'list' else 'buffer'} for the first"):
        pipe(x)
    with pytest.raises(RuntimeError, match=r"one call of the model for the next|another micro"):
        [pipe(x) for _ in range(2)]


def test_what_micro_batches_append_is_all_there_afterwards() -> None:
    class Logging(Model):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []
            self.sums: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Any:
            states, aux = super().forward(x)
            self.sizes.append(len(x))
            self.sums[len(self.sums)] = states.sum()
            return states, aux

    pipe = Pipeline(Logging(), CUTS, chunks=2)
    output = pipe(torch.randn(3, 4))
    pipe(torch.randn(5, 4))
    assert pipe.sizes == [2, 1, 3, 2]
    with pytest.raises(RuntimeError, match="a micro-batch has left in a list, dict or object of a module"):
        (objective(output) + pipe.sums[0]).backward()


def test_modules_made_in_a_call_are_left_alone() -> None:
    class Criterion(Model):
        def forward(self, x: Tensor) -> Any:
            criterion = nn.CrossEntropyLoss()
            criterion.note = x  # type: ignore[assignment]
            return type(criterion) is nn.CrossEntropyLoss, criterion(super().forward(x)[0][:, -1], x)

    assert Pipeline(Criterion(), CUTS, chunks=2)(torch.rand(4, 4))[0]


class Quantised(nn.Module):
    """Moves its codebook towards what it is called with, each time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=kind == "replaced")

    def forward(self, x: Tensor) -> Tensor:
        x, codes = self.layer(x), self.codes.detach()
        near = nn.functional.one_hot(torch.cdist(x.detach(), codes).argmin(1), 5).to(x)
        lost = (near @ codes - x).square()
        new = codes * 0.8 + near.T @ x.detach() * 0.2
        if self.kind == "replaced":
            self.codes = nn.Parameter(new)
        elif self.kind == "data":
            self.codes.data.copy_(new)
        else:
            with torch.no_grad():
                self.codes.copy_(new)
        return x + lost


@pytest.mark.parametrize("engine", ["call", "step", "sequential"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("kind", ["in place", "data", "replaced"])
def test_a_codebook_that_a_block_moves(kind: str, checkpoint: Any, engine: str) -> None:
    """It moves once in each micro-batch, and those that are recomputed see the one that they saw before."""
    if (engine, kind, checkpoint) == ("sequential", "replaced", "except_last"):
        pytest.skip("a GPipe refuses to recompute a layer whose parameters were replaced")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Quantised(kind), nn.Tanh()), nn.Linear(4, 4)).double()
    model, x = copy.deepcopy(plain), torch.randn(3, 6, 4, dtype=torch.float64)
    options: Any = {"chunks": 3, "checkpoint": checkpoint}
    if engine == "sequential":
        pipe: Any = GPipe(model, [1, 2], **options)
    else:
        pipe = Pipeline(model, ["2"], loss_fn=lambda y, _: y.square().sum(), loss_weight="sum", **options)
    for batch in x:
        for part in batch.chunk(3):
            plain(part).square().sum().backward()
        if engine == "step":
            pipe.step(batch, batch)
        else:
            pipe(batch).square().sum().backward()
    for ours, truth in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, truth)
        torch.testing.assert_close(ours.grad, truth.grad)
