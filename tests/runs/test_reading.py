"""`open_run`: the tables of a run, exactly, and what can be read of one that is damaged."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipesight.runs.reading.duckdb_events import DuckEvents
from pipesight.runs.reading.event_codes import BACKWARD, CHECKPOINT, COMMUNICATION, DATA, FORWARD, OPTIMIZER, RECOMPUTE
from pipesight.runs.reading.event_tables import Table
from pipesight.runs.reading.run import NotARunError, Run, open_run
from support.processes import STRICT_PYTHON
from support.synthetic import START, Made

PHASES = {"forward": FORWARD, "recompute": RECOMPUTE, "backward": BACKWARD}


def rows(table: Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for column in table.columns().values()), strict=True))


def texts(run: Run) -> list[str]:
    return [note.text for note in run.notes]


def small(folder: Path, *, steps: int = 2) -> Made:
    """Return a run of two partitions and two micro-batches, the first of them recomputed."""
    made = Made(folder, balance=[2, 1], chunks=2)
    for step in range(steps):
        made.gpipe(
            step,
            lambda phase, i, j: 100 + 10 * i + j,
            at=step * 2000,
            checkpointed=1,
            layers=lambda j: [["a", "b"], ["c"]][j],
        )
    return made


# The tables.


def test_tasks(tmp_path):
    """Every task is there once, with its place and times, by mini-batch and begin."""
    made = Made(tmp_path / "run")
    made.task(3, minibatch=7, partition=1, microbatch=0, phase="backward", begin=50, dur=9, rank=1)
    made.task(3, minibatch=7, partition=0, microbatch=1, phase="recompute", begin=20, dur=5)
    made.task(4, minibatch=6, partition=0, microbatch=1, phase="forward", begin=90, dur=0)
    with open_run(made.write()) as run:
        assert rows(run.tasks()) == [
            (0, 4, 6, 0, 1, FORWARD, START + 90, START + 90),
            (0, 3, 7, 0, 1, RECOMPUTE, START + 20, START + 25),
            (1, 3, 7, 1, 0, BACKWARD, START + 50, START + 59),
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


# Runs that are not whole.


@pytest.mark.parametrize(("lost", "said"), [(0, []), (1, ["1 event was lost whi"]), (2345, ["2,345 events were lo"])])
def test_lost_events(lost, said, tmp_path):
    """Events that a file says could not be written are a note, of the file."""
    span = {"name": "step", "cat": "compute", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "ph": "X", "args": {"size": 9}}
    end = {**span, "name": "end", "cat": "dftracer", "args": {"num_events": 1, "lost_events": lost}}
    (tmp_path / "run.pfw").write_text(f"[\n{json.dumps(span)}\n{json.dumps(end)}\n]\n")
    with open_run(tmp_path) as run:
        assert [text[: len(start)] for text, start in zip(texts(run), said, strict=True)] == said


def test_missing_end(tmp_path):
    """A run whose process was killed is read, and told."""
    with open_run(small(tmp_path / "run").write(end=False)) as run:
        assert len(run.tasks()) == 20
        assert texts(run) == ["incomplete: its process was killed, or is still writing"]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_lines_that_are_no_events(packed, tmp_path):
    """Lines that are no events are left out and counted; of wrong types, what is right is taken."""
    event = {"name": "forward", "cat": "compute", "ph": "X", "pid": 1, "tid": 2, "ts": 5, "dur": 3}
    lines = [
        "[",
        json.dumps({**event, "args": {"step": "abc", "partition": 1, "microbatch": 0}}),
        json.dumps({**event, "args": 7}),
        json.dumps({**event, "pid": "main", "args": None}),
        json.dumps({**event, "ts": None}),  # 1
        json.dumps({**event, "dur": -3}),  # 2
        json.dumps({**event, "ts": 2**63 - 1, "dur": 2**62}),  # 3
        json.dumps({**event, "ts": 10**30}),  # 4
        "no",  # 5
        '{"ph":"X","name":"\xff',  # 6
        json.dumps({**event, "name": "x" * 40_000_000}),  # 7
        "\0\0\0",  # 8
        "[" * 100_000,  # 9
        json.dumps({"name": "thread_name", "ph": "M", "args": {"name": "x"}}),
        json.dumps({"name": "memory", "ph": "C", "ts": 1, "args": {"x": 1}}),
        "]",
    ]
    content = "\n".join(lines).encode("latin-1")
    path = tmp_path / "a.pfw"
    path.write_bytes(gzip.compress(content) if packed else content)
    with open_run(path) as run:
        assert (run.events, run.tasks().step.tolist()) == (3, [-1])
        assert texts(run) == ["skipped: 9 lines that are no events"]


@pytest.mark.parametrize("length", [2**20 - 200, 2**20 + 200, 2**21 - 100, 2**21 + 100, 2**22])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_lines_of_any_length(length, place, tmp_path):
    """A line that is too long to be read does not keep others from being read."""
    short = b'{"ph":"X","name":"short","ts":1,"dur":1}'
    long = b'{"ph":"X","name":"long","ts":1,"dur":1,"args":{"x":"%s"}}' % (b"y" * length)
    lines = {"first": [long, short, short], "middle": [short, long, short], "last": [short, short, long]}[place]
    (tmp_path / "a.pfw.gz").write_bytes(gzip.compress(b"\n".join([b"[", *lines, b"]"])))
    with open_run(tmp_path) as run:
        table = dict(zip(run.names().name.tolist(), run.names().count.tolist(), strict=True))
        assert table["short"] == 2
        assert ("long" in table) != ("skipped: 1 line that is no event" in texts(run))
        assert "long" in table or length > 2**20
    (tmp_path / "b.pfw").write_bytes(short)
    with open_run(tmp_path) as run:
        assert dict(zip(run.names().name.tolist(), run.names().count.tolist(), strict=True))["short"] == 3
        assert ("long" in run.names().name) == ("long" in table)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2**23])
def test_half_characters(size, tmp_path):
    """Text that is no Unicode, which Python escapes, costs no event, in a small file or a large one."""
    event = {"ph": "X", "ts": 1, "dur": 1}
    more = [{**event, "name": "x", "args": {"noise": os.urandom(size // 1000).hex()}} for _ in range(500)]
    layers = ["\ud800", "\udfff\ud83d\ude00", "\\ud800", "\u00e9"] * 2
    tasks = [
        {**event, "name": "forward.layer", "cat": "compute", "args": {"partition": 0, "step": 0, "layer": layer}}
        for layer in layers
    ]
    lines = ["[", *map(json.dumps, [*tasks, *more]), "]"]
    (tmp_path / "a.pfw.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    with open_run(tmp_path) as run:
        assert run.layer_times().layer.tolist() == sorted(["\ufffd", "\ufffd\U0001f600", "\\ud800", "\u00e9"])
        assert (run.events, run.notes) == (508, [])


def test_zeros_at_the_end(tmp_path):
    """Zeros behind the last member, or in the midst of it, as a crash of the machine leaves them, do no harm."""
    trace = small(tmp_path / "run").write() / "trace/rank-00000.pfw.gz"
    whole = trace.read_bytes()
    trace.write_bytes(whole + bytes(100_000))
    with open_run(tmp_path / "run") as run:
        assert (len(run.tasks()), run.notes) == (20, [])
    trace.write_bytes(whole[:-30] + bytes(100_000))
    with open_run(tmp_path / "run") as run:
        assert 0 < len(run.tasks()) <= 20
        assert texts(run) == ["incomplete: its process was killed, or is still writing"]


def test_run_json_that_is_damaged(tmp_path):
    """Without a description that can be read, the rest is."""
    path = small(tmp_path / "run").write()
    (path / "ranks").mkdir()
    (path / "ranks/rank-00001.json").write_text("[1]")
    for content in (b"", b"{", b"\xff", b"[" * 100_000):
        (path / "run.json").write_bytes(content)
        with open_run(path) as run:
            assert run.description == {}
            assert len(run.tasks()) == 20
            assert texts(run) == ["skipped: it is not JSON", "skipped: it is not a JSON object"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, []),
        ({"format_version": 0}, []),
        ({"format_version": 2}, ["format version 2, but pipesight", "knows versions up to 1", "upgrade pipesight"]),
        ({"format_version": "new"}, ["format version 'new'"]),
        ({"format": "other-run"}, ["not written by pipesight (format: 'other-run')"]),
    ],
)
@pytest.mark.parametrize("file", ["run.json", "ranks/rank-00001.json"])
def test_versions_of_the_format(tmp_path, file, facts, said):
    """A description of a newer format, or of another one, is read as far as it goes, with a warning."""
    path = small(tmp_path / "run").write()
    (path / "ranks").mkdir()
    (path / "ranks/rank-00001.json").write_text(json.dumps({"rank": 1, "host": "b"}))
    known = json.loads((path / file).read_bytes())
    (path / file).write_text(json.dumps(known | facts))
    with open_run(path) as run:
        assert len(run.tasks()) == 20
        found = [note.text for note in run.notes if note.path == path / file]
        assert len(found) == bool(said)
        assert all(words in found[0] for words in said)


def test_run_that_has_just_begun(tmp_path):
    """A run directory without any event is a run."""
    path = small(tmp_path / "run").write()
    shutil.rmtree(path / "trace")
    for step in range(2):
        with open_run(path) as run:
            assert (run.events, run.steps(), run.ranks(), len(run.tasks()), len(run.names())) == (0, [], [], 0, 0)
            assert run.description["format"] == "pipesight-run"
            assert texts(run) == [*["skipped: it is empty"] * step, "it contains no trace"]
        (path / "trace").mkdir(exist_ok=True)
        (path / "trace/rank-00000.pfw.gz").touch()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "no events in "),
        ({"notes.txt": b"x"}, "no events in "),
        ({"a.pfw.gz": b""}, r"\(a.pfw.gz: skipped: it is empty\)"),
        ({"a.pfw": b"[\n]\n"}, r"\(a.pfw: it contains no spans\)"),
        ({"a.pfw.gz": b"\x1f\x8bxx"}, r"\(a.pfw.gz: damaged: the checksum fails for 4 bytes; "),
        ({"a.json": b"{}}"}, r"\(a.json: skipped: it contains no events\)"),
        ({"a.json": b'{"traceEvents": []}', "b.json": b"nothing"}, r"\(.*; and 1 more\)"),
    ],
)
def test_nothing_to_report(files, error, tmp_path):
    """Where there is nothing to report, the error says what was looked at, and what to give."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(NotARunError, match=error) as caught:
        open_run(tmp_path)
    assert str(caught.value).endswith("; give a run directory, or a trace such as trace.pfw.gz")
    with pytest.raises(NotARunError, match=r"no such file or folder: '.*gone'"):
        open_run(tmp_path / "gone")
    with pytest.raises(NotARunError, match="neither a file nor a folder: '/dev/zero'"):
        open_run("/dev/zero")


def test_file_that_cannot_be_opened(tmp_path):
    """A link to nowhere among the traces does no harm."""
    path = small(tmp_path / "run").write()
    (path / "trace/rank-00001.pfw.gz").symlink_to("gone")
    (path / "trace/rank-00002.pfw.gz").mkdir()
    with open_run(path) as run:
        assert len(run.tasks()) == 20


# Runs that are mixed up.


def test_two_runs_in_a_folder(tmp_path):
    """Of two runs in one folder, the newer is read, and the other left out with all its ranks, and told."""
    for name, age, ranks in (("a", 2000, 1), ("b", 1000, 3)):
        made = small(tmp_path / name)
        for rank in range(1, ranks):
            made.span("a", "b", begin=0, dur=1, rank=rank)
        made.write()
        for trace in (tmp_path / name / "trace").iterdir():
            os.utime(trace, (age, age))
    with open_run(tmp_path) as run:
        assert (len(run.tasks()), run.ranks()) == (20, [0])
        (note,) = run.notes
        assert note.path == tmp_path / "b/trace"
        assert note.text == (
            f"skipped: {str(tmp_path / 'a/trace')!r} has traces of the same ranks; give the folder that you mean"
        )


def test_two_files_of_a_rank(tmp_path):
    """Of two files of one rank, the newer is read, or that of the process that the run names."""
    trace = small(tmp_path / "run").write() / "trace"
    other = Made(tmp_path / "other")
    other.span("a", "b", begin=0, dur=1, rank=1)
    shutil.copy(other.write() / "trace/rank-00001.pfw.gz", trace / "old-rank-00000.pfw.gz")
    for pid, older, expected in ((4000, 1, 20), (4001, 1, 0), (None, 1, 20), (None, 10**10, 0)):
        (tmp_path / "run/run.json").write_text(json.dumps({"rank": 0, "pid": pid}))
        os.utime(trace / "old-rank-00000.pfw.gz", (older, older))
        with open_run(tmp_path / "run") as run:
            assert len(run.tasks()) == expected
            assert [text.partition(": ")[2].partition("'")[2] for text in texts(run)] == [
                f"{'' if expected else 'old-'}rank-00000.pfw.gz' is of rank 0 too; give the file that you mean"
            ]


def test_files_of_an_older_run(tmp_path):
    """Parts of another process, and ranks that the run has not, are those of an older run."""
    made = small(tmp_path / "run")
    trace = made.write() / "trace"
    old = Made(tmp_path / "old")
    for rank in (1, 5):
        old.span("a", "b", begin=0, dur=1, rank=rank)
    before = old.write() / "trace"
    shutil.copy(before / "rank-00001.pfw.gz", trace / "rank-00000.part2.pfw.gz")
    shutil.copy(before / "rank-00005.pfw.gz", trace / "rank-00005.pfw.gz")
    with open_run(tmp_path / "run") as run:
        assert (len(run.tasks()), run.events) == (20, len(made.events[0]))
        assert {note.path.name: note.text for note in run.notes} == {
            "rank-00000.part2.pfw.gz": "skipped: of process 4001, but the first part is of process 4000",
            "rank-00005.pfw.gz": "skipped: of another run; this one has ranks 0 to 0",
        }


def test_copies_in_other_formats(tmp_path):
    """A converted trace beside the trace is not read a second time."""
    path = small(tmp_path / "run").write() / "trace"
    events = gzip.decompress((path / "rank-00000.pfw.gz").read_bytes()).decode().splitlines()[1:-1]
    (path / "trace.json").write_text(f'{{"traceEvents":[{",".join(events)}]}}')
    (path / "other.json").write_text("{}")
    with open_run(path.parent) as run:
        assert len(run.tasks()) == 20
        assert [(note.path.name, note.text) for note in run.notes] == [
            ("trace.json", "skipped: taken for a copy of the .pfw files")
        ]


# Any damage.


def members(made: Made) -> tuple[bytes, list[bytes]]:
    """Return a trace as pipesight writes it, a few events a member, and its lines."""
    lines = [b"[\n", *(json.dumps(event).encode() + b"\n" for event in made.events[0]), b"]\n"]
    return b"".join(gzip.compress(b"".join(lines[at : at + 7])) for at in range(0, len(lines), 7)), lines


WHOLE, LINES = members(small(Path("unused")))
TRUTH = [
    (event["name"], event["ts"] - START, event["ts"] + event["dur"] - START, event["args"].get("layer", ""))
    for event in map(json.loads, LINES[1:-1])
]


def contents(path: Path) -> list[tuple[Any, ...]]:
    """Return all spans that can be read, if any."""
    try:
        run = open_run(path)
    except NotARunError:
        return []
    with run:
        str(run.notes)
        columns = run._events.fetch(run._events.frame.select("name", "begin", "end", "layer"))
        assert len(columns["name"]) == run.events
        found = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [(name, begin - START, end - START, layer) for name, begin, end, layer in found]


def is_part(some: list[tuple[Any, ...]], whole: list[tuple[Any, ...]]) -> bool:
    rest = list(whole)
    for item in some:
        if item not in rest:
            return False
        rest.remove(item)
    return True


some_examples = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.mark.slow
@some_examples
@given(cut=st.integers(0, len(WHOLE)), packed=st.booleans())
def test_cut_anywhere(cut, packed, tmp_path):
    """Of a file that ends anywhere, all events up to there are read and no others."""
    content = WHOLE if packed else b"".join(LINES)
    path = tmp_path / "a.pfw.gz"
    path.write_bytes(content[:cut])
    found = contents(path)
    assert is_part(found, TRUTH[: len(found)])
    if not packed and content[:cut].count(b"\n"):
        assert content[:cut].count(b"}\n") <= len(found)


@pytest.mark.slow
@some_examples
@given(place=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7))
def test_any_bit_flipped(place, bit, tmp_path):
    """Of a file with one wrong bit, what fails its checksum is left out, and all the rest is there."""
    content = bytearray(WHOLE)
    content[place] ^= 1 << bit
    path = tmp_path / "a.pfw.gz"
    path.write_bytes(content)
    found = contents(path)
    assert is_part(found, TRUTH)
    assert len(found) >= len(TRUTH) - 14


@pytest.mark.slow
@some_examples
@given(
    content=st.binary(max_size=200), start=st.sampled_from([b"", b"[\n", b"\x1f\x8b\x08", b'{"traceEvents":[', b"{"])
)
def test_any_bytes(content, start, tmp_path):
    """Any bytes give tables, or the error that says that there is nothing."""
    for name in ("a.pfw.gz", "a.json", "a.jsonl"):
        (tmp_path / name).write_bytes(start + content)
        contents(tmp_path / name)


@pytest.mark.slow
@some_examples
@given(
    pieces=st.lists(st.sampled_from([*LINES[:3], b"\n", b"]", b",", b"{", b'"', b"\0", b"\xff", b"NaN"]), max_size=9)
)
def test_any_mixture_of_lines(pieces, tmp_path):
    """Lines that were torn apart give no event that was not there."""
    for name, content in (("a.pfw", b"".join(pieces)), ("a.pfw.gz", gzip.compress(b"".join(pieces)))):
        (tmp_path / name).write_bytes(content)
        assert set(contents(tmp_path / name)) <= set(TRUTH)


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
