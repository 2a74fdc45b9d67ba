"""Checkpoints: resumed by other ranks and partitions, and whole though a run was killed while it saved."""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from support.torchrun import batches, tanhs, torchrun, train_plainly

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
            if pipeline._mesh.mesh.ndim == 2:
                part = slice(8 * pipeline._mesh.replica, 8 * pipeline._mesh.replica + 8)
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


def test_cut_off(tmp_path):
    """An incomplete checkpoint is skipped with a warning; if none is complete, loading raises."""
    body = """
    import glob, re, warnings
    pipeline = DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-2)
    for k in (1, 2, 3):
        pipeline.save(f"{folder}/checkpoints", optimizer, extra=k, step=k, keep=3)

    def load():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return pipeline.load(f"{folder}/checkpoints", optimizer), [str(w.message) for w in caught]

    def cut(step, pattern, size):
        dist.barrier()
        if rank == 0:
            for path in glob.glob(f"{folder}/checkpoints/step-0000000{step}/{pattern}"):
                os.truncate(path, os.path.getsize(path) - 1 if size is None else size)
        dist.barrier()

    assert load() == (3, [])
    cut(3, "__1_0.distcp", None)
    extra, told = load()
    assert extra == 2
    assert len(told) == (rank == 0)
    for text in told:
        assert re.search(r"step-00000003 is incomplete .__1_0.distcp has \\d+ of \\d+ bytes.;", text), text
        assert text.endswith("; resuming from step-00000002 instead")
    cut(2, ".metadata", 0)
    extra, told = load()
    assert extra == 1 and len(told) == 2 * (rank == 0), told
    cut(1, "*.distcp", 0)
    error = error_of(load)
    assert type(error) is ValueError and "no checkpoint in" in str(error), repr(error)
    """
    torchrun(2, body, tmp_path)


def test_extra_that_differs(tmp_path):
    """What a checkpoint keeps besides must be the same on all ranks; what is equal may be pickled otherwise."""
    torchrun(
        2,
        """
        pipeline = DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss)
        text = "a" * 50
        equal = [text, text] if rank else [text, "".join(["a"] * 50)]
        pipeline.save(folder, extra={"text": equal, "t": torch.ones(3), "nan": float("nan"), "big": [1] * 1000})
        for extra in (rank, {"state": torch.full((3,), float(rank))}, [1, 2, 3][: rank + 1]):
            error = error_of(pipeline.save, folder, extra=extra, step=7)
            assert type(error) is ValueError and "on rank 1:" in str(error), repr(error)
        assert "step: 1 on rank 0, 2 on rank 1" in str(error_of(pipeline.save, folder, step=rank + 1))
        assert sorted(os.listdir(folder)) == ["script.py", "step-00000000"]
        """,
        tmp_path,
    )


def test_loss_with_parameters(tmp_path):
    """Parameters of a loss are trained and saved with those of the last rank, the same in all replicas."""
    torchrun(
        4,
        """
        from torch.distributed.device_mesh import init_device_mesh
        class Learned(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
                self.frozen = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

            def forward(self, output, target):
                return nn.functional.mse_loss(output * self.scale, target)

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        part = slice(mesh.get_local_rank("dp"), None, 2)
        plain, plain_loss, loss_fn = tanhs(2), Learned(), Learned()
        if mesh.get_local_rank("dp"):
            nn.init.zeros_(loss_fn.scale)  # replicas start as the first one
        settings = {"balance": [1, 1], "chunks": 2, "mesh": mesh}
        pipeline = DistributedPipeline(tanhs(2), loss_fn=loss_fn, **settings)
        names = [name for name, _ in pipeline.named_parameters() if name.startswith("loss_fn")]
        assert names == (["loss_fn.scale", "loss_fn.frozen"] if pipeline.is_last else [])
        optimizers = [
            torch.optim.AdamW([*plain.parameters(), *plain_loss.parameters()], 0.1),
            torch.optim.AdamW(pipeline.parameters(), 0.1),
        ]
        for k, (x, y) in enumerate(batches([8, 6, 8])):
            if k == 2:
                pipeline.save(folder, optimizers[1])
                pipeline = DistributedPipeline(tanhs(2), loss_fn=Learned(), **settings)
                optimizers[1] = torch.optim.AdamW(pipeline.parameters(), 0.1)
                pipeline.load(folder, optimizers[1])
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = plain_loss(plain(x), y)
            expected.backward()
            torch.testing.assert_close(pipeline.step(x[part], y[part], broadcast_loss=True), expected.detach())
            norms = [
                nn.utils.clip_grad_norm_([*plain.parameters(), *plain_loss.parameters()], 0.1),
                pipeline.clip_grad_norm_(0.1),
            ]
            torch.testing.assert_close(*norms)
            for optimizer in optimizers:
                optimizer.step()
        learned = dict(pipeline.named_parameters())
        if pipeline.is_last:
            torch.testing.assert_close(learned["loss_fn.scale"], plain_loss.scale)
        error = error_of(DistributedPipeline, tanhs(2), loss_fn=Learned(), data_parallel="fsdp", **settings)
        assert "data_parallel='ddp'" in str(error), repr(error)
        """,
        tmp_path,
    )
