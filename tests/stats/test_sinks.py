"""Where statistics go, and what happens where they cannot."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.stats.log_settings import LogSettings
from pipesight.stats.sinks import (
    BaseLogger,
    FileSink,
    JsonlSink,
    LoggerSink,
    MlflowSink,
    Record,
    Sinks,
    TensorBoardSink,
    WandbSink,
)
from pipesight.stats.sinks.file import format_values
from support.processes import STRICT_PYTHON
from support.schemas import validated

LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - INFO - (?P<name>[^\t]*) \t\t\t\t iteration=(?P<iteration>\d{6,})"
    r" \t\t\t\t value=(?P<value>\S+)(?: \t\t\t\t excluded=(?P<excluded>[^\t]*))?"
)
NAMES = ["max", "min", "mean", "std", "l1_norm", "l2_norm"]
SIX = [Record("fc1", "activation", name, 3, 1.5 * n) for n, name in enumerate(NAMES)]
ONE = [Record("fc1", "activation", "max", 3, 7.0)]


def lines(sink):
    """Return the lines in the file of a sink, taken apart."""
    text = sink.path.read_bytes().decode()
    assert text.endswith("\n") or not text
    return [LINE.fullmatch(line).groupdict() for line in text.split("\n")[:-1]]


def objects(sink):
    """Return the objects in the file of a sink; whatever is not JSON is an error."""

    def refuse(word):
        raise ValueError(word)

    lines = sink.path.read_bytes().split(b"\n")[:-1]
    return [validated("statistics", json.loads(line, parse_constant=refuse)) for line in lines]


@pytest.fixture(params=[FileSink, JsonlSink])
def file_sink(request, tmp_path):
    """One of the sinks that write a file."""
    sink = request.param(tmp_path, rank=0)
    yield sink
    sink.close()


def test_name():
    """A scalar is called by its layer, tensor and statistic; one that has a name only, by that."""
    assert SIX[0].name == "fc1_activation_max"
    assert Record.named("loss", 1.0, 2) == Record("loss", "", "", 2, 1.0)
    assert Record.named("loss", 1.0, 2).name == "loss"


# The log file.


def test_lines_of_the_log_file(tmp_path):
    """A value is a line as nvdlfw_inspect writes it, in the same file."""
    sink = FileSink(tmp_path, rank=3, settings=LogSettings())
    sink.write(ONE)
    sink.write([Record("b", "wgrad", "min", 1234567, -0.25)])
    sink.close()
    assert sink.path == tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-3.log"
    first, second = sink.path.read_text().splitlines()
    assert first[23:] == " - INFO - fc1_activation_max \t\t\t\t iteration=000003 \t\t\t\t value=7.0000"
    assert second[23:] == " - INFO - b_wgrad_min \t\t\t\t iteration=1234567 \t\t\t\t value=-0.2500"
    assert all(LINE.fullmatch(line) for line in (first, second))


@pytest.mark.parametrize(
    ("nans", "infs", "excluded"), [(3, 1, "3 nan, 1 inf"), (3, 0, "3 nan"), (0, 2, "2 inf"), (0, 0, None)]
)
def test_excluded(nans, infs, excluded, tmp_path):
    """A line says how many elements the value leaves out; counts that are floats are written as counts."""
    sink = FileSink(tmp_path)
    sink.write([Record("a", "b", "c", 0, 1.0, nans, infs), Record("a", "b", "c", 0, 1.0, float(nans), float(infs))])
    sink.close()
    assert [line["excluded"] for line in lines(sink)] == [excluded] * 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.0, "7.0000"),
        (0.0, "0.0000"),
        (-0.0, "-0.0000"),
        (0.1, "0.1000"),
        (1 / 3, "0.333333333"),
        (1e-4, "0.0001"),
        (1e-5, "1e-05"),
        (1.23456789e-7, "1.23456789e-07"),
        (1234.5678912, "1234.56789"),
        (16777217.0, "16777217.0000"),
        (3e9, "3000000000.0000"),
        (1e25, "1e+25"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_digits(value, text):
    """Ordinary values look as in nvdlfw_inspect, others have the digits that they need."""
    assert format_values([value]) == [text]


@given(st.floats())
def test_nine_digits(value):
    """A value can be read back with float, to nine significant digits; fixed ones have four decimals or more."""
    (text,) = format_values([value])
    read = float(text)
    assert math.isclose(read, value, rel_tol=5.1e-9) or (math.isnan(read) and math.isnan(value))
    if "e" not in text and math.isfinite(value):
        assert re.fullmatch(r"-?\d+\.\d{4,}", text)


@given(st.floats(width=32, allow_nan=False))
def test_float32_is_read_back(value):
    """A float32 is read back from the log file as it was."""
    assert struct.pack("f", float(format_values([value])[0])) == struct.pack("f", value)


@given(st.text() | st.text(st.characters(categories=["Cs", "Cc", "Zl", "Zp"])))
def test_any_layer_name(tmp_path_factory, text):
    """Newlines, tabs and other odd characters in a name break no line, in either file."""
    folder = tmp_path_factory.mktemp("odd")
    file, jsonl = FileSink(folder, rank=0), JsonlSink(folder, rank=0)
    for sink in (file, jsonl):
        sink.write([Record(text, text, "max", 1, 2.0), *ONE])
        sink.close()
    assert [line["value"] for line in lines(file)] == ["2.0000", "7.0000"]
    assert len(file.path.read_bytes().decode().splitlines()) == 2
    if text.isprintable():
        assert lines(file)[0]["name"] == f"{text}_{text}_max"
    first, _ = objects(jsonl)
    for read in (first["layer"], first["tensor"]):  # JSON makes one character of a pair of surrogates
        assert read.encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")


def test_settings_of_the_environment(tmp_path, monkeypatch):
    """The log file obeys the variables for overwriting and for the time in its name, and not the level."""
    monkeypatch.setenv("NVDLFW_INSPECT_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE", "no")
    for _ in range(2):
        sink = FileSink(tmp_path, rank=0)
        sink.write(ONE)
        sink.close()
    assert len(lines(sink)) == 2
    monkeypatch.setenv("NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP", "yes")
    assert re.fullmatch(r"nvdlfw_inspect_\d{8}_\d{6}_globalrank-1\.log", FileSink(tmp_path, rank=1).path.name)


# JSON lines.


def test_json_lines(tmp_path):
    """A value is an object on a line, with all its digits, and counts where elements were left out."""
    sink = JsonlSink(tmp_path, rank=12)
    sink.write([Record('a"\n', "activation", "zeros%", 5, 0.1 + 0.2), Record("b", "c", "max", 0, 1e-300, 3, 0)])
    sink.write([Record("b", "c", "max", 1, -2.0, 0.0, 4.0)])
    sink.close()
    assert sink.path == tmp_path / "stats" / "rank-00012.jsonl"
    assert objects(sink) == [
        {"iteration": 5, "layer": 'a"\n', "tensor": "activation", "statistic": "zeros%", "value": 0.30000000000000004},
        {"iteration": 0, "layer": "b", "tensor": "c", "statistic": "max", "value": 1e-300, "nans": 3},
        {"iteration": 1, "layer": "b", "tensor": "c", "statistic": "max", "value": -2.0, "infs": 4},
    ]


def test_no_value_no_file(tmp_path):
    """A file is there from the start, and stays only if it has lines; another's that was closed meanwhile too."""
    sinks = [JsonlSink(tmp_path, rank=rank) for rank in (0, 0, 1)]
    for sink in sinks:
        sink.open()
        assert sink.path.exists()
    sinks[0].close()
    sinks[1].write([Record("a", "b", "c", 0, 1.0)])
    for sink in sinks:
        sink.close()
    assert [path.name for path in (tmp_path / "stats").iterdir()] == ["rank-00000.jsonl"]
    assert [entry["value"] for entry in objects(sinks[1])] == [1.0]


@given(st.floats())
def test_any_value_is_json(tmp_path_factory, value):
    """Finite values are read back exactly; the others are null, and nonfinite says which."""
    sink = JsonlSink(tmp_path_factory.mktemp("json"), rank=0)
    sink.write([Record("a", "b", "c", 0, value)])
    sink.close()
    (read,) = objects(sink)
    if math.isfinite(value):
        assert struct.pack("d", read["value"]) == struct.pack("d", value)
        assert "nonfinite" not in read
    else:
        assert read["value"] is None
        assert repr(float(read["nonfinite"])) == repr(value)


def test_numbers_of_other_kinds(tmp_path):
    """NumPy's floats and integers are numbers too."""
    file, jsonl = FileSink(tmp_path), JsonlSink(tmp_path)
    for sink in (file, jsonl):
        sink.write([Record("a", "b", "c", np.int64(7), value) for value in (np.float64(0.5), np.float32(0.5), 2)])
        sink.close()
    assert [(line["iteration"], line["value"]) for line in objects(jsonl)] == [(7, 0.5), (7, 0.5), (7, 2.0)]
    assert [line["value"] for line in lines(file)] == ["0.5000", "0.5000", "2.0000"]


# Both files.


def test_overwrite_and_append(tmp_path):
    """A file is begun anew, unless that is not wanted; then what a kill left of its last line is removed."""
    for make in (
        lambda overwrite: JsonlSink(tmp_path, rank=0, overwrite=overwrite),
        lambda overwrite: FileSink(tmp_path, rank=0, settings=LogSettings(overwrite=overwrite)),
    ):
        for overwrite, count in ((True, 6), (True, 6), (False, 12)):
            sink = make(overwrite)
            sink.write(SIX)
            sink.close()
            assert sink.path.read_bytes().count(b"\n") == count
        whole = sink.path.read_bytes()
        sink.path.write_bytes(whole + b"x" * 100_000)
        sink = make(False)
        sink.open()
        sink.close()
        assert sink.path.read_bytes() == whole
        sink.path.write_bytes(b"never ended")
        sink = make(False)
        sink.write(ONE)
        sink.close()
        assert b"never" not in sink.path.read_bytes()


def test_nothing_on_disk_before_the_first_value(file_sink, tmp_path):
    """To make a sink leaves nothing on the disk; open makes the file."""
    assert os.listdir(tmp_path) == []
    file_sink.open()
    assert file_sink.path.read_bytes() == b""


def test_write_after_close(file_sink):
    """A closed file is not written to."""
    file_sink.write(ONE)
    file_sink.close()
    with pytest.raises(ValueError, match="closed"):
        file_sink.write(ONE)
    assert file_sink.path.read_bytes().count(b"\n") == 1


def test_removed_while_open(file_sink):
    """When somebody removes the folder, it is made again for the next values."""
    file_sink.write(ONE)
    file_sink.path.unlink()
    file_sink.path.parent.rmdir()
    file_sink.write(SIX)
    assert file_sink.path.read_bytes().count(b"\n") == 6


@pytest.mark.parametrize("kind", ["FileSink", "JsonlSink"])
def test_killed(kind, tmp_path):
    """After kill -9 in the middle of writing, all lines but the last are whole, and none is missing."""
    source = f"""
        import itertools
        from pipesight.stats.sinks import {kind}, Record
        sink = {kind}({str(tmp_path)!r}, rank=0)
        for k in itertools.count():
            sink.write([Record("layer", "tensor", f"s{{n}}", k, 0.1) for n in range(40)])
            if k == 20:
                print("go", flush=True)
    """
    process = subprocess.Popen([*STRICT_PYTHON, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"go\n"
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    (path,) = tmp_path.glob("*/*")
    *whole, _ = path.read_text().split("\n")
    if kind == "JsonlSink":
        found = [(line["iteration"], line["statistic"]) for line in map(json.loads, whole)]
    else:
        groups = [LINE.fullmatch(line) for line in whole]
        found = [(int(line["iteration"]), line["name"].rpartition("_")[2]) for line in groups]
    assert len(found) > 800
    assert found == [(k // 40, f"s{k % 40}") for k in range(len(found))]


# TensorBoard and users' loggers.


class Recorder(BaseLogger):
    """Keeps what it gets."""

    def __init__(self):
        self.calls = []

    def log_scalar(self, name, value, iteration, **kwargs):
        assert type(value) is float
        self.calls.append((name, value, iteration, kwargs))


def test_base_logger():
    """A logger of the user's gets the name, a plain float and the iteration; BaseLogger itself is abstract."""
    with pytest.raises(TypeError, match="abstract"):
        BaseLogger()
    logger = Recorder()
    sink = LoggerSink(logger)
    sink.write(SIX[:2])
    sink.close()
    assert logger.calls == [("fc1_activation_max", 0.0, 3, {}), ("fc1_activation_min", 1.5, 3, {})]


def test_prefix(tmp_path):
    """The sinks that have no tracker put a prefix before the name, too."""
    logger = Recorder()
    file, jsonl = FileSink(tmp_path, rank=0, prefix="train/"), JsonlSink(tmp_path, rank=0, prefix="train/")
    for sink in (LoggerSink(logger, prefix="train/"), file, jsonl):
        sink.write(ONE)
        sink.close()
    assert [name for name, *_ in logger.calls] == ["train/fc1_activation_max"]
    assert "train/fc1_activation_max \t" in file.path.read_text()
    assert [line["layer"] for line in objects(jsonl)] == ["train/fc1"]


@pytest.mark.parametrize("wrong", [3, Recorder, SimpleNamespace(log_scalar=1)])
def test_wrong_logger(wrong):
    """Something that cannot log is refused, in words; a class is not its instance."""
    with pytest.raises(TypeError, match="log_scalar"):
        LoggerSink(wrong)


def test_tensorboard(tmp_path):
    """The scalars are in the event file of torch's writer, which stays open."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(writer)
    sink.write(SIX)
    sink.write([Record("fc1", "activation", "max", 4, 9.0)])
    sink.close()
    writer.add_scalar("loss", 1.0, 4)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"/".join(record[:3]) for record in SIX} | {"loss"}
    assert [(e.step, e.value) for e in events.Scalars("fc1/activation/max")] == [(3, 0.0), (4, 9.0)]


def test_wrong_writer():
    """Something without add_scalar is refused, and the error says what to use."""
    with pytest.raises(TypeError, match="SummaryWriter"):
        TensorBoardSink("logs")


def test_writer_of_another_kind():
    """Any object with add_scalar will do; it need not have flush."""
    calls = []
    sink = TensorBoardSink(SimpleNamespace(add_scalar=lambda *args: calls.append(args)))
    sink.write(ONE)
    sink.close()
    assert calls == [("fc1/activation/max", 7.0, 3)]
    TensorBoardSink(SimpleNamespace(add_scalar=lambda *args: calls.append(args)), prefix="mine/", separator="_").write(
        [*ONE, Record.named("loss/train", 1.0, 3)]
    )
    assert calls[1:] == [("mine/fc1_activation_max", 7.0, 3), ("mine/loss/train", 1.0, 3)]


# Weights & Biases.


class Run:
    """The surface of a wandb run, with its rule about steps: a row that is behind is dropped."""

    def __init__(self):
        self.step, self.pending, self.rows, self.dropped, self.defined = 0, {}, [], [], []

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, row, step=None, commit=None):
        if step is not None and step < self.step:
            self.dropped.append(row)
            return
        if step is not None and step > self.step:
            self._flush()
            self.step = step
        self.pending.update(row)
        if commit or (commit is None and step is None):
            self._flush()
            self.step += 1

    def _flush(self):
        if self.pending:
            self.rows.append(self.pending)
        self.pending = {}

    def finish(self):
        self._flush()
        return self.rows


def test_wandb_one_call():
    """All values of an iteration are one row, under a prefix, with the iteration as the x axis."""
    run = Run()
    sink = WandbSink(run)
    sink.write([*SIX, Record("fc1", "activation", "max", 4, 9.0)])
    sink.close()
    assert run.defined == [("stats/*", "stats/iteration")]
    first, second = run.finish()
    assert first == {f"stats/{record.name}": record.value for record in SIX} | {"stats/iteration": 3}
    assert second == {"stats/fc1_activation_max": 9.0, "stats/iteration": 4}


PROGRAMS = {
    "none": lambda run, k: None,
    "with steps": lambda run, k: run.log({"loss": k}, step=k),
    "without steps": lambda run, k: run.log({"loss": k}),
    "twice": lambda run, k: (run.log({"loss": k}), run.log({"lr": k})),
    "in samples": lambda run, k: run.log({"loss": k}, step=32 * k),
    "in samples, seldom": lambda run, k: run.log({"loss": k}, step=32 * k) if k % 5 == 0 else None,
    "seldom": lambda run, k: run.log({"loss": k}) if k % 5 == 0 else None,
    "seldom, with steps": lambda run, k: run.log({"loss": k}, step=k) if k % 5 == 0 else None,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_wandb_beside_the_program(program, first):
    """However a program logs to the run itself, no value of ours and none of its own is dropped or replaced."""
    run = Run()
    sink = WandbSink(run)
    log = PROGRAMS[program]
    for k in range(20):
        if first:
            log(run, k)
        sink.write([Record("a", "b", "max", k, float(k))])
        sink.write([Record("a", "b", "min", k, float(k))])
        if not first:
            log(run, k)
    rows = run.finish()
    assert run.dropped == []
    for name in ("stats/a_b_max", "stats/a_b_min"):
        ours = [(row["stats/iteration"], row[name]) for row in rows if name in row]
        assert ours == [(k, float(k)) for k in range(20)]
    losses = [row["loss"] for row in rows if "loss" in row]
    expected = [] if program == "none" else list(range(0, 20, 5 if "seldom" in program else 1))
    assert losses == expected


def test_wandb_active_run(monkeypatch):
    """Without a run, the active one is taken; without an active one, the error says how to begin it."""
    wandb = ModuleType("wandb")
    wandb.run = Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    WandbSink(prefix="x/").write(ONE)
    assert wandb.run.finish() == [{"x/fc1_activation_max": 7.0, "x/iteration": 3}]
    wandb.run = None
    with pytest.raises(RuntimeError, match=re.escape("call wandb.init() first")):
        WandbSink()


# MLflow.


@pytest.fixture
def mlflow(monkeypatch):
    """The surface of MLflow that we use."""
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.batches = []
    module.run = SimpleNamespace(info=SimpleNamespace(run_id="active"))
    module.active_run = lambda: module.run
    client = SimpleNamespace(log_batch=lambda run_id, metrics: module.batches.append((run_id, metrics)))
    module.MlflowClient = lambda: client
    entities.Metric = lambda key, value, timestamp, step: (key, value, step, timestamp)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return module


def test_mlflow_one_call(mlflow):
    """All values of a step are one batch, for the run that is given or active; more than 1000 are several."""
    MlflowSink().write(SIX)
    ((run, metrics),) = mlflow.batches
    assert run == "active"
    assert [metric[:3] for metric in metrics] == [("/".join(record[:3]), record.value, 3) for record in SIX]
    mlflow.batches.clear()
    MlflowSink(prefix="mine/", separator="_").write(SIX)
    assert [metric[0] for metric in mlflow.batches.pop()[1]] == [f"mine/{record.name}" for record in SIX]
    MlflowSink("mine").write(SIX * 400)
    assert [(run, len(metrics)) for run, metrics in mlflow.batches] == [("mine", 1000), ("mine", 1000), ("mine", 400)]


def test_mlflow_names(mlflow):
    """What MLflow does not allow in a name is replaced, so that no batch is refused for it."""
    odd = {
        "a.b-c d": "a.b-c d/t/zeros_percent",
        "/a//b": "a/b/t/zeros_percent",
        "../a": "a/t/zeros_percent",
        "é(1):": "__1__/t/zeros_percent",
        "x" * 300: ("x" * 300 + "/t/zeros_percent")[-250:],
    }
    MlflowSink().write([Record(layer, "t", "zeros%", 0, 1.0) for layer in odd])
    assert [metric[0] for metric in mlflow.batches[0][1]] == list(odd.values())


def test_mlflow_no_run(mlflow):
    """Without an active run, the error says how to begin one."""
    mlflow.run = None
    with pytest.raises(RuntimeError, match=re.escape("call mlflow.start_run() first")):
        MlflowSink()


@pytest.mark.parametrize(("make", "name"), [(WandbSink, "wandb"), (MlflowSink, "mlflow")])
def test_missing_extra(make, name, monkeypatch):
    """Where a package is missing, the error has the command that installs it."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=re.escape(f"pip install pipesight[{name}]")):
        make()


# Several sinks, and failures.


class Failing:
    """Fails with the given error, and counts."""

    def __init__(self, error, forgives=None):
        self.error, self.closed = error, 0
        if forgives is not None:
            self.forgives = forgives

    def write(self, records):
        raise self.error

    def close(self):
        self.closed += 1
        raise self.error


def test_all_sinks(tmp_path):
    """All sinks get all records, in order; no records are no call; after close, records go nowhere."""
    loggers = [Recorder(), Recorder()]
    file = FileSink(tmp_path)
    sinks = Sinks([LoggerSink(loggers[0]), file, LoggerSink(loggers[1])])
    assert len(sinks) == 3
    sinks.write(SIX)
    sinks.write([])
    sinks.close()
    sinks.write(SIX)
    sinks.close()
    assert [len(logger.calls) for logger in loggers] == [6, 6]
    assert [line["name"] for line in lines(file)] == [record.name for record in SIX]


def test_error_of_the_user():
    """What a user's logger raises is raised, each time, after the other sinks had the records."""

    class Broken(BaseLogger):
        def log_scalar(self, name, value, iteration, **kwargs):
            raise KeyError("mine")

    after = Recorder()
    sinks = Sinks([LoggerSink(Broken()), LoggerSink(Broken()), LoggerSink(after)])
    for count in (1, 2):
        with pytest.raises(KeyError, match="mine") as caught:
            sinks.write(ONE)
        assert caught.value.__notes__ == ["another sink failed too: KeyError: 'mine'"]
        assert len(after.calls) == count
    assert sinks.lost == 0
    sinks.close()


def test_what_is_forgiven():
    """What a sink forgives is told once, counted, and tried again; the sum is told at the end."""
    told = []
    failing, after = Failing(OSError("disk"), (OSError,)), Recorder()
    sinks = Sinks([failing, LoggerSink(after)], warn=told.append)
    for _ in range(3):
        sinks.write(SIX)
    assert (sinks.lost, len(after.calls)) == (18, 18)
    assert told == ["cannot write statistics to Failing (OSError: disk); training continues; lost values are counted"]
    sinks.close()
    assert told[1:] == ["18 values in all could not be written to Failing"]
    assert (sinks.lost, len(sinks), failing.closed) == (18, 0, 1)


def test_close_with_errors():
    """Every sink is closed, whatever another one raises; what is not forgiven is raised."""
    failing = [Failing(ValueError("a")), Failing(ValueError("b"))]
    sinks = Sinks(failing)
    with pytest.raises(ValueError, match="a"):
        sinks.close()
    assert [sink.closed for sink in failing] == [1, 1]
    sinks.close()


def test_interrupted():
    """Ctrl-C in a sink is not an error of the sink."""
    with pytest.raises(KeyboardInterrupt):
        Sinks([Failing(KeyboardInterrupt(), (Exception,))]).write(ONE)


def test_logger_that_logs():
    """A user's logger may write to the sinks itself."""
    kept = []

    class Again(BaseLogger):
        def log_scalar(self, name, value, iteration, **kwargs):
            kept.append(name)
            if name != "again":
                sinks.write([Record.named("again", value, iteration)])

    sinks = Sinks([LoggerSink(Again())])
    sinks.write(ONE)
    assert kept == ["fc1_activation_max", "again"]


def test_threads(tmp_path):
    """Records of many threads come in whole batches, none is lost."""
    sink = JsonlSink(tmp_path)
    sinks = Sinks([sink])

    def work(number):
        for k in range(50):
            sinks.write([Record(f"layer{number}", "t", str(n), k, float(n)) for n in range(5)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sinks.close()
    found = objects(sink)
    assert len(found) == 2000
    for start in range(0, 2000, 5):
        batch = found[start : start + 5]
        assert len({(line["layer"], line["iteration"]) for line in batch}) == 1
        assert [line["value"] for line in batch] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("make", [FileSink, JsonlSink])
def test_full_device(make, tmp_path):
    """On a device that is full, there is one warning, a count, and no error."""
    told = []
    sink = make(tmp_path, rank=0)
    sink.path.parent.mkdir()
    sink.path.symlink_to("/dev/full")
    sinks = Sinks([sink], warn=told.append)
    for _ in range(3):
        sinks.write(SIX)
    sinks.close()
    assert sinks.lost == 18
    assert len(told) == 2
    assert "No space left on device" in told[0]
    assert str(sink.path) in told[0]


def test_full_disk(tmp_path):
    """A disk that fills up in the middle of a batch leaves whole lines, and with room again the next ones follow."""
    source = f"""
        import resource, signal
        from pipesight.stats.sinks import FileSink, JsonlSink, Record, Sinks
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        told = []
        sinks = Sinks([FileSink({str(tmp_path)!r}, rank=0), JsonlSink({str(tmp_path)!r}, rank=0)], warn=told.append)
        def write(k):
            sinks.write([Record("layer", "tensor", f"s{{n}}", k, 0.5) for n in range(7)])
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3001, most))
        for k in range(20): write(k)
        lost = sinks.lost
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        write(20)
        assert len(told) == 2 and all("File too large" in text for text in told), told
        assert sinks.lost == lost
        sinks.close()
        print(lost)
    """
    ended = subprocess.run([*STRICT_PYTHON, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    file, jsonl = FileSink(tmp_path, rank=0), JsonlSink(tmp_path, rank=0)
    read = [[int(line["iteration"]) for line in lines(file)], [line["iteration"] for line in objects(jsonl)]]
    assert int(ended.stdout) == 2 * 7 * 21 - sum(map(len, read))
    for iterations in read:
        kept = len(iterations) // 7 - 1
        assert 0 < kept < 20
        assert iterations == [k for k in (*range(kept), 20) for _ in range(7)]


def test_folder_that_cannot_be_made(tmp_path):
    """Where the folder cannot be made, statistics are lost and counted; when it can, they are written."""
    (tmp_path / "run").write_text("in the way")
    told = []
    sink = JsonlSink(tmp_path / "run", rank=0)
    sinks = Sinks([sink], warn=told.append)
    sinks.write(SIX)
    (tmp_path / "run").unlink()
    sinks.write(SIX)
    sinks.close()
    assert (sinks.lost, len(objects(sink)), len(told)) == (6, 6, 2)


def test_warning_by_default(tmp_path, caplog):
    """Unless somebody else is told, losses are a warning of the module's logger."""
    sinks = Sinks([Failing(OSError("disk"), (OSError,))])
    sinks.write(ONE)
    assert [(r.levelname, r.name) for r in caplog.records] == [("WARNING", "pipesight.stats.sinks.fanout")]
