"""`pipesight watch`: a run that is going on, drawn in a terminal, or a line for each step."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.latest_step import latest_step, steps_of
from pipesight.analysis.nonfinite import NonFinite
from pipesight.analysis.step_times import PARTS
from pipesight.cli.watch import pause_after
from pipesight.runs.reading.run import LogLine, open_run
from pipesight.view.live.watch_screen import Frame, draw_frame, line_of
from support.analysed import analysed
from support.commands import pipesight
from support.growing import LIMIT, GrowingRun, recorder, wait_for
from support.processes import STRICT_PYTHON
from support.synthetic import Made

ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")


class Terminal:
    """A terminal with a `pipesight watch` in it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._text = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._descriptor, 65536)
            except OSError:  # how Linux says that nobody has the terminal any more
                return
            if not chunk:
                return
            self._text += chunk

    @property
    def text(self) -> str:
        return self._text.decode(errors="replace")

    @property
    def frames(self) -> list[list[str]]:
        """What was drawn, each time, without colours."""
        drawn = self.text.split("\x1b[?1049l")[0].split("\x1b[H")
        return [[line.rstrip() for line in ESCAPE.sub("", frame).splitlines()] for frame in drawn[1:]]

    def wait_until_seen(self, words: str) -> list[str]:
        """Wait until a frame has these words, and return it."""
        return wait_for(lambda: next((f for f in self.frames if any(words in line for line in f)), None))

    def end(self) -> str:
        """Wait until it ends; return what stays."""
        assert self.process.wait(LIMIT) == 0
        self._reader.join()
        return ESCAPE.sub("", self.text.rpartition("\x1b[?1049l")[2])


@contextlib.contextmanager
def terminal(*command: object, columns: int = 80, lines: int = 24, **environment: str) -> Iterator[Terminal]:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    surroundings = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [*STRICT_PYTHON, "-m", "pipesight", "watch", *map(str, command)],
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        env={**surroundings, "TERM": "xterm-256color", **environment},
    )
    os.close(child)
    seen = Terminal(process, parent)
    try:
        yield seen
    finally:
        process.kill()
        process.wait(LIMIT)
        seen._reader.join()
        os.close(parent)


@contextlib.contextmanager
def piped(*command: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*STRICT_PYTHON, "-m", "pipesight", "watch", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(tmp_path):
    return GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2)


# In a terminal.


def test_terminal(run):
    """A run is waited for, drawn while it goes on, and the last picture stays when it has ended."""
    with terminal(run.folder) as seen:
        seen.wait_until_seen("waiting for a recording")
        run.begin()
        seen.wait_until_seen("no complete step yet")
        run.step()
        run.step()
        run.say("2026-11-15T10:00:00.123456 WARNING train [step 1] the loss is large")
        frame = seen.wait_until_seen("Step 0,")
        assert any("Bubble" in line and "33.3%" in line for line in frame)
        frame = seen.wait_until_seen("the loss is large")
        run.step()
        run.end()
        stays = seen.end()
    assert "Bubble: idle share of the window" in stays
    assert "ended: ok" in stays
    assert re.search(r"Step 1, .* step 2 has no known end", stays)
    assert "F0" in stays
    assert stays.endswith("\r\n")
    for frame in seen.frames:
        assert len(frame) <= 24
        assert max(map(len, frame), default=0) <= 80


def test_terminal_is_left_as_it_was(run):
    """Ctrl-C ends it with exit code 0: the cursor is back, the screen too, and there is no traceback."""
    run.begin()
    run.step()
    with terminal(run.folder) as seen:
        seen.wait_until_seen("running")
        seen.process.send_signal(signal.SIGINT)
        stays = seen.end()
    assert "Traceback" not in seen.text
    assert seen.text.count("\x1b[?1049h") == seen.text.count("\x1b[?1049l") == 1
    assert seen.text.rindex("\x1b[?25h") > seen.text.rindex("\x1b[?25l")
    assert "running" in stays


def test_nonfinite_in_terminal(run):
    """The first tensor that is not finite is said in red."""
    run.begin()
    run.step()
    run.measure(iteration=0, layer="l0", tensor="output", statistic="max", value=None, nonfinite="nan", nans=3)
    run.end()
    with terminal(run.folder) as seen:
        stays = seen.end()
    assert "First non-finite tensor: output of l0, in iteration 0 (3 NaN)" in stays
    assert "\x1b[1;31m" in seen.text


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {}])
def test_no_room(run, environment):
    """Where a terminal cannot draw, or is too small, there is a line for each step."""
    run.begin()
    run.step()
    run.end()
    size = {} if environment else {"columns": 30, "lines": 5}
    with terminal(run.folder, **size, **environment) as seen:
        seen.end()
    assert "\x1b[?1049h" not in seen.text
    assert "step 0   6.50 ms" in " ".join(seen.text.split("\r\n"))


# In a pipe.


def test_pipe(tmp_path):
    """Without a terminal, each step of a traced process is a line, as soon as it is whole, and so is the end."""
    with recorder(tmp_path / "run") as process:
        process.step()
        process.step()
        with piped(tmp_path / "run") as watch:
            assert watch.stdout is not None
            assert re.match(r"step 0   .* bubble .*%", watch.stdout.readline())
            process.step()
            assert watch.stdout.readline().startswith("step 1 ")
            process.end()
            assert watch.stdout.readline().startswith("step 2 ")
            assert watch.stdout.readline() == f"{tmp_path / 'run'}: ended: ok\n"
            assert watch.communicate(timeout=LIMIT) == ("", "")
            assert watch.returncode == 0


def test_pipe_from_nothing(run):
    """A run that is not there is waited for; what is not finite is said once."""
    with piped(run.folder) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline() == f"{run.folder}: waiting for a recording\n"
        run.begin()
        for step in range(3):
            run.measure(
                iteration=step, layer="l0", tensor="output", statistic="max", value=None, nonfinite="nan", nans=1
            )
            run.step()
        run.end("ValueError: too bad")
        lines = watch.stdout.read().splitlines()
        assert watch.wait(LIMIT) == 0
    assert lines[0] == "not finite: output of l0, first in iteration 0"
    assert [line.partition("   ")[0] for line in lines[1:4]] == ["step 0", "step 1", "step 2"]
    assert lines[4:] == [f"{run.folder}: ended: ValueError: too bad"]


def test_pace_in_pipe(run):
    """Steps that take longer than those before are said once, though every look finds them."""
    run.begin()
    for step in range(45):
        run.step(task=1000 if step < 30 else 1500)
    with piped(run.folder) as watch:
        assert watch.stdout is not None
        before = [watch.stdout.readline() for _ in range(45)]
        run.step(task=1500)
        run.end()
        lines = before + watch.stdout.read().splitlines()
    slower = [line for line in lines if line.startswith("Since step ")]
    text = "Since step 30, steps take 1.50 times as long: 10.5 ms instead of 7.00 ms. "
    assert [line.strip() for line in slower] == [f"{text}Computing takes longer everywhere: 50% of a step before."]


@pytest.mark.parametrize(("spent", "count"), [(0.001, 2), (0.05, 2), (0.5, 64), (3.0, 64)])
def test_looks_take_a_hundredth_of_the_machine(monkeypatch, spent, count):
    """The more a look takes of the processors, the later the next one comes, but for five seconds at most."""
    monkeypatch.setattr("pipesight.cli.watch.processors", lambda: count)
    pause = pause_after(spent)
    assert 1 <= pause <= 5
    assert spent / (pause * count) <= 0.01 + 1e-9


def test_pipe_restarted(run):
    """An attempt that torchrun starts after one that failed is followed from its first step."""
    run.description.update(launch="job_1", ppid=os.getpid(), restart=0)
    run.begin()
    run.step()
    run.step()
    with piped(run.folder) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("step 0 ")
        run.end("SIGTERM")
        again = GrowingRun(run.folder, balance=[1, 2], chunks=2, started="2024-01-01T00:00:00+00:00")
        again.description.update(launch="job_1", ppid=os.getpid(), restart=1)
        again.begin()
        again.step()
        again.step()
        again.end()
        lines = watch.stdout.read().splitlines()
        assert watch.wait(LIMIT) == 0
    assert lines[0] == f"{run.folder}: restarted; this is attempt 1"
    assert [line.partition("   ")[0] for line in lines[1:3]] == ["step 0", "step 1"]
    assert lines[3:] == [f"{run.folder}: ended: ok"]


def test_newer_format(run):
    """A run of a newer format is watched, after a warning."""
    run.description["format_version"] = 9
    run.begin()
    run.step()
    run.end()
    with piped(run.folder) as watch:
        assert watch.stdout is not None
        lines = watch.stdout.read().splitlines()
        assert watch.wait(LIMIT) == 0
    assert "run.json: format version 9, but pipesight" in lines[0]
    assert lines[-1] == f"{run.folder}: ended: ok"


def test_pipe_interrupted(run):
    """Ctrl-C ends it there too, with exit code 0 and not a word."""
    run.begin()
    run.step()
    run.step()
    with piped(run.folder) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("step 0 ")
        watch.send_signal(signal.SIGINT)
        assert watch.communicate(timeout=LIMIT) == ("", "")
        assert watch.returncode == 0


def test_reader_leaves(run):
    """A reader of the pipe that leaves ends it without a traceback."""
    run.begin()
    run.step()
    run.step()
    with piped(run.folder) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.stdout.close()
        run.step()
        run.step()
        assert watch.wait(LIMIT) != 0
        assert watch.stderr is not None
        assert watch.stderr.read() == ""


def test_plain(run):
    """--plain prints lines in a terminal too."""
    run.begin()
    run.step()
    run.end()
    with terminal(run.folder, "--plain") as seen:
        seen.end()
    assert "\x1b" not in seen.text
    assert seen.text.startswith("step 0 ")


def test_no_run(tmp_path):
    """What is no run is refused in one line."""
    (tmp_path / "notes.txt").write_text("hello")
    ended = pipesight("watch", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("pipesight watch: error: not a run: ")
    assert ended.stderr.count("\n") == 1


# What is drawn.


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of five steps of three partitions, the third step twice as long."""
    run = GrowingRun(tmp_path_factory.mktemp("drawn") / "run", balance=[1, 1, 1], chunks=2, pid=1).begin()
    for step in range(5):
        run.step(task=2000 if step == 2 else 1000)
    run.end()
    with open_run(run.folder) as opened:
        return analyse(opened)


def test_looks_plan_nothing(tmp_path):
    """What is drawn is that of the whole report, without its advice, which would take most of the time."""
    run = GrowingRun(tmp_path / "run", balance=[1, 3], chunks=2).begin()
    for step in range(12):
        run.step(task=1000 + 500 * (step > 8))
    run.end()
    with open_run(run.folder) as opened:
        whole, quick = analyse(opened), analyse(opened, advice=False)
    assert whole.verdict.changes
    assert whole.measured is not None
    assert (quick.verdict.changes, quick.measured, quick.critical_path) == ((), None, None)
    drawn = [
        draw_frame(Frame("RUN", "running", one, latest_step(one), []), width=80, height=40) for one in (whole, quick)
    ]
    assert drawn[0] == drawn[1]


def test_figures(report):
    """The last step and the median are those of the schedule; a partition's bubble is what it does not compute."""
    figures = latest_step(report)
    assert figures is not None
    assert figures.steps == 5
    assert figures.last.step == 4
    assert figures.usual.time == 9000  # 2 x (2 + 3 - 1) tasks, and the pause after them
    assert figures.last.bubble == pytest.approx(0.5)
    assert [(row.last, row.usual) for row in figures.partitions] == [(0.5, 0.5)] * 3
    elapsed = sum(step.time for step in steps_of(report))
    assert figures.usual.samples_per_second == pytest.approx(5 * 16 / elapsed * 1e6)  # the slow step counts, too
    assert [step.step for step in steps_of(report)] == list(range(5))
    assert steps_of(report)[2].time > figures.usual.time
    for step in steps_of(report):
        assert sum(step.parts) == pytest.approx(step.time)


@pytest.fixture(scope="module")
def paused(tmp_path_factory):
    """A report of five steps, each with an evaluation and a pause after it, 10 ms in all; so has the last."""
    made = Made(tmp_path_factory.mktemp("paused") / "run", balance=[1, 1], chunks=2)
    at = 0
    for step in range(5):
        end = made.gpipe(step, lambda *_: 1000, at=at)
        made.span("compute", "step", begin=end, dur=500)
        for j in range(2):
            for i in range(2):
                begin = end + 1000 + 1000 * (i + j)
                where = {"partition": j, "microbatch": i, "phase": "forward"}
                made.task(step + 1, **where, begin=begin, dur=1000, minibatch=100 + step)
        at = end + 10_000
    with open_run(made.write()) as opened:
        return analyse(opened)


def test_a_pause_after_each_step(paused):
    """What follows a step is in its time. Nothing is known to follow the last, so it is not held against others."""
    assert steps_of(paused)[-1].time < steps_of(paused)[0].time == 16_000
    steps = steps_of(paused, ended=True)
    assert [step.whole for step in steps] == [True] * 4 + [False]
    figures = latest_step(paused, ended=True)
    assert (figures.last.step, figures.left_out, figures.steps) == (3, 4, 4)
    assert figures.last.time == figures.usual.time == 16_000
    assert figures.last.parts == figures.usual.parts
    drawn = "\n".join(draw_frame(Frame("RUN", "has ended", paused, figures), width=80, height=30))
    assert "Step 3, window 6.00 ms   step 4 has no known end" in drawn
    assert "Step time            16.0 ms   usually 16.0 ms, the median of 4 steps" in drawn
    assert "1,000 samples/s   1,000 over all steps including pauses" in drawn
    assert line_of(steps[-1]).startswith("step 4   6.50 ms without the pause after it   bubble ")
    assert latest_step(paused).last.step == 4  # while it goes on, the steps that are shown end where the next begins


@pytest.mark.parametrize("width", [40, 60, 80, 120, 400])
@pytest.mark.parametrize("height", [8, 10, 14, 24, 60])
@pytest.mark.parametrize("ascii", [False, True])
def test_fits(report, width, height, ascii):
    """Whatever the size of the terminal, nothing is wider or higher, and the numbers are there."""
    log = [LogLine(0, None, "INFO", "train", f"line {k} {'x' * 300}\nmore", step=k) for k in range(50)]
    frame = Frame("R" * 200, "going on for 0:01", report, latest_step(report), log)
    lines = draw_frame(frame, width=width, height=height, ascii=ascii)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("Step time") for line in lines)
    assert any(line.startswith("Bubble") for line in lines)
    if height >= 10:
        assert any(line.startswith("Step 4,") for line in lines)
    if height >= 24:
        assert "Where the time goes" in "\n".join(lines)
    if height > 24 or (height == 24 and width >= 80):
        assert any("line 49" in line for line in lines)
    if ascii:
        assert "\n".join(lines).isascii()


@pytest.mark.parametrize(("width", "height"), [(40, 30), (80, 30), (80, 18)])
def test_program_without_a_pipeline(tmp_path, width, height):
    """A program's step is drawn with its own parts, and nothing is said of a bubble; no words are cut off."""
    made = Made(tmp_path / "run", pipelines=[])
    for number in range(4):
        made.span("compute", "backward", begin=number * 1_000, dur=500, module="Net", depth=0, step=number)
        made.span("mine", "my own metrics of everything", begin=number * 1_000 + 500, dur=200)
        made.span("compute", "step", begin=number * 1_000 + 700, dur=100, step=number)
    report = analysed(made)
    log = [LogLine(0, None, "INFO", "train", "the accuracy on the validation set is 0.97", step=3)]
    frame = Frame("/home/somebody/runs/of-today/RUN", "running for 0:42", report, latest_step(report), log)
    text = "\n".join(draw_frame(frame, width=width, height=height))
    words = " ".join(text.split())
    assert "…" not in text
    assert words.startswith("/home/somebody/runs/of-today/RUN running for 0:42 Step time")
    assert "INFO the accuracy on the validation set is 0.97" in words
    assert "Step time 1.00 ms usually 1.00 ms, the median of 3 steps" in words
    assert re.search(r"my own metrics of everything\s+200 µs +20.0%", text)
    assert "bubble" not in text.lower()
    assert max(map(len, text.splitlines())) <= width
    assert [line_of(step) for step in steps_of(report)][-1] == "step 2   1.00 ms"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_matters_most_is_not_cut_off(report, width):
    """The place of the first tensor that is not finite, and how the run ended, go on in the next line."""
    layer = "encoder.layers.11.attention.fault"
    first = NonFinite(5, layer, "activation", 0, None, 1, 1, 1, partition=1, microbatch=3, phase="forward")
    state = "has ended: rank 1 was killed, or its machine went down; the others were then ended with SIGTERM"
    report = replace(report, nonfinite=first)
    lines = draw_frame(Frame("RUN", state, report, latest_step(report)), width=width, height=40)
    assert max(map(len, lines)) <= width
    said = " ".join(" ".join(lines).split())
    place = "in iteration 5, partition 1, micro-batch 3, forward (1 Inf)"
    assert f"RUN {state} First non-finite tensor: activation of {layer}, {place}" in said


def test_parts_that_take_no_time(report):
    """A part that usually matters, and took no time in the last step, has dashes."""
    figures = latest_step(report)
    parts = list(figures.last.parts)
    parts[PARTS.index("fill_and_drain")] = 0
    last = replace(figures.last, parts=tuple(parts))
    frame = Frame("RUN", "going on", report, replace(figures, last=last))
    (line,) = [line for line in draw_frame(frame, width=80, height=40) if line.startswith("  fill and drain")]
    assert line.split()[3:5] == ["-", "-"]


def test_names_are_text(report):
    """Escape codes in names and messages are not carried out."""
    log = [LogLine(0, None, "INFO", "train", "\x1b[2J\x1b]0;title\x07 hello")]
    lines = draw_frame(Frame("a\x1b[31m", "b\x07", report, latest_step(report), log), width=80, height=40)
    assert "\x1b" not in "".join(lines)
    assert "\x07" not in "".join(lines)


def test_engine_log(report):
    """Lines that engines log for every task or pipeline, and any below INFO, are not shown; all warnings are."""
    engine = [LogLine(0, None, "INFO", "pipesight.pipeline", f"task {k}") for k in range(50)]
    engine += [LogLine(0, None, "INFO", "torch.distributed.pipelining.schedules", "Using Schedule1F1B")]
    warning = LogLine(0, None, "WARNING", "pipesight.trace", "events are lost")
    own = LogLine(0, None, "INFO", "train", "loss 3.1")
    debug = LogLine(0, None, "DEBUG", "train", "a tensor")
    figures = latest_step(report)

    def drawn(log):
        return [
            line.split(None, 1)[1] for line in draw_frame(Frame("", "", report, figures, log), width=80, height=40)[-2:]
        ]

    assert drawn([own, debug, warning, debug, *engine]) == ["loss 3.1", "events are lost"]
    assert "Log" not in draw_frame(Frame("", "", report, figures, [debug, *engine]), width=80, height=40)


def test_line(report):
    """The line of a step has its time, its throughput and its bubble beside the schedule's own."""
    step = steps_of(report)[1]
    text = "step 1   9.00 ms   1,778 samples/s   bubble 50.0%, schedule alone 50.0%"
    assert line_of(step) == text


def test_nothing_to_draw():
    """Before the first step there is a title, how far it is, and the log."""
    log = [LogLine(0, None, "", "", "hello")]
    lines = draw_frame(Frame("RUN", "going on", log=log), width=40, height=10)
    assert lines == ["RUN" + " " * 29 + "going on", "", "Log", "  hello"]
