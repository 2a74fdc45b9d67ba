"""The engine on CUDA: several partitions on one GPU, and CPU and GPU partitions mixed, for real transfers.

It runs wherever there is a GPU: ``pytest tests/cuda``.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from pipesight import GPipe, current_microbatch
from pipesight.balance import balance_by_size, balance_by_time
from pipesight.skip import pop, skippable, stash

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODES = ["always", "except_last", "never"]
PLACES = [
    ["cuda:0"] * 4,
    ["cpu", "cuda:0", "cpu", "cuda:0"],
    ["cuda:0", "cpu", "cuda:0", "cuda:0"],
    ["cuda", "cuda", "cpu", "cpu"],
]


def build(width: int = 32, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.ReLU(inplace=True),
        nn.Linear(width, width),
        nn.Dropout(dropout),
    ).double()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", PLACES)
def test_gradients_equal_the_plain_models(devices: list[str], checkpoint: str) -> None:
    """Wherever the partitions are, outputs and gradients are those of the plain model."""
    torch.manual_seed(0)
    plain = build()
    piped = GPipe(copy.deepcopy(plain), [2, 2, 2, 2], devices=devices, chunks=5, checkpoint=checkpoint)
    for _ in range(3):
        x = torch.randn(33, 32, dtype=torch.double)
        a, b = x.clone().requires_grad_(), x.to(piped.devices[0]).requires_grad_()
        expected, output = plain(a), piped(b)
        assert output.device == piped.devices[-1]
        expected.square().sum().backward()
        output.square().sum().backward()
        torch.testing.assert_close(output.cpu(), expected)
        torch.testing.assert_close(b.grad.cpu(), a.grad)
        torch.testing.assert_close(gradients(piped), gradients(plain))


@pytest.mark.parametrize("devices", PLACES)
def test_checkpointing_repeats_dropout(devices: list[str]) -> None:
    """With dropout, all checkpoint modes give the same numbers, and so does a second run from the same seed."""
    results = []
    plain = build(dropout=0.4)
    for checkpoint in [*MODES, "always"]:
        piped = GPipe(copy.deepcopy(plain), [2, 2, 2, 2], devices=devices, chunks=4, checkpoint=checkpoint)
        torch.manual_seed(7)
        x = torch.randn(16, 32, dtype=torch.double).to(piped.devices[0])
        for _ in range(2):
            output = piped(x)
            output.square().sum().backward()
        results.append([output.detach().cpu(), *gradients(piped)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)


def test_fused_attention_dropout_is_repeated() -> None:
    """Fused kernels, which take no generator, draw the same numbers when they are recomputed."""
    plain = nn.Sequential(*(Attention() for _ in range(4))).bfloat16()
    results = []
    for checkpoint in MODES:
        piped = GPipe(copy.deepcopy(plain), [1] * 4, devices=["cuda:0"] * 4, chunks=4, checkpoint=checkpoint)
        torch.manual_seed(3)
        x = torch.randn(8, 16, 64).bfloat16().cuda()
        output = piped(x)
        output.float().square().mean().backward()
        results.append([output.detach().cpu(), *gradients(piped)])
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        torch.testing.assert_close(results[0][1:], other[1:])


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", PLACES)
def test_side_streams_are_respected(devices: list[str], checkpoint: str) -> None:
    """Called on a stream that is behind, the pipeline waits for it, and what follows on it waits for the pipeline."""
    torch.manual_seed(0)
    plain = build(256)
    piped = GPipe(copy.deepcopy(plain), [2, 2, 2, 2], devices=devices, chunks=4, checkpoint=checkpoint)
    first, last = piped.devices[0], piped.devices[-1]
    source = torch.randn(64, 256, dtype=torch.double)
    plain(source).square().sum().backward()
    stream = torch.cuda.Stream()
    for _ in range(5):
        piped.zero_grad()
        x = torch.full((64, 256), float("nan"), dtype=torch.double, device=first)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # about 25 ms
            x.copy_(source, non_blocking=False)
            loss = piped(x).square().sum()
            loss.backward()
            total = torch.stack([p.grad.square().sum().to(last) for p in piped.parameters()]).sum()
        stream.synchronize()
        expected = sum(g.square().sum() for g in gradients(plain))
        torch.testing.assert_close(total.cpu(), expected)
        torch.testing.assert_close(gradients(piped), gradients(plain))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # plain PyTorch says so too
@pytest.mark.parametrize("checkpoint", MODES)
def test_backward_on_another_stream(checkpoint: str) -> None:
    """Forward on one stream and backward on another give the right gradients."""
    torch.manual_seed(0)
    plain = build(128)
    piped = GPipe(copy.deepcopy(plain), [4, 4], devices=["cuda:0"] * 2, chunks=4, checkpoint=checkpoint)
    x = torch.randn(64, 128, dtype=torch.double)
    plain(x).square().sum().backward()
    x = x.cuda()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        loss = piped(x).square().sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    torch.testing.assert_close(gradients(piped), gradients(plain))


@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        yield stash("a", x * 2)
        return x.sin()


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        skip = yield pop("a")
        return x + skip


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", PLACES)
def test_skips_cross_devices(devices: list[str], checkpoint: str) -> None:
    """A skip arrives on the device of the layer that pops it, and its gradient finds the way back."""
    plain = nn.Sequential(Stash(), nn.Linear(8, 8), nn.Tanh(), Pop()).double()
    piped = GPipe(copy.deepcopy(plain), [1] * 4, devices=devices, chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 8, dtype=torch.double)
    a, b = x.clone().requires_grad_(), x.to(piped.devices[0]).requires_grad_()
    plain(a).square().sum().backward()
    piped(b).square().sum().backward()
    torch.testing.assert_close(b.grad.cpu(), a.grad)
    torch.testing.assert_close(gradients(piped), gradients(plain))


skips: dict[Tensor | None, Tensor] = {}


class Remember(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        skips[current_microbatch()] = x
        return x.sin()


class Recall(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * skips.pop(current_microbatch()).to(x.device)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", PLACES)
def test_current_microbatch_crosses_devices(devices: list[str], checkpoint: str) -> None:
    """The guide's long skip, kept by micro-batch in a dictionary, gives the plain model's gradients."""
    plain = nn.Sequential(nn.Linear(8, 8), Remember(), nn.Linear(8, 8), Recall()).double()
    piped = GPipe(copy.deepcopy(plain), [1] * 4, devices=devices, chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        x = torch.randn(7, 8, dtype=torch.double)
        plain(x).square().sum().backward()
        piped(x.to(piped.devices[0])).square().sum().backward()
    torch.testing.assert_close(gradients(piped), gradients(plain))
    assert not skips


@pytest.mark.parametrize("checkpoint", MODES)
def test_autocast_reaches_the_partitions(checkpoint: str) -> None:
    """Under ``torch.autocast("cuda")`` the layers run in the lower precision, also when they are recomputed."""
    plain = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).cuda()
    piped = GPipe(copy.deepcopy(plain), [1, 2], devices=["cuda:0"] * 2, chunks=2, checkpoint=checkpoint)
    x = torch.randn(8, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        expected, output = plain(x), piped(x)
    assert output.dtype == torch.bfloat16
    expected.float().sum().backward()
    output.float().sum().backward()
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradients(piped), gradients(plain), rtol=3e-2, atol=3e-2)


class Where(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.cuda.current_device())
        return x + torch.zeros(1, device="cuda")


def test_the_partitions_device_is_current() -> None:
    """Inside a layer ``"cuda"`` means the partition's device."""
    layer = Where()
    GPipe(nn.Sequential(layer), [1], devices=[0], chunks=2)(torch.zeros(2, 2, device="cuda"))
    assert layer.seen == [0, 0]


def test_default_devices_are_the_gpus() -> None:
    """Without ``devices`` the GPUs are taken in order, and too few of them is an error."""
    count = torch.cuda.device_count()
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count + 1)))
    with pytest.raises(IndexError, match="too few devices"):
        GPipe(model, [1] * (count + 1))
    piped = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    assert piped.devices == [torch.device("cuda", 0)]
    with pytest.raises(TypeError, match="denied to move"):
        piped.cpu()


def test_deferred_batch_norm() -> None:
    """Deferred batch normalisation tracks the statistics of the whole mini-batch on a GPU too."""
    plain = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    piped = GPipe(
        copy.deepcopy(plain), [1, 2], devices=["cuda:0"] * 2, chunks=4, checkpoint="always", deferred_batch_norm=True
    )
    x = torch.randn(32, 8, device="cuda") * 3 + 5
    plain(x)
    piped(x).sum().backward()
    torch.testing.assert_close(piped[0].running_mean, plain[0].running_mean)
    torch.testing.assert_close(piped[0].running_var, plain[0].running_var)


class Glutton(nn.Module):
    hungry = True

    def forward(self, x: Tensor) -> Tensor:
        if self.hungry:
            torch.empty(1 << 50, device=x.device)
        return x


def test_out_of_memory_reaches_the_caller() -> None:
    """Running out of memory in a worker raises in the caller, says where, and the model goes on."""
    glutton = Glutton()
    piped = GPipe(nn.Sequential(nn.Linear(4, 4), glutton), [1, 1], devices=["cuda:0"] * 2, chunks=2)
    x = torch.randn(4, 4, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        piped(x)
    assert "partition 1, layer '1'" in caught.value.__notes__[0]
    glutton.hungry = False
    piped(x).sum().backward()


@pytest.mark.parametrize("checkpoint", MODES)
def test_memory_is_given_back(checkpoint: str) -> None:
    """After backward, and after an output is dropped, nothing of the mini-batch stays on the GPU."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    piped = GPipe(model, [2, 2], devices=["cuda:0"] * 2, chunks=4, checkpoint=checkpoint)
    x = torch.randn(256, 256, device="cuda")
    piped(x).sum().backward()
    torch.cuda.synchronize()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            piped(x).sum().backward()
            piped(x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_layers() -> None:
    """Layers compiled with ``torch.compile`` run in the partitions, dropout repeated."""
    plain = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))
    results = []
    for checkpoint in ("always", "never"):
        copied = copy.deepcopy(plain)
        layers = [torch.compile(nn.Sequential(copied[0], copied[1])), torch.compile(copied[2])]
        piped = GPipe(nn.Sequential(*layers), [1, 1], devices=["cuda:0"] * 2, chunks=2, checkpoint=checkpoint)
        torch.manual_seed(1)
        x = torch.randn(8, 32, device="cuda")
        piped(x).square().sum().backward()
        results.append(gradients(piped))
    torch.testing.assert_close(results[0], results[1])


def test_balancing_on_the_gpu() -> None:
    """Both balancers profile on the GPU and find the heavy layer."""
    model = nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 8), nn.Linear(8, 8))
    x = torch.randn(4096, 8)
    assert sum(balance_by_time(model, x, partitions=2)) == 4
    assert sum(balance_by_size(2, model, x.cuda(), chunks=4)) == 4
    assert all(p.device.type == "cpu" for p in model.parameters())


class Descend(nn.Module):
    """A layer that differentiates something in its forward."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.enable_grad():
            here = input.detach().requires_grad_()
            (slope,) = torch.autograd.grad(here.sin().sum(), here)
        return input - slope


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_in_an_outer_checkpoint(devices: list[str], checkpoint: str, reentrant: bool) -> None:
    """In torch.utils.checkpoint, gradients are the plain model's, also if a thread of autograd's own recomputes."""
    torch.manual_seed(0)
    plain = nn.Sequential(*build(), Descend())
    piped = GPipe(copy.deepcopy(plain), [2, 2, 2, 3], devices=devices, chunks=5, checkpoint=checkpoint)
    for _ in range(2):
        x = torch.randn(33, 32, dtype=torch.double)
        a, b = x.clone().requires_grad_(), x.to(piped.devices[0]).requires_grad_()
        for model, input in ((plain, a), (piped, b)):
            # What comes after the model asks for its saved tensors first, from the thread of its device.
            output = torch.utils.checkpoint.checkpoint(
                lambda t, model=model: model(t.sin()).cos().cos(), input, use_reentrant=reentrant
            )
            output.square().sum().backward()
        torch.testing.assert_close(b.grad.cpu(), a.grad)
    for ours, theirs in zip(gradients(piped), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs)
