"""`pipesight demo`: what it trains, what it prints, what it shows, and how it ends."""

import fcntl
import functools
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from pipesight import GPipe
from pipesight.cli import main
from pipesight.cli.demo import typed_command
from pipesight.demo.live_display import LiveDisplay
from pipesight.demo.model import char_gpt
from pipesight.demo.partition_activity import Activity, ActivityMonitor
from pipesight.demo.plain_display import PlainDisplay
from pipesight.demo.progress import Limit, Meter
from pipesight.demo.sonnets import SonnetText
from pipesight.demo.training import Training, one_thread, pick_partitions
from pipesight.schedule.argument_checks import CHECKPOINT_MODES
from support.processes import STRICT_PYTHON

DEMO = [*STRICT_PYTHON, "-m", "pipesight", "demo"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm-256color"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo record into a folder that goes away."""
    monkeypatch.chdir(tmp_path)


@functools.cache
def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the demo once for all tests that ask for the same."""
    return subprocess.run([*DEMO, *args], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let processes started by this test be interrupted; those of pytest-xdist inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# What it prints.


def test_output_without_a_terminal_is_plain_lines():
    """Into a pipe go a line a step, a summary, about 200 characters of verse, a report, and what to do next."""
    ended = run("--steps", "4", "--partitions", "4")
    assert ended.returncode == 0
    assert ended.stderr == ""
    assert "\x1b" not in ended.stdout
    head, steps, verse = re.split(r"(?s)(step 0 of 0\.\.3.*of the time\n)", ended.stdout)
    assert "4 micro-batches, checkpoint except_last" in head
    *lines, blank, trained, loss, shares = steps.splitlines()
    assert blank == ""
    assert len(lines) == 4
    for number, line in enumerate(lines):  # as the report counts
        assert re.fullmatch(rf"step {number} of 0\.\.3  loss \d\.\d{{3}}  [ \d]{{3}}\d samples/s", line)
    assert re.fullmatch(r"trained for 4 steps in \d+\.\d s, \d+ samples/s", trained)
    assert re.fullmatch(r"loss \d\.\d{3} at first, \d\.\d{3} at last", loss)
    assert re.fullmatch(r"partitions busy (\d+%, ){3}\d+% of the time", shares)
    verse, reported = verse.split("where the time went:\n")
    title, *written = verse.strip().splitlines()
    assert title == "what it writes now:"
    assert 150 < len("".join(written)) < 260
    *reported, page, blank, following, command = reported.strip().splitlines()
    assert [line for line in reported if line.startswith("The bubble is ")]
    assert page == "the page is demo-run/report.html"
    assert "README.md" in following
    assert command == f"    {sys.executable} -m pipesight demo --help"
    assert max(len(line) for line in ended.stdout.splitlines() if line != command) <= 80


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_same_seed_same_losses(checkpoint):
    """Two processes with one seed have the same losses, in every mode: a recomputation draws the same dropout again."""
    printed = re.findall(r"^step .* loss (\S+)", run("--steps", "4", "--partitions", "4").stdout, re.MULTILINE)
    with one_thread():
        training = Training(partitions=4, chunks=4, checkpoint=checkpoint, seed=0)
        assert [f"{training.step():.3f}" for _ in range(4)] == printed


def test_plain_display_prints_twenty_lines(capsys):
    """A long training gets a line for the first step and one for each twentieth."""
    meter, display = Meter(Limit(steps=200), batch=32), PlainDisplay()
    while not meter.done:
        display.show(meter.record(2.5))
    lines = capsys.readouterr().out.splitlines()
    steps = [int(re.match(r"step ([ \d]{3}) of 0\.\.199  loss 2.500  +\d+ samples/s", line)[1]) for line in lines]
    assert steps == [0, *range(9, 200, 10)]


def test_next_command_is_the_one_that_was_typed(monkeypatch):
    """The last line names the command as it was started: by its path, or by its name if the shell would find it."""
    script = Path(sys.executable).with_name("pipesight")
    elsewhere = [path for path in os.environ["PATH"].split(os.pathsep) if not (Path(path) / "pipesight").exists()]
    monkeypatch.setattr(sys, "argv", [str(script), "demo"])
    for path, name in (("/nowhere", str(script)), (str(script.parent), "pipesight")):
        monkeypatch.setenv("PATH", os.pathsep.join([path, *elsewhere]))
        assert typed_command() == name


@pytest.mark.slow
def test_recording_goes_where_it_is_told(tmp_path):
    """The demo records into ``--out``, and replaces a recording that is there."""
    for _ in range(2):
        assert main(["demo", "--plain", "--steps", "2", "--partitions", "2", "--out", "mine"]) == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} >= {"run.json", "trace", "stats", "report.html"}


# What it shows.


@functools.cache
def run_in_terminal(columns: int, *args: str, rows: int = 24, interrupt: bool = False) -> tuple[int, str]:
    """Run the demo in a terminal of that width; return its exit code and all it wrote."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen([*DEMO, *args], stdin=its, stdout=its, stderr=its, env=ENVIRONMENT)
    os.close(its)
    written = b""
    while chunk := _read(ours):
        written += chunk
        if interrupt and b"samples/s" in written:
            process.send_signal(signal.SIGINT)
            interrupt = False
    os.close(ours)
    return process.wait(60), written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""


def lines_of(written: str) -> list[str]:
    return re.split(r"\r\n|\r", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.removesuffix("\r\n")))


def test_live_display_has_a_row_for_each_partition():
    """In a terminal, each partition has a row that shows its device, layer, phase and micro-batch."""
    code, written = run_in_terminal(80, "--seconds", "3", "--partitions", "4")
    lines = lines_of(written)
    assert code == 0
    assert any(re.fullmatch(r"partition +device +layer +class +phase +micro-batch *", line) for line in lines)
    for j, layers in enumerate(["(embed|block0)", "block[12]", "block[34]", "(block5|head)"]):
        row = rf"{j} +cpu +{layers} +(\w+) +(forward|recompute|backward) +([0-3]) [·▮]{{4}} *"
        assert any(re.fullmatch(row, line) for line in lines), f"partition {j} was never seen at work"
        assert any(re.fullmatch(rf"{j} +cpu +idle +[·]{{4}} *", line) for line in lines)


def test_live_display_shows_progress():
    """In a terminal, a line has steps and times, the next one losses and samples a second; none is too long."""
    _, written = run_in_terminal(80, "--seconds", "3", "--partitions", "4")
    lines = lines_of(written)
    assert any(re.fullmatch(r"[━╸╺]+ +step +\d+  \d:\d\d elapsed  \d:\d\d left *", line) for line in lines)
    number = r"\d\.\d{3}"
    numbers = rf"loss {number}   smoothed {number}   first {number} +\d+ samples/s *"
    assert any(re.fullmatch(numbers, line) for line in lines)
    assert max(len(line) for line in lines if sys.executable not in line) <= 80


@pytest.mark.parametrize("columns", [80, 160])
def test_live_display_keeps_its_shape(columns):
    """Whatever the partitions do, columns and lines stay where they are."""
    pipe = GPipe(char_gpt(60), [2, 2, 2, 2], devices=["cpu"] * 4, chunks=4)
    console = Console(width=columns, force_terminal=True, color_system=None)
    watch = ActivityMonitor(partitions=4)
    display, meter = LiveDisplay(pipe, watch, console), Meter(Limit(steps=12345), batch=32)
    shapes = set()
    for activity in (
        None,
        Activity("forward", 0, None),
        Activity("recompute", 3, "block0"),
        Activity("backward", 1, "embed"),
    ):
        display.show(meter.record(2.5))
        watch.rows[:] = [activity] * 4
        with console.capture() as capture:
            console.print(display._draw())
        bar, _, _, header, *rows = capture.get().splitlines()
        starts = header.index("phase"), header.index("micro-batch")
        assert [row[starts[0] - 2 : starts[0]] for row in rows] == ["  "] * 4
        assert [row[starts[1] - 2 : starts[1]] for row in rows] == ["  "] * 4
        shapes.add((len(bar), starts))
    assert len(shapes) == 1
    assert len(bar) == min(columns, 100)


def drawn(pipe: GPipe, activity: Activity | None, **size: int) -> list[str]:
    """Return the lines of the display, with every partition at the same."""
    console = Console(**size, force_terminal=True, color_system=None)
    watch = ActivityMonitor(len(pipe.partitions))
    display = LiveDisplay(pipe, watch, console)
    display.show(Meter(Limit(seconds=100), batch=32).record(2.5))
    watch.rows[:] = [activity] * len(watch.rows)
    with console.capture() as capture:
        console.print(display._draw())
    return [line.rstrip() for line in capture.get().splitlines()]


def test_many_microbatches_are_numbered_from_zero():
    """More micro-batches than can be drawn are counted, in words that say that the first one is 0."""
    pipe = GPipe(char_gpt(60), [8], chunks=32)
    assert drawn(pipe, Activity("forward", 28, "head"), width=80, height=24)[-1].endswith("28 of 0..31")


@pytest.mark.parametrize(("columns", "rows", "fits"), [(80, 8, True), (80, 7, False), (67, 24, True), (66, 24, False)])
def test_live_display_knows_whether_it_fits(columns, rows, fits):
    """Four partitions need eight rows, and all columns."""
    pipe = GPipe(char_gpt(60), [2, 2, 2, 2], devices=["cpu"] * 4, chunks=4)
    assert LiveDisplay(pipe, ActivityMonitor(4), Console(width=columns, height=rows)).fits is fits


def test_small_terminal_gets_plain_lines():
    """Where the display does not fit, lines are printed, none of them too long for the terminal."""
    _, written = run_in_terminal(60, "--steps", "4", "--partitions", "8", rows=10)
    lines = lines_of(written)
    assert any(line.startswith("step 3 of 0..3  loss ") for line in lines)
    assert "Shakespeare's sonnets" in lines
    assert max(len(line) for line in lines if "demo --help" not in line) <= 60


def test_watch_adds_up_the_time_at_work():
    """Each partition's seconds are those that its tasks took, and no others."""

    class Sleep(nn.Module):
        def forward(self, input):
            time.sleep(0.05)
            return input

    pipe = GPipe(nn.Sequential(nn.Identity(), Sleep()), [1, 1], devices=["cpu"] * 2, chunks=2)
    with ActivityMonitor(partitions=2) as watch:
        pipe(torch.rand(4, 2))
    pipe(torch.rand(4, 2))
    assert watch.seconds[0] < 0.05 < 0.1 <= watch.seconds[1] < 0.2


def test_watch_sees_the_layer_that_runs():
    """The row of a partition names what it is doing while it does it, and is empty afterwards."""
    watch = ActivityMonitor(partitions=2)
    seen = []

    class Look(nn.Module):
        def forward(self, input):
            seen.append(watch.rows[1])
            return input

    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 2))
    model.add_module("look", Look())
    model.add_module("last", nn.Linear(2, 2))
    pipe = GPipe(model, [1, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    with watch:
        pipe(torch.rand(4, 2)).sum().backward()
    assert seen[:2] == [Activity("forward", 0, "look"), Activity("forward", 1, "look")]
    assert sorted(activity.microbatch for activity in seen[2:]) == [0, 1]
    assert {activity.phase for activity in seen[2:]} == {"recompute"}
    assert watch.rows == [None, None]


# How it ends.


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_it_cleanly():
    """SIGINT ends the training with a summary, exit code 130, no traceback, and no thread."""
    script = "import sys, threading; from pipesight.cli import main; code = main(sys.argv[1:]);"
    script += "print(sorted(t.name for t in threading.enumerate())); sys.exit(code)"
    command = [*STRICT_PYTHON, "-c", script, "demo", "--plain", "--steps", "1000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        for line in process.stdout:
            if re.match("step +0 of ", line):
                break
        process.send_signal(signal.SIGINT)
        *_, blank, summary, loss, _, threads = process.stdout.read().splitlines()
        errors = process.stderr.read()
    assert blank == ""
    assert re.fullmatch(r"interrupted after \d+ steps? in \d+\.\d s, \d+ samples/s", summary)
    assert loss.startswith("loss ")
    assert threads == "['MainThread']"
    assert errors == ""
    assert process.returncode == 130


@pytest.mark.usefixtures("interruptible")
def test_interrupt_closes_the_display():
    """After SIGINT the display is gone, the cursor is back, and the summary stands in its place."""
    code, written = run_in_terminal(80, interrupt=True)
    assert code == 130
    display, shown, after = written.rpartition("\x1b[?25h")
    assert "\x1b[?25l" in display
    assert shown
    assert re.search(r"interrupted after \d+ steps? in ", lines_of(after)[-3])
    assert "Traceback" not in written


@pytest.mark.parametrize(("processors", "partitions"), [(1, 2), (2, 2), (3, 3), (4, 4), (64, 4)])
def test_partitions_suit_the_machine(monkeypatch, processors, partitions):
    """Unless it is told, the demo takes as many partitions as can compute at the same time, from 2 up to 4."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(processors)}, raising=False)
    assert pick_partitions() == partitions


@pytest.mark.slow
def test_no_thread_outlives_the_demo(capsys):
    """A demo that ran in this process leaves its threads and settings as they were."""
    before = threading.enumerate(), torch.get_num_threads()
    assert main(["demo", "--plain", "--steps", "1", "--partitions", "2"]) == 0
    assert (threading.enumerate(), torch.get_num_threads()) == before
    assert "partitions of [4, 4] layers" in capsys.readouterr().out
    assert {path.name for path in Path("demo-run").iterdir()} == {"run.json", "trace", "stats", "logs", "report.html"}


# What it trains.


@pytest.mark.slow
def test_training_lowers_the_loss():
    """A few steps are enough to learn which characters are frequent."""
    training = Training(partitions=2, chunks=2, checkpoint="never", seed=0)
    measured = [training.step() for _ in range(20)]
    assert measured[0] > 4
    assert measured[-1] < 3


@pytest.mark.slow
def test_seed_decides_the_losses():
    """Another seed gives other losses."""
    first, again, other = (Training(partitions=1, chunks=1, checkpoint="never", seed=seed).step() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_writing_changes_nothing():
    """Writing is decided by the seed and the parameters, and leaves the model in training mode."""
    training = Training(partitions=2, chunks=2, checkpoint="always", seed=3)
    fresh = training.write(40)
    assert len(fresh) == 40
    assert training.write(40) == fresh
    assert all(module.training for module in training.pipe.modules())
    training.step()
    assert training.write(40) != fresh


def test_model_does_not_look_ahead():
    """The scores of a character depend on the characters before it alone."""
    model = char_gpt(60).eval()
    tokens = torch.randint(60, (1, 32))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 60
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_verse_is_shipped_whole():
    """The package carries more than thirty sonnets of fourteen lines."""
    verse = SonnetText.sonnets()
    text = verse.decode(verse.tokens)
    sonnets = text.strip().split("\n\n")
    assert len(sonnets) > 30
    assert {len(sonnet.splitlines()) for sonnet in sonnets} == {14}
    assert "Shall I compare thee to a summer's day?" in text


def test_targets_are_the_characters_that_follow():
    """A target is its input, one character later."""
    verse = SonnetText("abcdefghijklmnopqrstuvwxyz")
    inputs, targets = verse.batch(5, length=8, generator=torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (5, 8)
    assert torch.equal(targets, inputs + 1)


def test_meter_ends_by_time(monkeypatch):
    """With a limit in seconds, progress is the share of the time."""
    now = iter([100.0, 101.0, 104.0, 111.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    meter = Meter(Limit(seconds=10), batch=32)
    assert meter.record(4.0).left == pytest.approx(9)
    progress = meter.record(2.0)
    assert (progress.step, progress.steps, progress.share) == (2, None, 0.4)
    assert (progress.first_loss, progress.loss, progress.smoothed_loss) == (4.0, 2.0, 3.0)
    assert progress.samples_per_second == pytest.approx(16)
    assert not meter.done
    assert meter.record(2.0).left == 0
    assert meter.done
