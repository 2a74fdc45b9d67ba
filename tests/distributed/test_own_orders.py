"""Orders of one's own over ranks: a CSV file or a schedule runs as written, with the gradients of the plain model."""

from __future__ import annotations

from pipesight.plan import load_schedule, save_schedule, zbv
from support.torchrun import torchrun

# Stages that follow each other on a rank, uneven numbers of them, and backwards of which only some are split.
ODD = """\
0F0,0F1,1F0,1F1,0F2,1F2,4F0,4I0,4F1,4B1,,4W0,4F2,4B2,1B0,1I1,1B2,0B0,1W1,0B1,0I2,0W2
2F0,3F0,2F1,3F1,2F2,3F2,3B0,2B0,3I1,2B1,3W1,3B2,2B2
"""

BODY = """
import csv
from pipesight.plan import load_schedule

class Tasks(context.Observer):
    def __init__(self):
        self.seen = []
    def task_started(self, where):
        self.seen.append((where.phase, where.partition, where.microbatch))

mse = nn.functional.mse_loss
ranks = (("odd.csv", 5, 3), (load_schedule("zbv.csv"), 4, 4))
for schedule, n, chunks in ranks:
    plain = tanhs(n)
    pipeline = DistributedPipeline(copy.deepcopy(plain), [1] * n, chunks=chunks, schedule=schedule, loss_fn=mse)
    for x, y in batches([4 * chunks, chunks, 2]):  # of the last, there are too few samples for the order
        tasks = Tasks()
        context.attach(tasks)
        expected = mse(plain(x), y)
        expected.backward()
        loss = pipeline.step(x, y, broadcast_loss=True)
        context.detach(tasks)
        torch.testing.assert_close(loss, expected.detach())
        assert_same_gradients(pipeline, plain)
        if len(x) >= chunks:
            with open(schedule if isinstance(schedule, str) else "zbv.csv") as file:
                cells = [cell for cell in [*csv.reader(file)][rank] if cell]
            names = {"forward": "F", "backward": "B", "weight": "W"}
            seen = [f"{j}{names[phase]}{i}" for phase, j, i in tasks.seen]
            assert seen == [cell.replace("I", "B") for cell in cells], (seen, cells)
        predicted = pipeline.predict(x)
        assert predicted is None or torch.allclose(predicted, plain(x))

plain = tanhs(5)
square = lambda y: y.square().mean()
cuts = ["1", "2", "3", "4"]
pipeline = DistributedPipeline(copy.deepcopy(plain), cuts=cuts, chunks=3, schedule="odd.csv", loss=square)
(x, _), = batches([6])
expected = square(plain(x))
expected.backward()
torch.testing.assert_close(pipeline.step(x, broadcast_loss=True), expected.detach())
assert_same_gradients(pipeline, plain)

def make(**settings):
    given = dict(chunks=3, schedule="odd.csv", loss_fn=mse) | settings
    return DistributedPipeline(tanhs(5), given.pop("balance", [1] * 5), **given)

for words, settings in (
    (["an order of 5 partitions on 2 ranks", "partitions: 4"], {"balance": [2, 1, 1, 1]}),
    (["an order of 3 chunks", "use chunks=3"], {"chunks": 4}),
    (["missing.csv"], {"schedule": "missing.csv"}),
    (["wrong.csv", "no backward of micro-batch 0 in stage 1"], {"schedule": "wrong.csv"}),
):
    error = error_of(make, **settings)
    assert all(word in str(error) for word in words), repr(error)
error = error_of(make, schedule="missing.csv" if rank else "odd.csv")
assert "missing.csv" in str(error) and (rank or "on rank 1" in str(error)), repr(error)
error = error_of(make, schedule="odd.csv" if rank else "other.csv")
assert "schedule" in str(error) and "odd (" in str(error) and "other (" in str(error), repr(error)
"""


def test_an_order_runs_as_written(tmp_path):
    """Each rank runs its line of the file, task by task; if a file differs or is missing on one, all raise."""
    (tmp_path / "odd.csv").write_text(ODD)
    (tmp_path / "other.csv").write_text(ODD.replace("2B1,3W1", "3W1,2B1"))
    (tmp_path / "wrong.csv").write_text("0F0,0B0\n1F0\n")
    save_schedule(zbv(4, 4), tmp_path / "zbv.csv")
    assert load_schedule(tmp_path / "zbv.csv").name == "zbv"
    torchrun(2, BODY, tmp_path)
