"""A pipeline over two hosts with a bad network between them, in a real job of two nodes."""

import pytest
import torch
from torch import nn

from network import Link, two_hosts
from nodes import nodes
from torchrun import END, RANK, batches, tanhs

STEPS, LAYERS = 4, 4

TRAIN = f"""
import socket
pipeline = DistributedPipeline(tanhs({LAYERS}), [1] * size, chunks=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.Adam(pipeline.parameters(), 1e-2)
for x, y in batches([16] * {STEPS}):
    optimizer.zero_grad()
    loss = pipeline.step(x if pipeline.is_first else None, y if pipeline.is_last else None)
    optimizer.step()
    if pipeline.is_last:
        print(loss.item())
print("host", socket.gethostname(), "rank", rank, flush=True)
"""


@pytest.fixture(scope="module")
def hosts():
    with two_hosts(Link(delay=0.01, loss=0.01, rate=20e6)) as both:
        yield both


def run_job(hosts, folder, **settings):
    """Train with two ranks on each of two hosts; return what each node printed.

    Record it with ``through=("-m", "pipesight", "run", "--out", RUN)``.
    """
    script = folder / "train.py"
    script.write_text(RANK + TRAIN + END)
    with nodes(hosts, [script], folder, ranks=LAYERS // 2, **settings) as job:
        return job.ends_well()


def plain_losses():
    model = tanhs(LAYERS)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for x, y in batches([16] * STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_over_a_bad_link(hosts, tmp_path):
    """Two hosts train as the plain model does, though packets between them are late, few at a time, or lost."""
    outputs = run_job(hosts, tmp_path)
    lines = [line for output in outputs for line in output.splitlines() if not line.startswith("[Gloo]")]
    places = sorted(line for line in lines if line.startswith("host"))
    # Which host becomes the first is for torchrun to say, but ranks of one host are neighbours.
    halves = [{f"host {name} rank {rank}" for rank in ranks} for name in ("near", "far") for ranks in ((0, 1), (2, 3))]
    assert set(places) in (halves[0] | halves[3], halves[1] | halves[2]), places
    losses = [float(line) for line in lines if not line.startswith("host")]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses()))
