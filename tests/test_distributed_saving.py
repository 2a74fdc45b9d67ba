"""Checkpoints: resumed by other ranks and partitions, and whole though a run was killed while it saved."""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchrun import batches, tanhs, torchrun, train_plainly

TRAIN = """
import pipesight
from torch.distributed.device_mesh import init_device_mesh
mse = nn.functional.mse_loss


def train(steps, save=True, **settings):
    torch.manual_seed(rank)  # weights come from the checkpoint, if there is one
    n = len(settings["balance"])
    model = tanhs(8)
    pipeline = DistributedPipeline(model, chunks=8, loss_fn=mse, **settings)
    optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-2)
    start = pipeline.load(f"{folder}/checkpoints", optimizer) or 0
    losses = []
    for k, (x, y) in enumerate(batches([16] * 12)):
        if start <= k < start + steps:
            optimizer.zero_grad()
            if pipeline.places.mesh.ndim == 2:
                part = slice(8 * pipeline.places.replica, 8 * pipeline.places.replica + 8)
                x, y = x[part], y[part]
            losses.append(pipeline.step(x, y, broadcast_loss=True).item())
            optimizer.step()
    if save:
        pipeline.save(f"{folder}/checkpoints", optimizer, extra=start + steps)
    if rank == 0:
        print("from", start, "losses", *losses)
    return pipeline, optimizer
"""


def plain_losses(steps):
    """Return what training without interruption gives, and the model."""
    model = tanhs(8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return train_plainly(model, list(batches([16] * 12))[:steps], optimizer), model


def read(output):
    _, start, _, *losses = output.split()
    return int(start), [float(loss) for loss in losses]


def test_other_ranks_go_on(tmp_path):
    """Two ranks, four, sharded replicas and one rank go on from each other as if nothing had happened."""
    expected, _ = plain_losses(12)
    jobs = [
        (2, "train(3, balance=[4, 4])"),
        (4, "train(3, balance=[1] * 8, schedule='zbv-zero-bubble')"),
        (
            4,
            "train(3, balance=[3, 5], data_parallel='fsdp', "
            "mesh=init_device_mesh('cpu', (2, 2), mesh_dim_names=('pp', 'dp')))",
        ),
        (
            2,
            "with pipesight.observe(f'{folder}/RUN') as run:\n"
            "    train(3, balance=[2] * 4, schedule='interleaved-1f1b')\n"
            "assert run.step_number == 11, run.step_number",  # recorded steps go on, too
        ),
    ]
    found = []
    for k, (ranks, call) in enumerate(jobs):
        start, losses = read(torchrun(ranks, TRAIN + call + "\n", tmp_path)[0])
        assert start == 3 * k
        found += losses
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000009", "step-00000012"]  # two are kept
    model = tanhs(8)
    nn.init.zeros_(model[0][0].weight)
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoints" / "step-00000012")
    for ours, theirs in zip(model.parameters(), plain_losses(12)[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_killed_while_saving(tmp_path):
    """A rank killed in the middle of a save leaves the previous checkpoint whole, and the run resumes from it."""
    body = (
        TRAIN
        + """
pipeline, optimizer = train(3, balance=[4, 4])
if os.environ.get("KILL"):
    import signal
    from torch.distributed.checkpoint import FileSystemWriter
    plain_write = FileSystemWriter.write_data
    def write(self, *args):
        plain_write(self, *args).wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    FileSystemWriter.write_data = write
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.zero_()
    pipeline.save(f"{folder}/checkpoints", optimizer, extra=100, step=100)
"""
    )
    torchrun(2, body, tmp_path, fails=True, stuck=[0], KILL=1)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step-00000003", ".step-00000100.partial"}
    start, losses = read(torchrun(2, body, tmp_path)[0])
    assert start == 3
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses(6)[0][3:]))
