"""Memory on a GPU, beside what PyTorch's allocator says. It needs one, and is skipped without."""

import contextlib
import gc

import numpy as np
import pytest
import torch
from torch import nn

import pipesight
from pipesight import GPipe, Pipeline
from pipesight.plan import measure, recomputed, recorded
from pipesight.report import analyse, open_run
from pipesight.schedule.memory import device_bytes
from pipesight.schedule.worker_orders import worker_orders

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


def trained(run, schedule, balance, chunks, checkpoint):
    """Train some steps on one GPU; return what its allocator says is the most of the last."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # those of threads that have ended would count
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
    pipe = Pipeline(
        nn.Sequential(*layers).cuda(),
        balance=balance,
        devices=["cuda:0"] * len(balance),
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch.optim.Adam(pipe.parameters())
    x, y = (torch.randn(SAMPLES, WIDTH, device="cuda") for _ in range(2))
    with contextlib.nullcontext() if run is None else pipesight.observe(run, logs=None):
        for k in range(3):
            optimizer.zero_grad()
            pipe.step(x, target=y)
            optimizer.step()
            if k == 0:
                torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def test_a_program_sees_its_own_peak(tmp_path):
    """Recording looks for peaks in the middle of tasks; what the program asks for does not change by that."""
    alone = trained(None, "gpipe", (3, 3), CHUNKS, "never")
    watched = trained(tmp_path / "run", "gpipe", (3, 3), CHUNKS, "never")
    assert watched == pytest.approx(alone, rel=0.01)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("schedule", "balance", "chunks", "checkpoint"),
    [("gpipe", (2, 4), 4, "never"), ("gpipe", (1, 2, 3), 8, "always"), ("1f1b", (4, 2), 4, "except_last")],
)
def test_peaks_of_other_settings_are_known(tmp_path, schedule, balance, chunks, checkpoint):
    """From one run, what `torch.cuda.max_memory_allocated` gives for another setting is known within 5%."""
    trained(tmp_path / "run", "1f1b", (3, 3), CHUNKS, "never")
    with open_run(tmp_path / "run") as opened:
        known = measure(opened)
    again = recomputed(checkpoint, chunks)
    orders = worker_orders(schedule, chunks, ["cuda:0"] * len(balance), recompute=again)
    order = recorded(np.array([[(kind, j, i) for kind, i, j in tasks] for tasks in orders.tasks], np.int32))
    (found,) = device_bytes(order, known.costs, balance, parameter_scale=known.parameter_scale)
    assert found == pytest.approx(trained(None, schedule, balance, chunks, checkpoint), rel=0.05)
