"""`open_run`: the tables of a run, exactly; its ranks, files, statistics and logs."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.runs.reading.duckdb_events import DuckEvents
from pipesight.runs.reading.event_codes import BACKWARD, CHECKPOINT, COMMUNICATION, DATA, FORWARD, OPTIMIZER, RECOMPUTE
from pipesight.runs.reading.run import open_run
from support.processes import STRICT_PYTHON
from support.read import rows, small, some_examples, texts
from support.synthetic import START, Made


# The tables.
def test_tasks(tmp_path):
    """Every task is there once, with its place and times, by mini-batch and begin."""
    made = Made(tmp_path / "run")
    made.task(3, minibatch=7, partition=1, microbatch=0, phase="backward", begin=50, dur=9, rank=1)
    made.task(3, minibatch=7, partition=0, microbatch=1, phase="recompute", begin=20, dur=5)
    made.task(4, minibatch=6, partition=0, microbatch=1, phase="forward", begin=90, dur=0)
    with open_run(made.write()) as run:
        assert rows(run.tasks()) == [
            (0, 4, 6, 0, 1, FORWARD, START + 90, START + 90, 16),
            (0, 3, 7, 0, 1, RECOMPUTE, START + 20, START + 25, -1),
            (1, 3, 7, 1, 0, BACKWARD, START + 50, START + 59, -1),
        ]
        assert all(column.dtype == np.int64 for column in run.tasks().columns().values())
        assert (run.steps(), run.ranks(), run.events, run.notes) == ([3, 4], [0, 1], 3, [])


def test_description(tmp_path):
    """The description is what run.json says."""
    made = small(tmp_path / "run")
    made.description["host"] = "there"
    with open_run(made.write()) as run:
        assert run.description == json.loads((tmp_path / "run/run.json").read_text())
        assert run.description["host"] == "there"
        assert run.path == tmp_path / "run"


@pytest.mark.parametrize(
    ("window", "steps"),
    [(range(1, 3), [1, 2]), (range(0, 5, 2), [0, 2, 4]), (range(3, 0, -2), [1, 3]), (range(0), []), (None, range(5))],
)
def test_some_steps(window, steps, tmp_path):
    """A range of steps narrows tasks, transfers and layers to those in it."""
    made = small(tmp_path / "run", steps=5)
    for step in range(5):
        made.transfer(step, partition=1, microbatch=0, begin=step, dur=1)
    with open_run(made.write()) as run:
        assert sorted(set(run.tasks(window).step.tolist())) == list(steps)
        assert run.transfers(window).step.tolist() == list(steps)
        assert sum(run.layer_times(window).count.tolist()) == 15 * len(steps)


def test_transfers(tmp_path):
    """A transfer has its size, and the partition that it goes to; one without a partition is none of a pipeline's."""
    made = Made(tmp_path / "run")
    made.transfer(0, partition=1, microbatch=3, begin=5, dur=2, size=2**40)
    made.span("device", "transfer", begin=1, dur=1, size=7)
    with open_run(made.write()) as run:
        assert rows(run.transfers()) == [(0, 0, 1, 1, 3, START + 5, START + 7, 2**40)]


def test_spans_of_the_main_thread(tmp_path):
    """Spans beside the pipeline are those of the main thread, each of its kind, and not the body of a loop."""
    made = Made(tmp_path / "run")
    names = [
        ("dataloader", "fetch"),
        ("dataloader", "fetch.iter"),
        ("data", "item"),
        ("compute", "step"),
        ("checkpoint", "capture"),
        ("comm", "all_reduce.wait"),
        ("dataloader", "fetch.block"),
        ("compute", "forward"),
        ("pipeline", "epoch"),
    ]
    for number, (category, name) in enumerate(names):
        made.span(category, name, begin=10 * number, dur=5)
    made.event("dataloader", "fetch", begin=3, dur=4, tid=77)
    with open_run(made.write()) as run:
        spans = run.spans()
        assert spans.kind.tolist() == [DATA, DATA, DATA, OPTIMIZER, CHECKPOINT, COMMUNICATION]
        assert (spans.begin - START).tolist() == [0, 10, 20, 30, 40, 50]
        assert len(run.tasks()) == 0


def test_layers(tmp_path):
    """A layer's times are counted by phase; a step's runs of layers are there one by one."""
    made = Made(tmp_path / "run")
    for step, times in enumerate([(60, 40), (30, 50)]):
        layers = dict(zip(["a", 'b"</script>'], times, strict=True))
        made.task(step, partition=1, microbatch=0, phase="forward", begin=0, dur=100, layers=layers)
    with open_run(made.write()) as run:
        assert rows(run.layer_times()) == [(0, 1, "a", FORWARD, 2, 90, 60), (0, 1, 'b"</script>', FORWARD, 2, 90, 50)]
        assert rows(run.layer_runs(1)) == [
            (0, 1, 2, 1, 0, FORWARD, "a", START, START + 30),
            (0, 1, 2, 1, 0, FORWARD, 'b"</script>', START + 30, START + 80),
        ]
        assert run.layer_runs(0, 1).step.tolist() == [0, 0, 1, 1]
        assert len(run.layer_runs(9)) == 0


def test_names(tmp_path):
    """The time of every name is there, the longest first, for traces that have no pipeline."""
    made = Made(tmp_path / "run")
    for begin in (0, 10):
        made.span("mine", "short", begin=begin, dur=3)
    made.span("", "long", begin=0, dur=100)
    with open_run(made.write()) as run:
        assert rows(run.names()) == [("", "long", 1, 100), ("mine", "short", 2, 6)]


def test_device_spans_first(tmp_path):
    """Where a partition has spans of its GPU, those of the host are left out, of tasks and of layers."""
    made = Made(tmp_path / "run")
    for device, begin in ((None, 0), ("cuda:0", 7)):
        made.task(0, partition=0, microbatch=0, phase="forward", begin=begin, dur=2, device=device, layers={"a": 1})
    made.task(0, partition=1, microbatch=0, phase="forward", begin=20, dur=3, layers={"b": 2})
    with open_run(made.write()) as run:
        tasks = run.tasks()
        assert (tasks.begin - START).tolist() == [7, 20]
        assert run.layer_times().layer.tolist() == ["a", "b"]
        assert (run.layer_runs(0).begin - START).tolist() == [7, 20]


def test_trace_from_before_mini_batches_had_numbers(tmp_path):
    """Without a number of the mini-batch, a task belongs to that of its step."""
    made = Made(tmp_path / "run")
    made.task(5, partition=0, microbatch=0, phase="forward", begin=0, dur=1)
    del made.events[0][0]["args"]["minibatch"]
    with open_run(made.write()) as run:
        assert run.tasks().minibatch.tolist() == [5]


# Ranks and files.
def test_children_count_to_their_rank(tmp_path):
    """The file of a process that a rank started counts to it, but its main thread is not the program's."""
    made = Made(tmp_path / "run")
    made.span("dataloader", "fetch", begin=0, dur=5)
    path = made.write() / "trace"
    child = gzip.decompress((path / "rank-00000.pfw.gz").read_bytes())
    (path / "rank-00000-77.pfw.gz").write_bytes(gzip.compress(child))
    with open_run(tmp_path / "run") as run:
        assert (run.ranks(), run.events, len(run.spans())) == ([0], 2, 1)


def test_ranks_of_names_processes_and_order(tmp_path):
    """A rank is in the file's name, or that of the process that ranks/*.json names, or the place in the folder."""
    made = Made(tmp_path / "run", world_size=9)
    for rank in range(3):
        made.span("a", "b", begin=rank, dur=1, rank=rank)
    trace = made.write() / "trace"
    (tmp_path / "run/ranks").mkdir()
    (tmp_path / "run/ranks/rank-00008.json").write_text(json.dumps({"rank": 8, "pid": 4001}))
    (trace / "rank-00000.pfw.gz").rename(trace / "trace-rank-00005.pfw.gz")
    (trace / "rank-00001.pfw.gz").rename(trace / "x.pfw.gz")
    (trace / "rank-00002.pfw.gz").rename(trace / "y.pfw.gz")
    shutil.copy(trace / "y.pfw.gz", trace / "y-12.pfw.gz")
    with open_run(tmp_path / "run") as run:
        assert run.ranks() == [5, 6, 8]
        assert run.events == 4


def test_parts(tmp_path):
    """The parts of a trace belong together, for a folder as for its first file."""
    made = small(tmp_path / "run")
    trace = made.write() / "trace"
    shutil.copy(trace / "rank-00000.pfw.gz", trace / "rank-00000.part2.pfw.gz")
    for path in (tmp_path / "run", trace, trace / "rank-00000.pfw.gz"):
        with open_run(path) as run:
            assert (len(run.tasks()), run.ranks(), run.notes) == (40, [0], [])
    with open_run(trace) as run:
        assert run.path == tmp_path / "run"
    with open_run(trace / "rank-00000.part2.pfw.gz") as run:
        assert len(run.tasks()) == 20


def test_names_that_are_patterns(tmp_path):
    """What would be a pattern in a path is part of the name."""
    path = small(tmp_path / "a[0-9]*?'{}").write()
    with open_run(path) as run:
        assert len(run.tasks()) == 20


def test_clock_of_a_rank(tmp_path):
    """What the clock of a rank is off by is added to its times."""
    made = Made(tmp_path / "run", clock={"offset_ns": 5, "error_ns": 0, "offset_correction_ns": -3_000_000})
    for rank in range(2):
        made.span("a", "b", begin=0, dur=1, rank=rank)
        made.span("comm", "send", begin=9000, dur=1, rank=rank)
    (made.write() / "ranks").mkdir()
    correction = {"rank": 1, "pid": 4001, "clock": {"offset_correction_ns": 2_000_500}}
    (tmp_path / "run/ranks/rank-00001.json").write_text(json.dumps(correction))
    with open_run(tmp_path / "run") as run:
        assert (run.spans().begin - START).tolist() == [6000, 11000]


# Statistics and logs.
def test_statistics(tmp_path):
    """Statistics come with their rank; lines that are cut off or no objects are counted."""
    made = small(tmp_path / "run")
    made.stat("a", "output", "mean", 0, 1.5)
    made.stat("a", "output", "max", 0, None, rank=12)
    path = made.write() / "stats"
    with (path / "rank-00000.jsonl").open("a") as file:
        file.write('7\n\n{"iteration": 1, "la')
    with open_run(tmp_path / "run") as run:
        assert [(line["rank"], line["statistic"], line["value"]) for line in run.statistics()] == [
            (0, "mean", 1.5),
            (12, "max", None),
        ]
        assert texts(run) == ["skipped: 2 lines that are no JSON objects"]
        assert len(list(run.statistics())) == 2
        assert len(run.notes) == 1


def test_log_lines(tmp_path):
    """A log line says when and where; what follows without a time belongs to it."""
    made = small(tmp_path / "run")
    made.log(
        "2026-11-15T10:00:00.123456+00:00 INFO pipesight.pipeline "
        "[step 3 partition 1 micro-batch 0 forward layer my layer] a [b]"
    )
    made.log("2026-11-15T10:00:01+00:00 ERROR mine [not a place] failed", rank=3)
    made.log("Traceback", rank=3)
    made.log("2026-11-15T10:00:02+00:00 WARNING mine again", rank=3)
    with open_run(made.write()) as run:
        first, second, third = run.log_lines()
    assert (first.rank, first.time, first.level, first.logger) == (0, 1794736800123456, "INFO", "pipesight.pipeline")
    assert (first.step, first.partition, first.microbatch, first.phase, first.layer, first.message) == (
        (3, 1, 0, "forward", "my layer", "a [b]")
    )
    assert (second.rank, second.level, second.message, second.step) == (
        3,
        "ERROR",
        "[not a place] failed\nTraceback",
        None,
    )
    assert (third.message, third.time) == ("again", 1794736802000000)


@pytest.mark.slow
@some_examples
@given(content=st.binary(max_size=300))
def test_any_bytes_as_statistics_and_logs(content, tmp_path):
    """Statistics and logs of any bytes are read as far as they go."""
    for name in ("stats/rank-00000.jsonl", "logs/rank-00000.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with open_run(tmp_path) as run:
        assert all(isinstance(line, dict) for line in run.statistics())
        assert "".join(line.message for line in run.log_lines()).count("\n") <= content.count(b"\n")


# Real runs, and what reading them takes.
RECORD = """
import os, signal, sys
import pipesight.trace
from pipesight.trace import ai
session = pipesight.trace.start(sys.argv[1])
for step in range(100):
    with ai.compute.forward(args={"step": step, "partition": 0, "microbatch": 0, "minibatch": step}):
        pass
session.flush()
print("ready", flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_run_that_is_being_written_and_then_killed(tmp_path):
    """A trace is read while its process writes, and after it was killed."""
    path = tmp_path / "run.pfw.gz"
    command = [*STRICT_PYTHON, "-c", RECORD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for end in (False, True):
            if end:
                process.stdin.close()
                process.wait()
            with open_run(path) as run:
                assert run.tasks().step.tolist() == list(range(100))
                assert texts(run) == ["incomplete: its process was killed, or is still writing"]


def test_nothing_is_printed():
    """DuckDB shows no progress, which it does on stdout when a query takes seconds."""
    events = DuckEvents()
    assert events._database.execute("SELECT current_setting('enable_progress_bar')").fetchall() == [(False,)]
    events.close()


MEASURE = """
import sys
from pathlib import Path
from pipesight.runs.reading.run import open_run
def main():
    with open_run(sys.argv[1]) as run:
        tables = [run.tasks(), run.transfers(), run.spans(), run.layer_times(), run.names(), run.steps(), run.ranks()]
        print([len(table) for table in tables], run.events, len(run.notes))
main()
print([name for name in ("torch", "pandas", "pyarrow", "rich", "dask") if name in sys.modules])
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # ru_maxrss knows of the parent
"""


def measure(path: Path) -> tuple[str, int]:
    """Read a run in a process of its own; return what it found, and how many kilobytes it took."""
    command = [*STRICT_PYTHON, "-c", MEASURE, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (0, "")
    found, imported, kilobytes = ended.stdout.splitlines()
    assert imported == "[]"
    return found, int(kilobytes)


@pytest.mark.timeout(240)
def test_a_thousand_ranks(tmp_path):
    """A thousand files are read in little memory, with nothing slow imported, and nothing is said at the end."""
    made = small(tmp_path / "run", steps=20)
    first = made.write() / "trace/rank-00000.pfw.gz"
    for rank in range(1, 1000):
        os.link(first, first.with_name(f"rank-{rank:05}.pfw.gz"))
    (tmp_path / "run/run.json").unlink()
    events = len(made.events[0])
    found, kilobytes = measure(tmp_path / "run")
    assert found == f"[200000, 0, 0, 9000, 6, 20, 1000] {1000 * events} 0"
    assert kilobytes < 600_000


def test_damage_in_a_large_file(tmp_path):
    """A large file is checked as well: damage that the reading itself does not meet is told."""
    line = json.dumps({"name": "a", "ph": "X", "ts": 1, "dur": 1, "args": {"x": os.urandom(3000).hex()}}).encode()
    content = bytearray(gzip.compress(b"[\n" + b"\n".join([line] * 2000) + b"\n]\n", 0))
    content[-5] ^= 1  # of the checksum
    path = tmp_path / "a.pfw.gz"
    path.write_bytes(content)
    with open_run(path) as run:
        assert run.events == 2000
        (text,) = texts(run)
        assert text.startswith("damaged: ")
        assert text.endswith("; some of its events may be wrong")
