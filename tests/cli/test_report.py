"""`pipesight report`: what it prints, and its exit codes."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from pipesight.cli import main
from support.commands import pipesight
from support.processes import STRICT_PYTHON
from support.synthetic import Made


def report(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return pipesight("report", *args, env=env)


def make(folder: Path, *, slow: int = 1) -> Path:
    made = Made(folder, balance=[1, 1], chunks=2)
    at = 0
    for step in range(4):
        at = made.gpipe(step, lambda phase, i, j: 100 * (slow if j else 1), at=at, layers=lambda j: [f"l{j}"]) + 10
    return made.write()


@pytest.fixture
def run(tmp_path) -> Path:
    return make(tmp_path / "run")


def test_report(run):
    """The report of a run goes to the standard output, in plain text where that is no terminal."""
    ended = report(run)
    assert ended.returncode == 0, ended.stderr
    assert "The bubble is 33%" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert ended.stderr == ""


@pytest.mark.parametrize("path", ["trace", "trace/rank-00000.pfw.gz"])
def test_folder_or_trace(run, path):
    """A folder of traces, or a trace, will do."""
    ended = report(run / path)
    assert ended.returncode == 0, ended.stderr
    assert "The bubble is 33%" in ended.stdout


def test_width(run):
    """``--width`` and the terminal say how wide."""
    assert max(map(len, report(run, "--width", 160).stdout.splitlines())) == 160
    assert max(map(len, report(run, env={"COLUMNS": "100"}).stdout.splitlines())) == 100


def test_json(run):
    """``--json`` prints JSON, and nothing else."""
    ended = report(run, "--json")
    assert ended.returncode == 0, ended.stderr
    value = json.loads(ended.stdout)
    assert value["overall"]["bubble"] == pytest.approx(1 / 3)
    assert len(value["steps"]) == 4


def test_options_narrow(run):
    """Steps, partition and layer narrow what is told."""
    value = json.loads(report(run, "--json", "--steps", "1:2", "--partition", 1, "--layer", "l*").stdout)
    assert [step["step"] for step in value["steps"]] == [1, 2]
    assert [row["partition"] for row in value["pipelines"][0]["rows"]] == [1]
    assert [layer["name"] for layer in value["layers"]] == ["l1"]
    assert "Step 2," in report(run, "--step", 2).stdout


def test_two_runs(run, tmp_path):
    """Two runs are compared."""
    other = make(tmp_path / "other", slow=3)
    ended = report(run, other)
    assert ended.returncode == 0, ended.stderr
    assert "The second run takes" in ended.stdout
    assert "% more time per step" in ended.stdout
    value = json.loads(report(run, other, "--json").stdout)
    assert value["quantities"]["step_time"]["change"] > 0


def test_terminals_without_utf8(run):
    """Where the output cannot be UTF-8, it is ASCII."""
    command = [*STRICT_PYTHON, "-m", "pipesight", "report", str(run)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    ended = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert b"|F0" in ended.stdout


# Exit codes.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "9:20"], "none of these steps was recorded (requested: 9:20, recorded: 0 to 3)"),
        (["--steps", "5:2"], "steps must be A:B with A <= B"),
        (["--partition", "2"], "there is no partition 2 (partitions: 0 to 1)"),
        (["--layer", "x"], "no layer is named 'x' (layers: l0, l1)"),
        (["--step", "12"], "no tasks of step 12 were recorded"),
        (["--width", "10"], "the width must be an integer from 40"),
        (["--fail-over", "2"], "a share must be between 0 and 1"),
    ],
)
def test_what_cannot_be_is_2(run, options, words):
    """What was asked for and is not there ends with exit code 2, and says what there is."""
    ended = report(run, *options)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_no_run_is_2(tmp_path):
    """A path that is not there, and a folder with nothing in it, are no runs."""
    for path in (tmp_path / "nowhere", tmp_path):
        ended = report(path)
        assert ended.returncode == 2
        assert ended.stderr.startswith("pipesight report: error: ")
        assert "Traceback" not in ended.stderr


def test_large_bubble_is_3(run):
    """With ``--fail-over``, a larger bubble ends with exit code 3, after the report."""
    ended = report(run, "--fail-over", "30%")
    assert ended.returncode == 3
    assert "The bubble is 33%" in ended.stdout
    assert "the bubble is 33.3%, over 30.0%" in ended.stderr
    assert report(run, "--fail-over", "0.34").returncode == 0


def test_page_that_cannot_be_written_is_1(run):
    """A page that cannot be written ends with exit code 1, and one line that says why."""
    page = run / "no" / "folder" / "page.html"
    ended = report(run, "--html", page)
    assert (ended.returncode, ended.stderr) == (1, f"pipesight report: error: {page}: No such file or directory\n")


def test_page(run, tmp_path):
    """``--html`` writes the page, into the run, beside a trace, or to a file, and says where."""
    (trace,) = (run / "trace").iterdir()
    ended = report(trace, "--html")
    assert (run / "trace" / "report.html").is_file()
    assert ended.stdout.endswith(f"the page is {run / 'trace' / 'report.html'}\n")
    (run / "trace" / "report.html").unlink()
    assert report(run, "--html").returncode == 0
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!")
    assert report(run, "--html", tmp_path / "page.html").returncode == 0
    assert (tmp_path / "page.html").is_file()


# Whatever there is.


@pytest.mark.parametrize("seed", range(6))
def test_damaged_runs(run, seed):
    """Files that were cut, overwritten or mixed up give a report of what is left, or one line: never a traceback."""
    rng = random.Random(seed)
    trace = run / "trace/rank-00000.pfw.gz"
    raw = bytearray(trace.read_bytes())
    if seed % 3 == 0:
        raw = raw[: rng.randrange(len(raw))]
    elif seed % 3 == 1:
        at = rng.randrange(len(raw))
        raw[at : at + 20] = rng.randbytes(20)
    else:
        lines = gzip.decompress(bytes(raw)).splitlines()
        rng.shuffle(lines)
        lines[::5] = [rng.choice([b"", b"{", b"null", b'{"ph":"X"}', b'{"args":7}', line[:40]]) for line in lines[::5]]
        raw = bytearray(gzip.compress(b"\n".join(lines)))
    trace.write_bytes(bytes(raw))
    (run / "run.json").write_text(rng.choice(["", "{", "[]", '{"pipelines": [{"partitions": -1}]}', "\x00"]))
    (run / "stats").mkdir()
    (run / "stats/rank-00000.jsonl").write_bytes(rng.randbytes(50) + b'\n{"nans": "x"}\n')
    for options in ((), ("--json",)):
        ended = report(run, *options)
        assert ended.returncode in (0, 2), ended.stderr
        assert "Traceback" not in ended.stderr
        assert ended.stdout or ended.stderr


def test_foreign_trace(tmp_path):
    """A trace of another program: where its time went, and why there is no bubble."""
    path = tmp_path / "profile.json"
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5.5, "dur": 7.25, "args": {}}]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    ended = report(path)
    assert ended.returncode == 0, ended.stderr
    assert "aten::mm" in ended.stdout
    assert "bubble cannot be computed" in ended.stdout


@pytest.mark.parametrize(
    ("set_to", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "", "NO_COLOR": ""}, False),
    ],
)
def test_colours(run, set_to, coloured, monkeypatch, capsys):
    """What is no terminal gets colours if FORCE_COLOR is set, unless NO_COLOR is; JSON and lines of steps never do."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    for arguments, may in ((["report", run], True), (["report", run, "--json"], False), (["watch", run], False)):
        assert main([str(argument) for argument in arguments]) == 0
        assert ("\x1b[" in capsys.readouterr().out) == (coloured and may)


def test_no_torch():
    """The report needs no torch, which takes seconds to import."""
    script = "import sys, pipesight.view.text_report, pipesight.view.comparison_text; assert 'torch' not in sys.modules"
    assert subprocess.run([*STRICT_PYTHON, "-c", script], timeout=60).returncode == 0


def test_no_bubble_is_no_success(tmp_path):
    """With ``--fail-over``, a run that has no complete step does not pass for a good one."""
    made = Made(tmp_path / "run")
    made.task(0, partition=0, microbatch=0, phase="forward", begin=0, dur=100)
    ended = report(made.write(), "--fail-over", "0.3")
    assert ended.returncode == 2
    assert "the bubble cannot be computed" in ended.stderr


def test_pages_of_what_was_asked_for(run, tmp_path):
    """With --steps, the page is of these steps; of two runs, it compares them, and the page of neither is replaced."""
    ended = report(run, "--steps", "2:3", "--html", tmp_path / "some.html")
    assert ended.stdout.endswith(f"the page is {tmp_path / 'some.html'}\n")
    other = make(tmp_path / "other", slow=2)
    ended = report(run, other, "--html")
    assert ended.stdout.endswith(f"the page is {other / 'comparison.html'}\n")
    assert not [*run.glob("*.html")]
    ended = report(run, "--html", "--step", 99)
    assert (ended.returncode, ended.stdout) == (2, "")
