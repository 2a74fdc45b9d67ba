"""Recorded runs whose ranks torchrun starts anew, on nodes that count restarts differently."""

import json
import os

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.runs.directory import RunDirectory
from pipesight.runs.reading.run import open_run
from support.nodes import Here, nodes
from support.observed import STATS, description
from support.torchrun import END, RANK

# A node counts the restarts that its own ranks made necessary, and none that follow from those of another node.
TRAIN = """
from pathlib import Path
attempt = len(list(Path(folder).glob(f"began-{rank}-*")))
Path(f"{folder}/began-{rank}-{attempt}").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
pipeline = DistributedPipeline(tanhs(2), [1, 1], chunks=2, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(pipeline.parameters(), 1e-2)
for x, y in batches([4] * (attempt + 2)):
    optimizer.zero_grad()
    pipeline.step(x, y)
    optimizer.step()
dist.barrier()
if attempt < 2 and rank != attempt:
    raise ValueError("no, thanks")
if attempt < 2:
    time.sleep(1000)  # until the torchrun of this node ends it
"""


def test_nodes_count_restarts_differently(tmp_path):
    """Each crash costs the one restart of its node, and none of the other; all attempts are there, with all ranks."""
    script = tmp_path / "train.py"
    script.write_text(RANK + TRAIN + END)
    run = tmp_path / "RUN"
    (tmp_path / "stats.yaml").write_text(json.dumps(STATS))
    through = ("-m", "pipesight", "run", "--out", run, "--stats", "stats.yaml")
    with nodes([Here(), Here()], [script], tmp_path, options=["--max-restarts", "1"], through=through) as job:
        job.ends_well()
    told = {file.name: int(file.read_text()) for file in tmp_path.glob("began-*")}
    assert told == {
        **{"began-0-0": 0, "began-0-1": 0, "began-0-2": 1},  # its own crash was the second
        **{"began-1-0": 0, "began-1-1": 1, "began-1-2": 1},
    }
    own = json.loads((run / "ranks" / "rank-00001.json").read_text())
    assert [facts["restart"] for facts in (description(run), own)] == [2, 2]
    for attempt in range(3):
        with open_run(run, attempt=attempt) as opened:
            report = analyse(opened)
            logged = {line.rank for line in opened.log_lines()}
            counted = {(line["rank"], line["iteration"]) for line in opened.statistics()}
        assert (report.attempt, report.attempts, report.ranks) == (attempt, (0, 1, 2), (0, 1))
        assert report.steps.step.tolist() == list(range(attempt + 2))
        assert logged == {0, 1}
        assert counted == {(rank, step) for rank in (0, 1) for step in range(attempt + 2)}


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """Let torchrun start rank 1, which leaves a description; return the directory, and what starts it once more."""

    def start(launch, told=0):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(told))
        errors = f"/tmp/torchelastic_a/{launch}/attempt_{told}/0/error.json" if launch else ""
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", errors)
        return RunDirectory(tmp_path / "RUN")

    directory = start("job_1")
    directory.claim()
    directory.description.parent.mkdir()

    def describe(**more):
        facts = {"rank": 1, "restart": 0, "launch": directory.launch, "pid": os.getpid() + 1, **more}
        directory.description.write_text(json.dumps(facts))

    describe()
    return start, describe


def test_the_same_torchrun_goes_on(earlier):
    """Another attempt of one torchrun has the next number, whatever it is told, and nothing is written over."""
    start, describe = earlier
    for told, last, number in [(0, 0, 1), (0, 4, 5), (1, 0, 1), (1, 1, 2), (3, 1, 3)]:
        describe(restart=last)
        directory = start("job_1", told)
        directory.claim(overwrite=True)
        assert directory.restart == number
        assert directory.trace.name == f"rank-00001-restart-{number}"
        assert directory.log.name == f"rank-00001-restart-{number}.log"
        assert directory.description.exists()


@pytest.mark.parametrize("facts", [{}, {"launch": None}, {"pid": os.getpid()}])
def test_others_are_refused(earlier, facts):
    """What another job wrote, be it one of the same name, is not gone on with; nor is what this very process wrote."""
    start, describe = earlier
    describe(**facts)
    for launch in ("job_1",) if facts else ("job_2", "other_1"):
        for told in (0, 1):  # by then it would be too late to say so
            with pytest.raises(FileExistsError, match=r"must be empty, but .* holds 'ranks/rank-00001.json'"):
                start(launch, told).claim()


def test_another_launcher_is_believed(earlier):
    """Where nothing tells launches apart, an attempt that says it is a later one is."""
    start, describe = earlier
    describe(launch=None)
    directory = start("", told=1)
    assert directory.launch is None
    directory.claim()
    assert directory.restart == 1
    describe(launch=None, restart=1)
    with pytest.raises(FileExistsError, match="must be empty"):
        start("", told=1).claim()
