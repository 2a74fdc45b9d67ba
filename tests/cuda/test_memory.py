"""Memory on a GPU, beside what PyTorch's allocator says. It needs one, and is skipped without."""

import pytest
import torch
from torch import nn

import pipesight
from pipesight import GPipe
from pipesight.report import analyse, open_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, SAMPLES, CHUNKS = 2048, 8192, 8


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_parts_add_up_to_what_is_allocated(tmp_path, checkpoint):
    """What is counted is nearly all that the allocator gave out, and its peak and the GPU's memory are known."""
    layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    pipe = GPipe(layers, [4, 4], devices=["cuda:0"] * 2, chunks=CHUNKS, checkpoint=checkpoint)
    optimizer = torch.optim.Adam(pipe.parameters())
    x = torch.randn(SAMPLES, WIDTH, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in pipe.parameters()) - x.nbytes
    with pipesight.observe(tmp_path / "run", logs=None):
        for _ in range(3):
            optimizer.zero_grad()
            pipe(x).square().mean().backward()
            optimizer.step()
    with open_run(tmp_path / "run") as opened:
        found = analyse(opened).memory
    assert found is not None
    (device,) = found.devices
    assert device.device == "cuda:0"
    assert device.capacity == torch.cuda.get_device_properties(0).total_memory
    assert device.allocator_peak is not None
    assert device.allocator_peak <= torch.cuda.max_memory_allocated()
    assert device.allocated is not None
    assert device.peak <= device.allocated - before <= device.allocator_peak
    most = 4 * SAMPLES * WIDTH * 4  # outputs on their way, gradients, and what the loss outside keeps
    assert device.allocated - device.peak - before <= most
