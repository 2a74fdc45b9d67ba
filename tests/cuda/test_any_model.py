"""Any model on CUDA: several partitions on one GPU, and CPU and GPU partitions mixed; weights tied across them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLACES = [["cuda:0"] * 3, ["cpu", "cuda:0", "cpu"], ["cuda:0", "cpu", "cuda:0"], ["cuda:0", "cuda:0", "cpu"]]


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(drop))

    def forward(self, x: Tensor, *, memory: Tensor, mask: Tensor | None) -> Tensor:
        y = self.mlp(x) * memory
        return x + (y if mask is None else y * mask.unsqueeze(-1))


class Model(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.blocks = nn.ModuleList(Block(drop) for _ in range(4))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Any]:
        x = memory = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x, memory=memory, mask=mask)
        logits = self.head(x + memory)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (6, 5), generator=generator)
    mask = (torch.rand(6, 5, generator=generator) > 0.3).double()
    return {"ids": ids.to(device), "mask": mask.to(device), "labels": ids.roll(1, 1).to(device)}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("devices", PLACES)
def test_output_and_gradients_are_the_models(devices: list[str], checkpoint: Any) -> None:
    plain = Model().double()
    pipe = Pipeline(copy.deepcopy(plain), ["blocks.1", "blocks.3"], devices=devices, chunks=3, checkpoint=checkpoint)
    for _ in range(3):
        truth, found = plain(**batch()), pipe(**batch(devices[0]))
        torch.testing.assert_close(found["logits"].cpu(), truth["logits"])
        torch.testing.assert_close(found["loss"].cpu(), truth["loss"])
        truth["loss"].backward()
        found["loss"].backward()
    for (name, one), other in zip(plain.named_parameters(), pipe.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad.cpu(), one.grad, msg=name)


def test_many_steps_agree_on_a_gpu() -> None:
    """Without any synchronisation between steps, as real training."""
    plain, pipe = Model().cuda(), Pipeline(Model().cuda(), ["blocks.2"], devices=["cuda:0"] * 2, chunks=2)
    pipe.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, pipe)]
    losses: list[list[Tensor]] = [[], []]
    data = {name: value.float() if name == "mask" else value for name, value in batch("cuda").items()}
    for _ in range(20):
        for k, model in enumerate((plain, pipe)):
            optimizers[k].zero_grad()
            loss = model(**data)["loss"]
            loss.backward()
            optimizers[k].step()
            losses[k].append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("devices", [["cuda:0"] * 3, ["cpu", "cuda:0", "cuda:0"]])
def test_dropout_is_recomputed(devices: list[str]) -> None:
    found = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(0)
        pipe = Pipeline(Model(0.5).double(), ["blocks.1", "blocks.3"], devices=devices, chunks=3, checkpoint=checkpoint)
        pipe(**batch(devices[0]))["loss"].backward()
        found.append([p.grad.cpu() for p in pipe.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], found[1])


def test_moving_all_of_it() -> None:
    pipe = Pipeline(Model(), ["blocks.2"], devices=["cpu", "cpu"], chunks=2).to("cuda")
    assert {str(d) for d in pipe.devices} == {"cuda:0"}
    data = {name: value.float() if name == "mask" else value for name, value in batch("cuda").items()}
    pipe(**data)["loss"].backward()
    assert all(p.grad is not None and p.grad.is_cuda for p in pipe.parameters())


def test_moving_where_it_already_is_changes_nothing() -> None:
    pipe = Pipeline(Model(), ["blocks.2"], devices=["cpu", "cuda:0"], chunks=2).to("cuda:0")
    assert [str(d) for d in pipe.devices] == ["cpu", "cuda:0"]
    assert pipe.embed.weight.device.type == "cpu"
