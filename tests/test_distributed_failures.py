"""Ranks that raise, hang, are killed or preempted, in real jobs of torchrun."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from torchrun import RANK, batches, start, tanhs, torchrun

BEGIN = (
    RANK
    + """
from torch._subclasses import FakeTensor
mse = nn.functional.mse_loss


class Trouble(nn.Module):
    def forward(self, input):
        where = context.current()
        if not isinstance(input, FakeTensor) and where.step == 1 and where.microbatch == 2:
            trouble()
        return input


def run(**settings):
    model = tanhs(4)
    model[2].append(Trouble())
    pipeline = DistributedPipeline(model, [1] * 4, chunks=4, loss_fn=mse, **settings)
    for k, (x, y) in enumerate(batches([8] * 3)):
        if k == 1:
            between(rank)
        try:
            pipeline.step(x, y)
        except Exception as error:
            with open(f"{folder}/{rank}.txt", "w") as file:
                file.write("\\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])]))
            time.sleep(1)  # torchrun ends the others as soon as one has left
            raise


def trouble():
    pass


def between(rank):
    pass
"""
)


def told(folder, ranks=4):
    """Return what each rank raised."""
    paths = [Path(folder) / f"{rank}.txt" for rank in range(ranks)]
    return [path.read_text().splitlines() if path.exists() else None for path in paths]


def test_a_rank_that_raises(tmp_path):
    """All ranks end at once, with the cause and its place; the rank that raised prints it first."""
    body = """
    def trouble():
        raise ValueError("no, thanks")
    run()
    """
    _, errors = torchrun(4, body, tmp_path, begin=BEGIN, fails=True)
    place = "in partition 2, layer '2', micro-batch 2, forward"
    assert told(tmp_path)[2] == ["ValueError", "no, thanks", place]
    for rank in (0, 1, 3):
        assert told(tmp_path)[rank] == ["RankFailedError", "rank 2 failed: ValueError: no, thanks", place]
    assert errors.index("[rank2]: ValueError: no, thanks") < errors.find("RankFailedError") % len(errors)
    assert "pipelining/schedules.py" in errors
    assert "Full Schedule" not in errors


def test_a_rank_that_raises_between_steps(tmp_path):
    """An exception outside of the pipeline reaches the others, too."""
    body = """
    def between(rank):
        if rank == 1:
            raise KeyError("lost")
    try:
        run()
    except KeyError:
        sys.excepthook(*sys.exc_info())
        time.sleep(0.1)
        dist.destroy_process_group()
        os._exit(1)
    """
    torchrun(4, body, tmp_path, begin=BEGIN, fails=True)
    found = [text for text in told(tmp_path) if text is not None]
    assert all(text == ["RankFailedError", "rank 1 failed: KeyError: 'lost'"] for text in found), found


@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_that_hangs(inside, tmp_path):
    """After the timeout the others name it, and say where it is."""
    body = f"""
    def {"trouble()" if inside else "between(rank)"}:
        if rank == 2:
            time.sleep(1000)
    run(timeout=3)
    """
    torchrun(4, body, tmp_path, begin=BEGIN, fails=True)
    found = told(tmp_path)
    assert found[2] is None
    for rank in (0, 1, 3):
        kind, text = found[rank]
        assert kind == "RankFailedError"
        if inside:
            assert text.startswith("rank 2 hangs in partition 2, layer '2', micro-batch 2, forward, at script.py:")
            assert " in trouble (" in text
        else:
            assert text.startswith("rank 2 hangs outside of the pipeline, at script.py:")
        assert "waited 3 s for" in text


TRAIN = """
mse = nn.functional.mse_loss
pipeline = DistributedPipeline(tanhs(4), [2, 2], chunks=4, loss_fn=mse)
optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-2)
start = pipeline.load(f"{folder}/checkpoints", optimizer) or 0
with open(f"{folder}/pid{rank}", "w") as file:
    file.write(str(os.getpid()))
if rank == 0:
    print("from", start, flush=True)
done = start
pipeline.save_on_sigterm(f"{folder}/checkpoints", optimizer, extra=lambda: done)
for k, (x, y) in enumerate(batches([8] * 40)):
    if k < start:
        continue
    optimizer.zero_grad()
    loss = pipeline.step(x, y, broadcast_loss=True)
    optimizer.step()
    done = k + 1
    if rank == 0:
        print(k, loss.item(), flush=True)
    time.sleep(0.05)
    if done % EVERY == 0:
        pipeline.save(f"{folder}/checkpoints", optimizer, extra=done)
"""


def losses():
    """Return those of a plain model that nothing happens to."""
    model = tanhs(4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for x, y in batches([8] * 40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def wait_for(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def read(output):
    """Return where runs began, and the losses by step."""
    lines = [line.split() for line in output.splitlines()]
    starts = [int(line[1]) for line in lines if line[0] == "from"]
    return starts, {int(line[0]): float(line[1]) for line in lines if line[0] != "from"}


def test_killed_and_restarted(tmp_path):
    """After kill -9 of a rank at a random moment, torchrun --max-restarts goes on from the last checkpoint."""
    job = start(2, TRAIN.replace("EVERY", "3"), tmp_path, options=("--max-restarts", "2"))
    try:
        checkpoints = tmp_path / "checkpoints"
        wait_for(lambda: checkpoints.exists() and list(checkpoints.glob("step-*")))
        time.sleep(random.uniform(0, 0.5))
        rank = random.randrange(2)
        os.kill(int((tmp_path / f"pid{rank}").read_text()), signal.SIGKILL)
        output, errors = job.communicate(timeout=180)
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate(timeout=60)
    assert job.returncode == 0, errors
    starts, found = read(output)
    assert len(starts) == 2
    assert starts[0] == 0
    assert starts[1] >= 3
    torch.testing.assert_close(torch.tensor([found[k] for k in range(40)]), torch.tensor(losses()))


def test_preempted(tmp_path):
    """SIGTERM to torchrun: the ranks save at the next step and leave; the next run goes on from there."""
    body = TRAIN.replace("EVERY", "1000")
    job = start(2, body, tmp_path)
    first = ""
    try:
        while not first.count("\n") > 4:
            first += job.stdout.readline()
        job.send_signal(signal.SIGTERM)
        rest, errors = job.communicate(timeout=120)
    finally:
        if job.poll() is None:
            job.kill()
            job.communicate(timeout=60)
    assert "as SIGTERM asked" in errors, errors
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    _, before = read(first + rest)
    output, _ = torchrun(2, body, tmp_path)
    starts, after = read(output)
    assert saved == [f"step-{starts[0]:08d}"]
    assert starts[0] == len(before) > 3
    found = {**before, **after}
    torch.testing.assert_close(torch.tensor([found[k] for k in range(40)]), torch.tensor(losses()))
