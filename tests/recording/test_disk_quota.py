"""The disk quota of a run."""

import fcntl
import gzip
import os
import re

import pytest

from pipesight.recording import observe
from pipesight.runs.directory import RunDirectory
from support.observed import description, log_lines, pipeline, sgd, tasks, train


@pytest.mark.slow
def test_oldest_parts_are_removed(run):
    """With a limit, the trace is rotated: the newest steps stay, and what is gone is counted."""
    limit = 128 * 1024
    model = pipeline(chunks=8)
    optimizer = sgd(model)
    with observe(run, max_bytes=limit) as observation:
        for _ in range(60):
            train(model, 5, optimizer)
            observation.flush()
    files = list((run / "trace").iterdir())
    assert 1 < len(files) <= 8
    sizes = sum(file.stat().st_size for file in files) + (run / "logs/rank-00000.log").stat().st_size
    assert sizes <= limit * 1.05
    steps = sorted({e["args"]["step"] for e in tasks(run)})
    assert steps[-1] == 299
    assert steps == list(range(steps[0], 300))
    assert steps[0] > 0
    left_out = description(run)["left_out"]
    assert left_out["events"] > 0
    assert left_out["log_lines"] > 0
    first = log_lines(run)[0]
    assert "[step 0 " not in first
    assert first.startswith("2")


def test_traces_of_ended_processes_are_removed(run):
    """Files of processes that a rank has started go too, the oldest first; those being written stay."""
    from pipesight.runs.disk_quota import DiskQuota

    folder = run / "trace"
    folder.mkdir(parents=True)
    line = b'{"ph":"X"}\n'
    for number in range(4):
        file = folder / f"rank-00000-{number}.pfw.gz"
        file.write_bytes(gzip.compress(line * 5) + bytes(30_000))
        os.utime(file, (number, number))
    (folder / "rank-00000.pfw.gz").write_bytes(b"")
    with open(folder / "rank-00000-0.pfw.gz") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        quota = DiskQuota(RunDirectory(run), 75_000)
        quota.enforce()
    assert sorted(file.name for file in folder.iterdir()) == [
        "rank-00000-0.pfw.gz",
        "rank-00000-3.pfw.gz",
        "rank-00000.pfw.gz",
    ]
    assert quota.removed_events == 10


@pytest.mark.parametrize("quota", [1000, float("nan"), "1G"])
def test_disk_quota_that_is_too_small(run, quota):
    """A quota that holds nothing, or is no number, is refused."""
    rule = f"max_bytes must be at least 65,536, or None for no limit (max_bytes: {quota!r})"
    with pytest.raises(ValueError, match=re.escape(rule)):
        observe(run, max_bytes=quota)
