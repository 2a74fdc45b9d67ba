"""Steps with the loss inside on CUDA: several partitions on one GPU, CPU and GPU mixed, memory, scaled gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLACES = [["cuda:0"] * 4, ["cpu", "cuda:0", "cuda:0", "cpu"], ["cuda:0", "cpu", "cuda:0", "cpu"]]
SCHEDULES = ["gpipe", "1f1b", "zero-bubble"]


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(drop))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(x) * memory
        return y


class Model(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(4))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = memory = self.embed(ids)
        for block in self.blocks:
            x = block(x, memory)
        logits = self.head(x + memory)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.to(logits.device).flatten())}


CUTS = ["blocks.1", "blocks.2", "blocks.3"]


def batch(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (7, 5), generator=generator)
    labels = ids.roll(1, 1).masked_fill(torch.rand(7, 5, generator=generator) > 0.7, -100)
    return {"ids": ids.to(device), "labels": labels.to(device)}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", PLACES)
def test_loss_and_gradients_are_the_models(devices: list[str], schedule: str, checkpoint: Any) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, devices=devices, chunks=4, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):
        truth = plain(**batch())["loss"]
        truth.backward()
        found = pipe.step(**batch(devices[0]))
        torch.testing.assert_close(found.cpu(), truth.detach())
    for (name, one), other in zip(plain.named_parameters(), pipe.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad.cpu(), one.grad, msg=name)


def test_many_steps_agree() -> None:
    """Without any synchronisation between steps, as real training."""
    plain = Model().cuda()
    pipe = Pipeline(copy.deepcopy(plain), CUTS, devices=["cuda:0"] * 4, chunks=2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, pipe)]
    losses: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for k, model in enumerate((plain, pipe)):
            optimizers[k].zero_grad()
            if model is pipe:
                loss = pipe.step(**batch("cuda"))
            else:
                loss = plain(**batch("cuda"))["loss"]
                loss.backward()
            optimizers[k].step()
            losses[k].append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_nothing() -> None:
    pipe = Pipeline(Model(0.5), CUTS, devices=["cuda:0"] * 4, chunks=2, schedule="1f1b")
    optimizer = torch.optim.AdamW(pipe.parameters(), fused=True)
    given = batch("cuda")
    for k in range(4):
        torch.cuda.set_sync_debug_mode("error" if k else "default")
        try:
            pipe.step(**given)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_dropout_is_recomputed() -> None:
    found = []
    for schedule, checkpoint in (("1f1b", "never"), ("1f1b", "always"), ("zero-bubble", "always")):
        torch.manual_seed(0)
        pipe = Pipeline(
            Model(0.5).double(),
            CUTS,
            devices=["cuda:0"] * 4,
            chunks=3,
            schedule=schedule,
            checkpoint=checkpoint,  # type: ignore[arg-type]
        )
        pipe.step(**batch("cuda"))
        found.append([p.grad for p in pipe.parameters()])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_gradient_scaler() -> None:
    pipe = Pipeline(Model(), CUTS, devices=["cuda:0"] * 4, chunks=2)
    same = copy.deepcopy(pipe)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
    with torch.autocast("cuda", torch.float16):
        scaled, loss = pipe.step(**batch("cuda"), scaler=scaler), same.step(**batch("cuda"))
    torch.testing.assert_close(scaled, loss)
    scaler.unscale_(optimizer)
    for one, other in zip(pipe.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-3)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("partitions", [1, 4])
def test_memory_is_that_of_a_loop_over_micro_batches(partitions: int) -> None:
    """The logits of one micro-batch at a time: of all of them together, they would be most of the memory."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(7)], nn.Linear(256, 8192))

    x, y = torch.randn(8192, 256, device="cuda"), torch.randint(8192, (8192,), device="cuda")
    loss_fn = nn.CrossEntropyLoss()
    plain = make().cuda()
    pipe = Pipeline(
        make(), balance=[8 // partitions] * partitions, devices=["cuda:0"] * partitions, chunks=8,
        checkpoint="never", loss_fn=loss_fn,
    )  # fmt: skip

    def loop() -> None:
        for some, targets in zip(x.chunk(8), y.chunk(8), strict=True):
            (loss_fn(plain(some), targets) / 8).backward()

    peaks = []
    for run in (loop, lambda: pipe.step(x, y)):
        for _ in range(2):
            plain.zero_grad()
            pipe.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 1.15 * peaks[0]
