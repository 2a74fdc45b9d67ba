"""`pipesight convert`: any trace, whole or not, becomes JSON that any viewer reads."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipesight.runs.reading.run import open_run
from support.commands import pipesight
from support.processes import STRICT_PYTHON
from support.synthetic import Made

RECORD = """
import os, signal, sys
import pipesight.trace
from pipesight.trace import ai
session = pipesight.trace.start(sys.argv[1], compress=sys.argv[2] != "plain", max_bytes=int(sys.argv[3]) or None)
for step in range(int(sys.argv[4])):
    with ai.compute.forward(args={"step": step, "odd": '"\\n\\ud800'}):
        pass
if sys.argv[2] == "killed":
    session.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def record(path: Path, *, events: int = 10, how: str = "packed", max_bytes: int = 0) -> None:
    """Write a trace, by a process of its own."""
    command = [*STRICT_PYTHON, "-c", RECORD, str(path), how, str(max_bytes), str(events)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 0), ended.stderr


def convert(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return pipesight("convert", *args, cwd=cwd)


def not_json(word: str) -> None:
    raise AssertionError(word)


def events_of(text: str | bytes) -> list[dict]:
    whole = json.loads(text, parse_constant=not_json)
    assert list(whole) == ["traceEvents"]
    return whole["traceEvents"]


def steps(events: list[dict]) -> list[int]:
    return [event["args"]["step"] for event in events if event["name"] == "forward"]


# What goes in.


@pytest.mark.parametrize("how", ["packed", "plain", "killed"])
def test_one_file(how, tmp_path):
    """Every line of a trace, compressed or not, whole or of a process that was killed, is an event of the result."""
    record(tmp_path / "run", how=how)
    trace = tmp_path / ("run.pfw" if how == "plain" else "run.pfw.gz")
    ended = convert(trace)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n") == (how == "killed")
    text = trace.read_text() if how == "plain" else gzip.decompress(trace.read_bytes()).decode()
    lines = [json.loads(line) for line in text.splitlines() if line not in "[]"]
    assert events_of((tmp_path / "run.json").read_text()) == lines
    assert steps(lines) == list(range(10))
    assert ended.stdout == f"{len(lines)} events of {trace}, in {tmp_path / 'run.json'}\n"


@pytest.mark.parametrize("left", [1, 30, 300, -40, -12])
def test_cut_anywhere(left, tmp_path):
    """Of a file that was cut off in the middle of a member, everything up to there is taken."""
    record(tmp_path / "run", events=3)
    trace = tmp_path / "run.pfw.gz"
    whole = trace.read_bytes()
    header = gzip.compress(b'[\n{"ph":"i","name":"first"}\n')
    trace.write_bytes(header + whole[:left])
    ended = convert(trace)
    assert ended.returncode == 0, ended.stderr
    assert "run.pfw.gz; a process was killed, or is still writing" in ended.stderr
    assert "left out" not in ended.stderr
    events = events_of((tmp_path / "run.json").read_text())
    assert events[0]["name"] == "first"
    assert steps(events) == list(range(len(steps(events))))
    assert len(events) > (1 if left == 300 or left < 0 else 0)


def test_damaged_in_the_middle(tmp_path):
    """What comes before damage and after it is taken, and the user is told that it is not whole."""
    trace = tmp_path / "run.pfw.gz"
    trace.write_bytes(gzip.compress(b'[\n{"ph":"i"}\n') + b"damage" + gzip.compress(b'{"ph":"i"}\n]\n'))
    ended = convert(trace)
    assert ended.returncode == 0
    assert "incomplete" in ended.stderr
    assert len(events_of((tmp_path / "run.json").read_text())) == 2


def test_zeros_at_the_end(tmp_path):
    """Zeros behind the last member, as a crash of the machine may leave them, do no harm."""
    trace = tmp_path / "run.pfw.gz"
    trace.write_bytes(gzip.compress(b'[\n{"ph":"i"}\n]\n') + bytes(5000))
    ended = convert(trace)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_one_event(tmp_path):
    """One event is not called events, and one line not lines."""
    (tmp_path / "run.pfw").write_text('[\n{"ph":"i","n":1}\n7\n]\n')
    ended = convert(tmp_path / "run.pfw")
    assert ended.stdout.startswith("1 event of ")
    assert "skipped: 1 line that is no event, in " in ended.stderr


def test_lines_that_are_no_events(tmp_path):
    """Lines that would break the result are left out and counted; commas at their ends are not doubled."""
    lines = ["[", '{"ph":"i","n":1},', "{", "", '{"ph":"i","n":NaN}', '{"ph":3}', "7", '{"ph":"i","n":2}', "]"]
    (tmp_path / "run.pfw").write_bytes("\n".join(lines).encode() + b"\n\xff\n]\n")
    ended = convert(tmp_path / "run.pfw")
    assert ended.returncode == 0
    assert "skipped: 5 lines that are no events" in ended.stderr
    assert [event["n"] for event in events_of((tmp_path / "run.json").read_text())] == [1, 2]


def test_parts(tmp_path):
    """With a trace come its parts, by number; a part comes alone."""
    record(tmp_path / "run", events=4000, max_bytes=3000)
    record(tmp_path / "run.part2x", events=1)
    assert (tmp_path / "run.part10.pfw.gz").exists()
    assert convert(tmp_path / "run.pfw.gz").returncode == 0
    assert steps(events_of((tmp_path / "run.json").read_text())) == list(range(4000))
    assert convert(tmp_path / "run.part2.pfw.gz", "-o", tmp_path / "two.json").returncode == 0
    second = steps(events_of((tmp_path / "two.json").read_text()))
    assert 0 < second[0] < second[-1] < 4000


def test_folder(tmp_path):
    """All traces in a folder and below become one file; what is no trace is left out, and said."""
    for name in ("b", "a", "deep/c"):
        record(tmp_path / name, events=2)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty.pfw.gz").touch()
    ended = convert(".", "--to", "chrome", cwd=tmp_path)
    assert ended.returncode == 0
    assert ended.stderr.startswith("pipesight convert: skipped: not a trace: 'empty.pfw.gz' (it is empty;")
    assert ended.stderr.count("\n") == 1
    events = events_of((tmp_path / "trace.json").read_text())
    assert steps(events) == [0, 1] * 3
    assert len({event["pid"] for event in events}) == 3
    assert "3 files, in trace.json" in ended.stdout


def test_while_it_is_written(tmp_path):
    """A trace can be converted by the program that writes it."""
    source = f"""
import subprocess, sys
import pipesight.trace
from pipesight.trace import ai
with pipesight.trace.start("run"):
    with ai.compute.forward: pass
    pipesight.trace.flush()
    subprocess.run([*{STRICT_PYTHON!r}, "-m", "pipesight", "convert", "run.pfw.gz"], check=True)
"""
    subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert sum(event["name"] == "forward" for event in events_of((tmp_path / "run.json").read_text())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.pfw.gz"]


# What comes out.


def test_packed_output(tmp_path):
    """An output that ends in .gz is compressed."""
    record(tmp_path / "run")
    assert convert(tmp_path / "run.pfw.gz", "-o", tmp_path / "out.json.gz").returncode == 0
    assert steps(events_of(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))) == list(range(10))


def test_standard_output(tmp_path):
    """With -o - the result goes to the standard output, and nothing else does."""
    record(tmp_path / "run")
    ended = convert(tmp_path / "run.pfw.gz", "-o", "-")
    assert steps(events_of(ended.stdout)) == list(range(10))
    assert f"events of {tmp_path / 'run.pfw.gz'}\n" in ended.stderr


def test_output_that_exists(tmp_path):
    """An output that is there stays as it is, unless --force is given."""
    record(tmp_path / "run")
    (tmp_path / "run.json").write_text("mine")
    ended = convert("run.pfw.gz", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == (
        "pipesight convert: error: the output exists: 'run.json'; replace it with --force, or name another with -o\n"
    )
    assert (tmp_path / "run.json").read_text() == "mine"
    assert convert("run.pfw.gz", "--force", cwd=tmp_path).returncode == 0
    assert len(steps(events_of((tmp_path / "run.json").read_text()))) == 10


@pytest.mark.parametrize("output", ["run.pfw.gz", "link", "folder"])
def test_output_that_cannot_be(output, tmp_path):
    """Neither the trace itself nor a folder is written over, with --force or without."""
    record(tmp_path / "run")
    (tmp_path / "link").symlink_to("run.pfw.gz")
    (tmp_path / "folder").mkdir()
    before = (tmp_path / "run.pfw.gz").read_bytes()
    ended = convert("run.pfw.gz", "-o", output, "--force", cwd=tmp_path)
    assert ended.returncode == 2
    assert "the output is " in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert (tmp_path / "run.pfw.gz").read_bytes() == before


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_full_disk(packed, tmp_path):
    """Where the result does not fit, nothing of it is left behind, and what was there before is."""
    record(tmp_path / "run", events=2000)
    (tmp_path / f"out.json{packed}").write_text("mine")
    limited = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from pipesight.cli import main
sys.exit(main(["convert", "run.pfw.gz", "-o", "out.json{packed}", "--force"]))
"""
    command = [*STRICT_PYTHON, "-c", limited]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"pipesight convert: error: out.json{packed}: File too large\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"out.json{packed}", "run.pfw.gz"]
    assert (tmp_path / f"out.json{packed}").read_text() == "mine"


def test_reader_that_goes_away(tmp_path):
    """``pipesight convert -o - | head -1`` ends quietly."""
    record(tmp_path / "run", events=20_000)
    command = [*STRICT_PYTHON, "-m", "pipesight", "convert", str(tmp_path / "run.pfw.gz"), "-o", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == '{"traceEvents":[\n'
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == ""
    assert process.returncode == 141


# What is refused.


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("gone.pfw.gz", None, "no such file: 'gone.pfw.gz'"),
        ("empty.pfw", b"", "not a trace: 'empty.pfw' (it is empty; a trace begins with a line '[')"),
        ("a.py", b"import os\n", "not a trace: 'a.py' (it begins with 'import os'; a trace begins with a line '[')"),
        ("a.pfw", b"no", "not a trace: 'a.pfw' (it begins with 'no'; a trace begins with a line '[')"),
        ("a.json", b'{"traceEvents":[]}', "not a trace: 'a.json' (it begins with '{\"traceEvents\":[]}';"),
        ("a.pfw.gz", b"\x1f\x8bxx", "not a trace: 'a.pfw.gz' (it is damaged;"),
        ("b.gz", gzip.compress(bytes(2**27)), "not a trace: 'b.gz' (it is empty;"),
    ],
)
def test_input_that_is_no_trace(name, content, error, tmp_path):
    """What is missing, or something else, is told in one line, and no output is made."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    ended = convert(name, "-o", "out.json", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"pipesight convert: error: {error}")
    assert ended.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_folder_without_traces(tmp_path):
    """A folder must have traces in it."""
    ended = convert(".", cwd=tmp_path)
    assert ended.returncode == 2
    assert "no trace in the folder '.': no file in it ends in .pfw.gz or .pfw" in ended.stderr


def test_folder_of_the_output_that_is_missing(tmp_path):
    """A folder for the output is not made."""
    record(tmp_path / "run")
    ended = convert("run.pfw.gz", "-o", "deep/out.json", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == "pipesight convert: error: no such folder: 'deep'\n"


def test_unknown_format(tmp_path):
    """A format that is not there is told with those that are."""
    ended = convert("run.pfw.gz", "--to", "pdf")
    assert ended.returncode == 2
    assert "invalid choice: 'pdf' (choose from" in ended.stderr


# A dataset.


def a_run(folder: Path) -> Path:
    made = Made(folder, chunks=2)
    for rank in range(3):
        made.gpipe(0, lambda phase, i, j: 10 + i, at=rank, rank=rank, layers=lambda j: [f"l{j}"])
        made.stat("l0", "output", "mean", 0, 0.5, rank=rank)
    made.log("2026-11-15T10:00:00 INFO mine hello")
    return made.write()


def test_dataset_is_a_run(tmp_path):
    """Of a run becomes a dataset, a folder for each rank, which is the same run: tables, statistics, logs, notes."""
    run = a_run(tmp_path / "run")
    (run / "trace/rank-00007.pfw.gz").touch()
    ended = convert(run, "--to", "parquet")
    assert ended.returncode == 0
    assert ended.stdout == f"48 spans and 0 other events of 3 ranks, in {tmp_path / 'run.parquet'}\n"
    assert ended.stderr == f"pipesight convert: {run / 'trace/rank-00007.pfw.gz'}: skipped: it is empty\n"
    files = ["rank-00000-0.parquet", "rank-00001-0.parquet", "rank-00002-0.parquet"]
    assert sorted(path.name for path in (tmp_path / "run.parquet/events").iterdir()) == files
    with open_run(run) as before, open_run(tmp_path / "run.parquet") as after:
        for name in ("tasks", "layer_times", "names"):
            columns = getattr(before, name)().columns()
            assert {key: value.tolist() for key, value in columns.items()} == {
                key: value.tolist() for key, value in getattr(after, name)().columns().items()
            }
        assert len(after.tasks()) == 24
        assert (after.description, after.events, after.notes) == (before.description, before.events, before.notes)
        assert list(after.statistics()) == list(before.statistics())
        assert list(after.log_lines()) == list(before.log_lines())


def test_dataset_of_a_trace_that_was_cut_off(tmp_path):
    """One file, and whatever else a report can be made of, becomes a dataset, as far as it goes."""
    record(tmp_path / "run", how="killed")
    ended = convert("run.pfw.gz", "--to", "parquet", "-o", "set", cwd=tmp_path)
    assert ended.returncode == 0
    assert "run.pfw.gz: incomplete: its process was killed, or is still writing\n" in ended.stderr
    with open_run(tmp_path / "set") as run:
        assert run.events == 10
        assert run.notes[0].text.startswith("incomplete")
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "loss": 2.5}\n')
    assert convert("metrics.jsonl", "--to", "parquet", "-o", "numbers", cwd=tmp_path).returncode == 0
    with open_run(tmp_path / "numbers") as run:
        assert [(line["iteration"], line["statistic"], line["value"]) for line in run.statistics()] == [
            (4, "loss", 2.5)
        ]


def test_dataset_that_exists(tmp_path):
    """A dataset is replaced with --force only, and no other folder is."""
    a_run(tmp_path / "run")
    assert convert("run", "--to", "parquet", cwd=tmp_path).returncode == 0
    ended = convert("run", "--to", "parquet", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.endswith("/run.parquet'; replace it with --force, or name another with -o\n")
    (tmp_path / "run.parquet/mine").touch()
    assert convert("run", "--to", "parquet", "--force", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "run.parquet/mine").exists()
    (tmp_path / "mine").mkdir()
    for output, error in (("mine", "is not a dataset"), ("run", "is the run itself"), ("-", "standard output")):
        ended = convert("run", "--to", "parquet", "--force", "-o", output, cwd=tmp_path)
        assert ended.returncode == 2
        assert error in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run", "run.parquet"]


@pytest.mark.parametrize(
    ("name", "output", "error"),
    [("gone", "x", "no such file or folder: 'gone'"), ("empty", "x", "no events in 'empty'"), ("run", "a/b", "'a'")],
)
def test_dataset_that_cannot_be(name, output, error, tmp_path):
    """What is no run is told in one line, and nothing is made."""
    a_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    ended = convert(name, "--to", "parquet", "-o", output, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert error in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


def test_dataset_on_a_full_disk(tmp_path):
    """Where a dataset does not fit, nothing of it is left behind."""
    made = Made(tmp_path / "run")
    for number in range(5000):
        made.span("a", str(number), begin=number**2, dur=number)
    made.write()
    limited = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from pipesight.cli import main
sys.exit(main(["convert", "run", "-o", "out", "--to", "parquet"]))
"""
    command = [*STRICT_PYTHON, "-c", limited]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("pipesight convert: error: out: ")
    assert ended.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# What it takes.


def test_little_memory_and_no_torch(tmp_path):
    """A trace is never held as a whole, and torch and the tracer are not imported."""
    line = b'{"ph":"X","name":"forward","ts":1,"dur":1,"args":{"text":"' + os.urandom(50).hex().encode() + b'"}}\n'
    (tmp_path / "run.pfw.gz").write_bytes(gzip.compress(b"[\n" + line * 400_000 + b"]\n", 1))  # 65 MB
    measured = """
import sys
from pathlib import Path
from pipesight.cli import main
main(["convert", "run.pfw.gz"])
print([name for name in ("torch", "pipesight.trace") if name in sys.modules])
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # ru_maxrss knows of the parent
"""
    command = [*STRICT_PYTHON, "-c", measured]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    _, imported, kilobytes = ended.stdout.splitlines()
    assert imported == "[]"
    assert int(kilobytes) < 40_000
    assert len(events_of((tmp_path / "run.json").read_text())) == 400_000


def test_profiles(tmp_path):
    """Files of PyTorch's profiler become one, by the clock that they share; processes with one number stay apart."""
    for rank in (0, 1):
        event = {"ph": "X", "cat": "kernel", "name": f"k{rank}", "pid": 0, "tid": 7, "ts": 5.25, "dur": 2.5}
        base = {"baseTimeNanoseconds": 1_790_000_000_000_000_000 + rank * 1_000_000}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({**base, "traceEvents": [event]}))
    ended = convert(tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (first["name"], first["ts"], second["name"], second["ts"]) == ("k0", 5.25, "k1", 1005.25)
    assert first["pid"] != second["pid"]
