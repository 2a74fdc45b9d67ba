"""DistributedPipeline on a GPU, with NCCL: what one rank alone can show. They need one, and are skipped without."""

import copy
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipesight.distributed import DistributedPipeline, GradScaler, init_process_group, schedule_names
from pipesight.testing import capture_events

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ONE_A_RANK = ("gpipe", "1f1b", "zero-bubble")


@pytest.fixture(scope="module", autouse=True)
def job():
    """Be the one rank of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        init_process_group()
        yield
        dist.destroy_process_group()


def model(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Dropout(dropout), nn.Linear(32, 8), nn.Tanh()]
    return nn.Sequential(*layers).cuda()


def pipeline_of(module, schedule, **settings):
    balance = [6] if schedule in ONE_A_RANK else [3, 3]
    settings = {"chunks": 4, "loss_fn": nn.MSELoss(), **settings}
    return DistributedPipeline(module, balance, schedule=schedule, **settings)


def batch(samples=24):
    return torch.randn(samples, 16, device="cuda"), torch.randn(samples, 8, device="cuda")


@pytest.mark.parametrize("schedule", schedule_names())
def test_gradients(schedule):
    """Every schedule has the loss and the gradients of the plain model, on its device, for batches of any size."""
    assert dist.get_backend() == "nccl"
    plain = model()
    pipeline = pipeline_of(copy.deepcopy(plain), schedule)
    assert set(pipeline.devices) == {"cuda:0"}
    for samples in (24, 23, 3):
        input, target = batch(samples)
        plain.zero_grad()
        for parameter in pipeline.parameters():
            parameter.grad = None
        expected = nn.functional.mse_loss(plain(input), target)
        expected.backward()
        torch.testing.assert_close(pipeline.step(input, target), expected.detach())
        for (name, mine), (other, theirs) in zip(pipeline.named_parameters(), plain.named_parameters(), strict=True):
            assert name == other
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_checkpointing_repeats_dropout():
    """With and without recomputation, the masks and so the gradients are the same."""
    input, target = batch()
    found = []
    for checkpoint in ("never", "always"):
        pipeline = pipeline_of(model(dropout=0.5), "interleaved-1f1b", checkpoint=checkpoint)
        torch.manual_seed(1)
        loss = pipeline.step(input, target)
        found.append([loss, *(parameter.grad for parameter in pipeline.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_tasks_are_timed_on_the_device():
    """Tasks and layers of each partition are on the device's track too, as those of a GPipe are."""
    pipeline = pipeline_of(model(dropout=0.5), "interleaved-1f1b")
    pipeline.step(*batch())
    with capture_events() as events:
        pipeline.step(*batch())
    spans = [event for event in events if event["ph"] == "X" and event["args"].get("device") == "cuda:0"]
    for name in ("forward", "backward"):
        tasks = [(e["args"]["partition"], e["args"]["microbatch"]) for e in spans if e["name"] == name]
        assert sorted(tasks) == [(j, i) for j in range(2) for i in range(4)]
        layers = [e["args"]["layer"] for e in spans if e["name"] == f"{name}.layer"]
        assert sorted(set(layers)) == list("012345")
        assert len(layers) == 4 * 6


def test_save_and_load(tmp_path):
    """What was saved comes back, on the device."""
    pipeline = pipeline_of(model(), "1f1b")
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for _ in range(2):
        pipeline.step(*batch())
        optimizer.step()
    pipeline.save(tmp_path, optimizer, extra=7)
    torch.manual_seed(3)
    other = pipeline_of(nn.Sequential(*(copy.deepcopy(layer) for layer in model())), "interleaved-1f1b")
    another = torch.optim.AdamW(other.parameters())
    assert other.load(tmp_path, another) == 7
    for (name, mine), (same, theirs) in zip(other.named_parameters(), pipeline.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(mine, theirs)
    assert next(iter(another.state.values()))["step"] == 2


def test_padding_and_overflows():
    """Losses with padding and class weights are those of the plain model; a scaler of ranks works as torch's own."""
    weight = torch.rand(8, device="cuda")
    loss_fn = nn.CrossEntropyLoss(weight=weight, ignore_index=3)
    plain = model()
    pipeline = pipeline_of(copy.deepcopy(plain), "1f1b", loss_fn=loss_fn)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (plain, pipeline)]
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10), GradScaler(pipeline, 2.0**10)]
    for k in range(3):
        input, target = batch(23)[0], torch.randint(8, (23,), device="cuda")
        target[:6] = 3  # a micro-batch of padding only
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = loss_fn(plain(input), target)
        scalers[0].scale(expected).backward()
        loss = pipeline.step(input, target, scaler=scalers[1])
        torch.testing.assert_close(loss, expected.detach())
        if k == 1:
            for parameters in (plain.parameters(), pipeline.parameters()):
                next(iter(parameters)).grad.fill_(float("inf"))
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for mine, theirs in zip(pipeline.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
