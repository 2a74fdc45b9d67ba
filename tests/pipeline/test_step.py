"""`Pipeline.step`: forward, loss and backward of micro-batches in the order of any schedule, with plain gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline, context, current_microbatch, is_recomputing
from pipesight.plan import Schedule, Setting, measure
from pipesight.recording import observe
from pipesight.runs.reading.run import open_run
from pipesight.schedule.task_orders import B, F, R, W, recorded

IN_V = ["zbv-zero-bubble", "dualpipev", "v-half", "v-min"]
SCHEDULES = ["gpipe", "1f1b", "zero-bubble", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", *IN_V]


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(drop), nn.Linear(8, 8))

    def forward(self, x: Tensor, memory: Tensor, *, scale: float = 1.0) -> Tensor:
        y: Tensor = x + scale * self.mlp(self.norm(x)) * memory.mean(-1, keepdim=True)
        return y


class Model(nn.Module):
    """Ties its head to its embedding; every block uses a tensor of the first partition; the loss is inside."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.gate = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Block(drop) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = memory = self.embed(ids)
        for k, block in enumerate(self.blocks):
            x = block(x, memory, scale=0.5 if k % 2 else 1.0)
        logits = self.head(x * self.gate + memory)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


CUTS = ["blocks.1", "blocks.2", "head"]


def make(**settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings).double()


def batch(samples: int = 7, *, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (samples, 5), generator=generator)
    labels = ids.roll(1, 1)
    if padded:
        labels = labels.masked_fill(
            torch.rand(samples, 5, generator=generator) > torch.arange(samples)[:, None] / 6, -100
        )
    return {"ids": ids, "labels": labels}


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)], nn.Linear(6, 3)).double()


def rows(samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(samples, 6, generator=generator).double(), torch.randint(3, (samples,), generator=generator)


def assert_same_gradients(pipe: nn.Module, plain: nn.Module) -> None:
    for (name, truth), parameter in zip(plain.named_parameters(), pipe.parameters(), strict=True):
        assert (truth.grad is None) == (parameter.grad is None), name
        if truth.grad is not None:
            torch.testing.assert_close(parameter.grad, truth.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_and_gradients_are_the_models(schedule: str, checkpoint: Any) -> None:
    """With uneven micro-batches and labels that are ignored, in two steps whose gradients add up."""
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=4, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):
        truth = plain(**batch())["loss"]
        truth.backward()
        found = pipe.step(**batch())
        torch.testing.assert_close(found, truth.detach())
        assert not found.requires_grad
        assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sequential_with_a_loss_function(schedule: str) -> None:
    plain, (x, y) = sequential(), rows()
    pipe = Pipeline(
        copy.deepcopy(plain), balance=[1, 1, 2, 1], chunks=4, schedule=schedule, loss_fn=nn.CrossEntropyLoss()
    )
    truth = nn.functional.cross_entropy(plain(x), y)
    truth.backward()
    torch.testing.assert_close(pipe.step(x, y), truth.detach())
    assert_same_gradients(pipe, plain)
    torch.testing.assert_close(pipe.eval_step(x, target=y), truth.detach())
    torch.testing.assert_close(pipe.predict(x), plain(x).detach())


@pytest.mark.parametrize("cuts", [[], CUTS[:1]])
@pytest.mark.parametrize("chunks", [1, 3])
def test_few_partitions_and_micro_batches(cuts: list[str], chunks: int) -> None:
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), cuts, chunks=chunks)
    plain(**batch())["loss"].backward()
    pipe.step(**batch())
    assert_same_gradients(pipe, plain)


def test_a_smaller_last_batch() -> None:
    """Interleaved 1F1B cannot run it: another order stands in."""
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=4, schedule="interleaved-1f1b")
    for samples in (7, 3):
        plain(**batch(samples))["loss"].backward()
        pipe.step(**batch(samples))
    assert_same_gradients(pipe, plain)


def test_an_order_of_ones_own() -> None:
    """Two partitions of four on each worker, weight gradients of all micro-batches at the very end."""
    orders = []
    for home in (0, 1):
        stages = (home, home + 2)
        down = [(F, s, i) for i in range(2) for s in stages]
        up = [(B, s, i) for i in range(2) for s in reversed(stages)]
        orders.append([*down, *up, *((W, s, i) for i in (1, 0) for s in stages)])
    schedule = recorded(orders, name="mine")
    assert isinstance(schedule, Schedule)
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=2, schedule=schedule, checkpoint="always")
    assert pipe.schedule == "mine"
    plain(**batch())["loss"].backward()
    pipe.step(**batch())
    assert_same_gradients(pipe, plain)
    plain(**batch(1))["loss"].backward()  # a batch that the order is not for
    pipe.step(**batch(1))
    assert_same_gradients(pipe, plain)
    with pytest.raises(ValueError, match="as many micro-batches as the pipeline has"):
        Pipeline(make(), CUTS, chunks=4, schedule=schedule)


def test_an_order_from_a_file(tmp_path: Path) -> None:
    """As torch.distributed.pipelining writes it; its cells say nothing about recomputation, which the pipeline adds."""
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,3F0,3I0,3F1,3W0,3B1,0B0,0I1,0W1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    plain = make()
    plain(**batch())["loss"].backward()
    for path in (file, str(file)):
        pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=2, schedule=path, checkpoint="except_last")
        pipe.zero_grad()
        pipe.step(**batch())
        assert (pipe.schedule, pipe.ran["workers"]) == ("mine", [0, 1, 1, 0])
        assert_same_gradients(pipe, plain)
    file.write_text("0F0,0B0,0F1\n")
    with pytest.raises(ValueError, match=r"mine\.csv: the schedule cannot run: there is no backward of micro-batch 1"):
        Pipeline(make(), CUTS, chunks=2, schedule=file)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_one_worker_for_all_partitions(checkpoint: Any) -> None:
    """It goes through all of them with a micro-batch, as neighbours on one GPU do."""
    once = [*((F, s) for s in range(4)), *((B, s) for s in reversed(range(4))), *((W, s) for s in range(4))]
    schedule = recorded([[(kind, s, i) for i in range(3) for kind, s in once]])
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=3, schedule=schedule, checkpoint=checkpoint)
    plain(**batch())["loss"].backward()
    pipe.step(**batch())
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "v-half"])
def test_partitions_run_forwards_side_by_side(schedule: str) -> None:
    """While a micro-batch is in the last partition of its way down, the next one has begun."""
    began, looked_on = threading.Event(), threading.Event()

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if current_microbatch() == 1 and looked_on.is_set():
                began.set()
            return x

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if current_microbatch() == 0 and not is_recomputing() and looked_on.is_set():
                assert began.wait(timeout=20), "micro-batch 1 has not begun"
            return x

    parts = [nn.Sequential(nn.Linear(2, 2)) for _ in range(4)]
    parts[0].append(First())
    parts[3 if schedule != "v-half" else 1].append(Last())
    pipe = Pipeline(
        nn.Sequential(*parts),
        balance=[1] * 4,
        devices=["cpu"] * 4,
        chunks=4,
        checkpoint="never",
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
    )
    pipe.step(torch.randn(4, 2), torch.randn(4, 2))  # in which micro-batches follow each other
    looked_on.set()
    pipe.step(torch.randn(4, 2), torch.randn(4, 2))


def test_steps_train() -> None:
    plain = make()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=3, schedule="zero-bubble")
    ours, theirs = (torch.optim.AdamW(model.parameters(), 1e-2) for model in (pipe, plain))
    for _ in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        plain(**batch())["loss"].backward()
        pipe.step(**batch())
        norms = pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        ours.step()
        theirs.step()
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_random_numbers_are_those_of_a_call(schedule: str) -> None:
    """Each task has a stream of its own, whatever the order; a recomputation repeats it."""
    found = []
    for way, checkpoint in (("call", "never"), ("step", "never"), ("step", "always")):
        pipe = Pipeline(make(drop=0.5), CUTS, chunks=3, schedule=schedule, checkpoint=checkpoint)  # type: ignore[arg-type]
        torch.manual_seed(3)
        if way == "call":
            pipe(**batch())["loss"].backward()
        else:
            pipe.step(**batch())
        found.append([p.grad for p in pipe.parameters()])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


class Saves(torch.autograd.Function):
    """Saves something for backward, and counts how many such things are alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Counter) -> Tensor:
        ctx.saved = Saved()
        counter.begin(ctx.saved)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Saved:
    pass


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.alive = self.most = 0
        self._counting = threading.Lock()

    def begin(self, saved: Saved) -> None:
        weakref.finalize(saved, self._end)
        with self._counting:
            self.alive += 1
            self.most = max(self.most, self.alive)

    def _end(self) -> None:
        with self._counting:
            self.alive -= 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Saves.apply(self.linear(x).tanh(), self)  # type: ignore[no-untyped-call]
        return y


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("stepped", [False, True])
def test_a_model_goes_with_its_pipeline(stepped: bool) -> None:
    """Without the garbage collector: the next model may not fit beside it."""
    with uncollected():
        pipe = Pipeline(Model(), CUTS, chunks=2, schedule="1f1b")
        for _ in range(2):
            if stepped:
                pipe.step(**batch())
            else:
                pipe(**batch())["loss"].backward()
        weight = weakref.ref(next(pipe.parameters()))
        del pipe
        assert weight() is None


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        ("zero-bubble", [4, 4, 4, 4]),
        ("interleaved-1f1b", [4, 3, 2, 1]),
    ],
)
def test_no_more_micro_batches_are_alive_than_the_order_asks_for(schedule: str, most: list[int]) -> None:
    """And nothing is left after the step, without the garbage collector."""
    model = nn.Sequential(*[Counter() for _ in range(4)])
    pipe = Pipeline(
        model, ["1", "2", "3"], chunks=8, schedule=schedule, checkpoint="never", loss_fn=nn.CrossEntropyLoss()
    )
    x, y = rows(16)
    with uncollected():
        for _ in range(2):
            pipe.step(x, y)
            assert [counter.alive for counter in model] == [0] * 4
    assert [counter.most for counter in model] == most


def test_v_half_holds_half_of_what_1f1b_holds() -> None:
    """On n workers, n / 2 + 1 micro-batches instead of n: counted in halves, since a worker has two partitions."""
    n = 4
    for schedule, stages, most in (("1f1b", n, n), ("v-half", 2 * n, n + 2)):
        workers = [Counter() for _ in range(n)]  # each counts what both partitions of a worker keep alive
        order = [*range(n), *reversed(range(n))][:stages]
        model = nn.Sequential(*[Keeping(workers[home]) for home in order])
        pipe = Pipeline(
            model,
            [str(s) for s in range(1, stages)],
            chunks=12,
            schedule=schedule,
            checkpoint="never",
            loss_fn=nn.CrossEntropyLoss(),
        )
        pipe.step(*rows(12))  # in which the pipeline looks on, and micro-batches follow each other
        for counter in workers:
            counter.most = 0
        with uncollected():
            pipe.step(*rows(12))
        assert pipe.ran["workers"] == order
        assert max(counter.most for counter in workers) == most
        assert [counter.alive for counter in workers] == [0] * n


class Keeping(nn.Module):
    """A layer whose activations a counter of others counts."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.__dict__["counter"] = counter  # no module of its own

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Saves.apply(self.linear(x), self.__dict__["counter"])  # type: ignore[no-untyped-call]
        return y


def test_outputs_of_one_micro_batch_at_a_time_are_alive() -> None:
    counted = Counter()

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.linear(x)
            saved = Saved()
            logits.ours = saved  # type: ignore[attr-defined]
            counted.begin(saved)
            return logits

    pipe = Pipeline(nn.Sequential(nn.Linear(6, 6).double(), Head()), ["1"], chunks=8, loss_fn=nn.CrossEntropyLoss())
    with uncollected():
        pipe.step(*rows())
    assert counted.most == 1


def test_hooks_of_parameters_are_called_once() -> None:
    pipe = Pipeline(make(), CUTS, chunks=3)
    calls: list[str] = []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda g, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"after {name}"))
    for _ in range(2):
        calls.clear()
        pipe.step(**batch())
        names = [name for name, _ in pipe.named_parameters()]
        assert sorted(calls) == sorted([*names, *(f"after {name}" for name in names)])


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_hooks_that_change_gradients(schedule: str) -> None:
    """In two parts of a backward, a hook on a tensor is called twice, but what it does counts once."""

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            y.register_hook(lambda gradient: gradient * 0.5)
            return y.tanh()

    plain = nn.Sequential(Halving(), Halving(), Halving())
    pipe = Pipeline(copy.deepcopy(plain), ["1", "2"], chunks=2, schedule=schedule, loss_fn=nn.CrossEntropyLoss())
    x, y = rows()
    nn.functional.cross_entropy(plain(x), y).backward()
    pipe.step(x, y)
    assert_same_gradients(pipe, plain)


def test_weights_that_are_used_twice_in_a_partition() -> None:
    """Split, their gradients of both uses come at once."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(self.linear(x).tanh() * self.scale) * self.scale + self.scale.exp()
            return y

    plain = nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), Twice(), Twice()]).double()
    pipe = Pipeline(copy.deepcopy(plain), ["1", "2"], chunks=4, schedule="zero-bubble", loss_fn=nn.CrossEntropyLoss())
    x, y = rows()
    nn.functional.cross_entropy(plain(x), y).backward()
    pipe.step(x, y)
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_checkpoints_inside_a_model(schedule: str) -> None:
    class Inner(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.linear, self.reentrant = nn.Linear(6, 6), reentrant

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=self.reentrant)
            return y.tanh()

    plain = nn.Sequential(nn.Linear(6, 6), Inner(reentrant=True), Inner(reentrant=False)).double()
    pipe = Pipeline(copy.deepcopy(plain), ["1", "2"], chunks=2, schedule=schedule, loss_fn=nn.CrossEntropyLoss())
    x, y = rows()
    nn.functional.cross_entropy(plain(x), y).backward()
    pipe.step(x, y)
    assert_same_gradients(pipe, plain)


def test_inputs_get_gradients() -> None:
    """A leaf its own, and what the caller computed an input of learns, too."""
    plain, pipe = sequential(), Pipeline(sequential(), balance=[2, 3], chunks=4, loss_fn=nn.CrossEntropyLoss())
    found = []
    for way in (plain, pipe):
        x, y = rows()
        x.requires_grad_()
        outside = nn.Linear(6, 6).double()
        outside.load_state_dict({"weight": torch.eye(6), "bias": torch.zeros(6)})
        if way is pipe:
            pipe.step(outside(x), y)
        else:
            nn.functional.cross_entropy(plain(outside(x)), y).backward()
        found.append((x.grad, outside.weight.grad))
    torch.testing.assert_close(found[1], found[0])


def test_frozen_parts() -> None:
    plain = make()
    plain.embed.weight.requires_grad_(False)
    plain.blocks[1].requires_grad_(False)
    pipe = Pipeline(copy.deepcopy(plain), CUTS, chunks=3, schedule="zero-bubble", checkpoint="always")
    plain(**batch())["loss"].backward()
    pipe.step(**batch())
    assert_same_gradients(pipe, plain)
    pipe.requires_grad_(False)
    with pytest.raises(RuntimeError, match="the loss has no graph to differentiate"):
        pipe.step(**batch())


def test_batch_norm_counts_each_micro_batch_once() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).double()

    plain, pipe = model(), Pipeline(model(), ["2"], chunks=4, checkpoint="always", loss_fn=nn.CrossEntropyLoss())
    x, y = rows()
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (nn.functional.cross_entropy(plain(part), target) / 4).backward()
    pipe.step(x, y)
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))
    assert_same_gradients(pipe, plain)


def test_autocast_and_a_gradient_scaler() -> None:
    plain, pipe = (
        sequential().float(),
        Pipeline(sequential().float(), balance=[2, 3], chunks=2, loss_fn=nn.CrossEntropyLoss()),
    )
    x, y = rows()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(x.float(), y, scaler=scaler)
        for part, target in zip(x.float().split(4), y.split(4), strict=True):
            (nn.functional.cross_entropy(plain(part), target) * 512).backward()
    assert loss < 10
    assert_close_enough = functools.partial(torch.testing.assert_close, rtol=1e-2, atol=1.0)
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert_close_enough(one.grad, other.grad)
    scaler.unscale_(optimizer := torch.optim.SGD(pipe.parameters()))
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, but got float"):
        pipe.step(x.float(), y, scaler=1024.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_names_its_place_and_leaves_nothing(where: str, schedule: str) -> None:
    class Fails(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            at = current_microbatch()
            if self.fails and at is not None and at == 2:
                if where == "forward":
                    raise ArithmeticError("no")
                x.register_hook(lambda gradient: 1 // 0)
            return x * 1

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Fails(), nn.Linear(6, 3)).double()
    pipe = Pipeline(
        model, ["1", "2", "3"], chunks=4, schedule=schedule, checkpoint="never", loss_fn=nn.CrossEntropyLoss()
    )
    with pytest.raises(ArithmeticError) as caught:
        pipe.step(*rows())
    place = ", layer '2'" if where == "forward" else ""
    assert any(note.startswith("in partition") and f"micro-batch 2, {where}" in note for note in caught.value.__notes__)
    assert place in caught.value.__notes__[0]
    assert all(parameter.grad is None for parameter in pipe.parameters())
    Fails.fails = False
    plain = copy.deepcopy(model)
    x, y = rows()
    nn.functional.cross_entropy(plain(x), y).backward()
    pipe.step(x, y)
    assert_same_gradients(pipe, plain)


class Reversed(torch.autograd.Function):
    """Calls a layer again in its backward, and differentiates it there, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return None, x.grad


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gradients_of_a_backward_inside_the_backward(schedule: str) -> None:
    """It adds to ``.grad`` itself; micro-batches of different sizes, and gradients of an earlier step, count right."""

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return Reversed.apply(self.layer, x.clone())  # type: ignore[no-any-return, no-untyped-call]

    plain = nn.Sequential(nn.Linear(6, 6), Reversible(), Reversible(), nn.Linear(6, 3)).double()
    pipe = Pipeline(
        copy.deepcopy(plain), ["2"], chunks=2, schedule=schedule, checkpoint="never", loss_fn=nn.CrossEntropyLoss()
    )
    for _ in range(2):
        x, y = rows(5)
        nn.functional.cross_entropy(plain(x), y).backward()
        pipe.step(x, y)
        assert_same_gradients(pipe, plain)


def test_an_error_of_the_loss() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("no")

    pipe = Pipeline(sequential(), balance=[2, 3], chunks=2, loss_fn=fails)
    with pytest.raises(ArithmeticError) as caught:
        pipe.step(*rows())
    assert caught.value.__notes__ == ["in partition 1, layer 'loss_fn', micro-batch 0, forward"]


def test_an_interrupt_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline(sequential(), balance=[2, 3], chunks=4, loss_fn=nn.CrossEntropyLoss())
    pipe.step(*rows())
    pipe.zero_grad()
    begun = threading.Event()
    model = pipe.module

    def wait_forever(self: Any) -> None:
        begun.wait()
        monkeypatch.undo()
        raise KeyboardInterrupt

    from pipesight.pipeline import workers

    handle = model[0].register_forward_hook(lambda *_: begun.set())
    monkeypatch.setattr(workers._Countdown, "wait", wait_forever)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*rows())
    handle.remove()
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.step(*rows())
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_observers_see_every_task_in_its_place() -> None:
    class Sees(context.Observer):
        def __init__(self) -> None:
            self.tasks: list[tuple[Any, ...]] = []

        def task_started(self, where: context.Where) -> None:
            self.tasks.append((where.phase, where.partition, where.microbatch, is_recomputing()))

    sees = Sees()
    pipe = Pipeline(
        sequential(),
        balance=[2, 3],
        chunks=2,
        schedule="zero-bubble",
        checkpoint="always",
        loss_fn=nn.CrossEntropyLoss(),
    )
    context.attach(sees)
    try:
        pipe.step(*rows())
    finally:
        context.detach(sees)
    last = [(phase, i) for phase, j, i, _ in sees.tasks if j == 1]
    cycle = ["forward", "recompute", "backward"]
    assert last == [*((phase, 0) for phase in cycle), *((phase, 1) for phase in cycle), ("weight", 0), ("weight", 1)]
    assert {phase for phase, *_ in sees.tasks} == {"forward", "recompute", "backward", "weight"}
    assert all(again == (phase == "recompute") for phase, _, _, again in sees.tasks)


def test_plans_know_what_is_recomputed(tmp_path: Path) -> None:
    """Blocks are, and single layers are not; the recorded setting is known though a partition recomputes nothing."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), *blocks, nn.Linear(8, 8))
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(
        model, balance=[2, 3], devices=["cpu"] * 2, chunks=4, checkpoint="always", schedule="1f1b", loss_fn=loss_fn
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with observe(tmp_path / "run", logs=None):
        for _ in range(4):
            optimizer.zero_grad()
            pipe.step(torch.randn(16, 8), torch.randn(16, 8))
            optimizer.step()
    with open_run(tmp_path / "run") as run:
        found = measure(run)
    assert found.setting == Setting("1f1b", 2, 4, "always")
    assert [layer.checkpointed for layer in found.costs.layers] == [False, False, True, True, False]
    assert not (found.begin[R, 0] >= 0).any()
    assert (found.begin[R, 1] >= 0).all()


def test_steps_of_two_threads() -> None:
    plain = sequential()
    pipe = Pipeline(copy.deepcopy(plain), balance=[1, 1, 1, 2], chunks=4, loss_fn=nn.CrossEntropyLoss())
    x, y = rows()
    for _ in range(8):
        nn.functional.cross_entropy(plain(x), y).backward()
    threads = [threading.Thread(target=lambda: [pipe.step(x, y) for _ in range(4)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same_gradients(pipe, plain)


def test_a_model_that_does_not_call_a_cut() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.one(x), x)

    pipe = Pipeline(Skips(), ["two"], chunks=2)
    plain = copy.deepcopy(pipe.module)
    with pytest.warns(RuntimeWarning, match="did not call 'two'"):
        pipe.step(rows()[0])
    plain(rows()[0]).backward()
    assert_same_gradients(pipe, plain)


def test_verify_compares_steps() -> None:
    pipe = Pipeline(make(), CUTS, chunks=3, schedule="zero-bubble", verify=True)
    pipe.step(**batch())

    class Odd(nn.Module):
        """Its gradients depend on which thread it is called in."""

        def forward(self, x: Tensor) -> Tensor:
            return x * (1.0 if threading.current_thread() is threading.main_thread() else 2.0)

    model = nn.Sequential(nn.Linear(6, 6), Odd()).double()
    odd = Pipeline(model, ["1"], chunks=2, verify=True, loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(RuntimeError, match="'loss' differs from the plain model's"):
        odd.step(*rows())


def test_where_a_step_is_refused() -> None:
    pipe = Pipeline(sequential(), balance=[2, 3], chunks=2, loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="step needs the arguments of the model and then the target"):
        pipe.step(rows()[0])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"step\(\) needs gradients"):
        pipe.step(*rows())
    with pytest.raises(TypeError, match="has no loss; give the model what it computes the loss from"):
        Pipeline(sequential(), balance=[2, 3]).step(rows()[0])
    with pytest.raises(ValueError, match="schedule must be one of 'gpipe', '1f1b'"):
        Pipeline(sequential(), balance=[2, 3], schedule="1b1f")
    with pytest.raises(ValueError, match="needs several partitions on each worker"):
        Pipeline(sequential(), balance=[2, 3], chunks=2, schedule="interleaved-1f1b")
    with pytest.raises(TypeError, match=r"balance counts the layers of an nn\.Sequential, but the model is Model"):
        Pipeline(make(), balance=[2, 3])
