"""Observing a block of code: what ends up in the run directory."""

import fcntl
import gzip
import itertools
import json
import logging
import os
import re
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset

from pipesight import GPipe, context, trace
from pipesight.recording import observe
from pipesight.recording.step_sampling import StepSampling
from pipesight.runs.directory import RunDirectory
from support import observed
from support.observed import STATS, description, events, learn, log_lines, pipeline, sgd, statistics, tasks, train


@pytest.fixture
def run(tmp_path):
    return tmp_path / "RUN"


def test_everything_is_there(run):
    """One block records tasks, layers, fetches, optimizer steps, checkpoints, statistics and log lines."""
    model = pipeline(checkpoint="always")
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8)
    with observe(run, stats=STATS) as observation:
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            logging.getLogger("mine").info("one more")
        torch.save(model.state_dict(), run.parent / "model.pt")
        assert observation.path == run
    found = {(e["cat"], e["name"]) for e in events(run)}
    assert found >= {
        ("compute", "forward"),
        ("compute", "forward.recompute"),
        ("compute", "backward"),
        ("compute", "forward.layer"),
        ("compute", "forward.recompute.layer"),
        ("compute", "backward.layer"),
        ("compute", "step"),
        ("dataloader", "fetch"),
        ("checkpoint", "capture"),
        ("pipeline", "epoch"),
    }
    assert {(r["iteration"], r["layer"], r["tensor"]) for r in statistics(run)} == {
        *((step, layer, "activation") for step in range(2) for layer in "012"),
        *((step, layer, "wgrad") for step in range(2) for layer in "02"),
    }
    assert sum("INFO mine" in line for line in log_lines(run)) == 2
    assert {file.name for file in run.iterdir()} == {"run.json", "trace", "stats", "logs"}


def test_description(run):
    """`run.json` says what ran, how, of which layers the pipeline is, and what was recorded."""
    model = pipeline(chunks=4, checkpoint="never")
    with observe(run, steps=(0, 9), every=2, logs="warning"):
        train(model, 2)
    found = description(run)
    assert found["format"] == "pipesight-run"
    assert found["format_version"] == 1
    assert found["outcome"] == "ok"
    assert found["started"] < found["ended"]
    assert found["pid"] == os.getpid()
    assert (found["rank"], found["world_size"]) == (0, 1)
    assert found["torch"] == torch.__version__
    (pipe,) = found["pipelines"]
    assert {name: pipe[name] for name in pipe if name != "layers"} == {
        "schedule": "gpipe",
        "partitions": 2,
        "chunks": 4,
        "balance": [2, 1],
        "devices": ["cpu", "cpu"],
        "checkpoint": "never",
        "batch_size": 8,
    }
    assert pipe["layers"][0] == {
        "name": "0",
        "class": "Linear",
        "partition": 0,
        "parameter_bytes": 4 * (4 * 8 + 8),
        "output_bytes": 4 * 8 * 8,
    }
    assert [layer["partition"] for layer in pipe["layers"]] == [0, 0, 1]
    assert found["observed"] == {
        "trace": True,
        "steps": [0, 9],
        "every": 2,
        "stats": None,
        "logs": "warning",
        "max_bytes": 2**30,
    }
    assert found["left_out"] == {"steps": 1, "events": 0, "log_lines": 0}


def test_description_while_it_runs(run):
    """`run.json` is there from the start, without an end, and knows a pipeline once that was called."""
    with observe(run):
        begun = description(run)
        assert (begun["ended"], begun["outcome"], begun["pipelines"]) == (None, None, [])
        train(pipeline(), 1)
        assert len(description(run)["pipelines"]) == 1


def test_clock(run):
    """The clock of `run.json` is that of the trace: it gives the time of events from the monotonic clock."""
    with observe(run):
        before = time.perf_counter_ns()
        train(pipeline(), 1)
        after = time.perf_counter_ns()
    offset = description(run)["clock"]["offset_ns"]
    for task in tasks(run):
        assert (before + offset) // 1000 <= task["ts"] <= task["ts"] + task["dur"] <= (after + offset) // 1000


# Steps.


def test_steps_are_optimizer_steps(run):
    """A step ends with an optimizer's step; several mini-batches before one are of one step."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run, stats=STATS):
        for _ in range(3):
            for _ in range(2):
                learn(model)
            optimizer.step()
    by_minibatch = {e["args"]["minibatch"]: e["args"]["step"] for e in tasks(run)}
    assert [step for _, step in sorted(by_minibatch.items())] == [0, 0, 1, 1, 2, 2]
    assert {e["args"]["minibatch"]: e["args"]["step"] for e in tasks(run, "backward")} == by_minibatch
    assert [e["args"]["step"] for e in events(run) if e["name"] == "step"] == [0, 1, 2]
    assert {record["iteration"] for record in statistics(run)} == {0, 1, 2}


def test_evaluation_belongs_to_the_step_that_it_precedes(run):
    """A pass without backward after step 0 is of step 1, and no statistics are of it."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run, stats=STATS):
        learn(model)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.full((8, 4), 1e6))
        model.train()
        learn(model)
        optimizer.step()
    by_minibatch = {e["args"]["minibatch"]: e["args"]["step"] for e in tasks(run)}
    assert [step for _, step in sorted(by_minibatch.items())] == [0, 1, 1]
    assert max(abs(r["value"]) for r in statistics(run) if r["tensor"] == "activation") < 1e3
    assert {record["iteration"] for record in statistics(run)} == {0, 1}


def test_two_optimizers_end_one_step(run):
    """Optimizers that step one after the other end one step."""
    model = pipeline()
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.partitions]
    with observe(run) as observation:
        for _ in range(2):
            learn(model)
            for optimizer in halves:
                optimizer.step()
        assert observation.step_number == 1
    assert [e["args"]["step"] for e in events(run) if e["name"] == "step"] == [0, 0, 1, 1]


def test_loading_an_optimizer_is_no_step(run):
    """To load a checkpoint, torch has an optimizer without state step once: that ends no step."""
    model = pipeline()
    optimizer = torch.optim.AdamW(model.parameters())
    with observe(run) as observation:
        get_optimizer_state_dict(model, optimizer)
        assert optimizer.state
        for _ in range(2):
            learn(model)
            optimizer.step()
        assert observation.step_number == 1
    assert {e["args"]["step"] for e in events(run) if e["name"] == "forward"} == {0, 1}


def test_steps_that_are_told(run):
    """A program that says which step begins is believed, whatever its optimizers do."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run, stats=STATS) as observation:
        for number in (100, 200):
            observation.step(number)
            for _ in range(2):
                learn(model)
                optimizer.step()
    assert {e["args"]["step"] for e in tasks(run)} == {100, 200}
    assert {record["iteration"] for record in statistics(run)} == {100, 200}


def test_first_step(run):
    """Training that goes on after a checkpoint goes on counting."""
    with observe(run, stats=STATS, first_step=7):
        train(pipeline(), 2)
    assert {e["args"]["step"] for e in tasks(run)} == {7, 8}
    assert {record["iteration"] for record in statistics(run)} == {7, 8}


def test_scaler_that_leaves_a_step_out(run):
    """A step that a gradient scaler skips, because of an overflow, counts all the same."""
    model = pipeline()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    with observe(run) as observation:
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * factor
            assert observation.step_number == number
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def test_fetch_is_of_the_step_to_come(run):
    """A batch is fetched for the step that trains on it."""
    model = pipeline()
    optimizer = sgd(model)
    with observe(run):
        for (x,) in DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=8):
            model(x).sum().backward()
            optimizer.step()
    assert [e["args"]["step"] for e in events(run) if e["name"] == "fetch"] == [0, 1, 2]


# StepSampling.


def test_window(run):
    """Steps outside of a window are left out of trace and statistics, and counted."""
    with observe(run, stats=STATS, steps=(2, 3)):
        train(pipeline(), 6)
    assert {e["args"]["step"] for e in tasks(run)} == {2, 3}
    assert {e["args"]["step"] for e in tasks(run, "backward")} == {2, 3}
    assert {e["args"]["step"] for e in events(run) if "step" in e["args"]} == {2, 3}
    assert {record["iteration"] for record in statistics(run)} == {2, 3}
    assert description(run)["left_out"]["steps"] == 4
    assert not any("[step 0 partition" in line or "[step 5 partition" in line for line in log_lines(run))


def test_window_of_a_plain_model(run):
    """So it is with a model that is no pipeline, which nothing but its call announces."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with observe(run, stats=STATS, steps=(2, 3)):
        train(model, 6)
    modules = [(e["name"], e["args"]["step"]) for e in events(run) if e["args"].get("module")]
    assert modules == [("forward", 2), ("backward", 2), ("forward", 3), ("backward", 3)]
    assert {record["iteration"] for record in statistics(run)} == {2, 3}


def test_sampling(run):
    """Each third step is recorded."""
    with observe(run, every=3):
        train(pipeline(), 7)
    assert {e["args"]["step"] for e in tasks(run)} == {0, 3, 6}
    assert description(run)["left_out"]["steps"] == 4


def test_left_out_steps_have_no_observers(run):
    """In a step that is left out, nobody observes the pass, and no module has a hook of ours."""
    from torch.nn.modules import module

    model = pipeline()
    optimizer = sgd(model)
    with observe(run, steps=(2, 2)):
        for step in range(4):
            learn(model)
            assert bool(context.observers()) == (step == 2)
            assert bool(module._global_forward_pre_hooks) == (step == 2)
            optimizer.step()


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [
        (None, 1, range(60)),
        (None, 7, range(0, 60, 7)),
        ((10, 20), 1, range(10, 21)),
        ((10, 20), 5, [10, 15, 20]),
        ((50, None), 1, range(50, 60)),
        (range(3, 6), 1, [3, 4, 5]),
        ([(30, 31), (1, 2)], 1, [1, 2, 30, 31]),
        ([range(2), range(4, 5)], 1, [0, 1, 4]),
    ],
)
def test_windows(steps, every, expected):
    """StepSampling include their first and last step; sampling counts from the first."""
    windows = StepSampling.of(steps, every=every)
    assert [step for step in range(60) if windows.include(step)] == list(expected)


@pytest.mark.parametrize(
    ("text", "same"),
    [("10:20", (10, 20)), ("10:", (10, None)), (":20", (0, 20)), ("15", (15, 15)), ("0:2,9", [(0, 2), (9, 9)])],
)
def test_windows_of_a_command_line(text, same):
    """A command line names windows as Python does."""
    assert StepSampling.parse(text) == StepSampling.of(same)


@pytest.mark.parametrize("steps", [(), (3, 2), (-1, 2), 5, "1:2", [(1, 2, 3)], range(0, 9, 2), (1.5, 2), [None]])
def test_windows_that_are_none(steps):
    """What names no steps is refused, with what would."""
    with pytest.raises(ValueError, match="steps"):
        StepSampling.of(steps)


@pytest.mark.parametrize("text", ["", "a:b", "1:2:3", "-1", "1;2", ":,"])
def test_command_lines_that_name_no_windows(text):
    """So it is on a command line."""
    with pytest.raises(ValueError, match="steps must"):
        StepSampling.parse(text if text != ":," else "1,,2")


# Statistics.


def test_plain_model_is_found(run):
    """The outermost module that is called in training is watched; losses and inner modules are not."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    loss, optimizer = nn.MSELoss(), sgd(model)
    with observe(run, stats=STATS):
        for _ in range(2):
            loss(model(torch.randn(8, 4)), torch.zeros(8, 2)).backward()
            optimizer.step()
    activations = {r["layer"] for r in statistics(run) if r["tensor"] == "activation"}
    assert activations == {"0", "1", "1.0", "1.1"}
    assert {r["iteration"] for r in statistics(run)} == {0, 1}


def test_pipeline_inside_of_a_module(run):
    """Of a module that holds a pipeline, the pipeline is watched."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.pipe, self.head = pipeline(), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(self.pipe(x))

    with observe(run, stats=STATS):
        train(Whole(), 1)
    assert {r["layer"] for r in statistics(run)} == {"0", "1", "2"}


def test_model_that_is_told(run):
    """A program that says which model is meant has no other watched."""
    one, other = nn.Sequential(nn.Linear(4, 2)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with observe(run, stats=STATS) as observation:
        observation.watch(other)
        train(one, 1)
        train(other, 1)
    assert {r["layer"] for r in statistics(run) if r["tensor"] == "activation"} == {"0", "1"}
    assert {r["iteration"] for r in statistics(run)} == {1}


def test_names_that_clash(run):
    """A second model with the same names of layers is not mixed up with the first; a line says so."""
    with observe(run, stats=STATS):
        train(nn.Sequential(nn.Linear(4, 2)), 1)
        train(nn.Sequential(nn.Linear(4, 2)), 1)
    assert {r["iteration"] for r in statistics(run)} == {0}
    assert any("run.watch(model)" in line for line in log_lines(run))


def test_mistake_in_the_configuration(run):
    """A configuration with a mistake is refused before anything is recorded, and nothing is left behind."""
    from pipesight.stats import ConfigError

    before = attached()
    with pytest.raises(ConfigError), observe(run, stats={"all": {"enabled": True}}):
        pytest.fail("went on")
    assert attached() == before


# Log lines.


class Loud(nn.Linear):
    def forward(self, input):
        logging.getLogger("mine").warning("two\nlines")
        return super().forward(input)


def test_lines_say_where_they_come_from(run):
    """A line from a layer has step, partition, micro-batch, phase and layer; one from outside has the step."""
    from pipesight import GPipe

    model = GPipe(
        nn.Sequential(nn.Linear(4, 4), Loud(4, 2)), [1, 1], devices=["cpu"] * 2, chunks=1, checkpoint="always"
    )
    with observe(run, logs="warning"):
        train(model, 2)
        logging.getLogger("mine").error("done %s", "%d")
        logging.getLogger("mine").info("not this")
    lines = [line.partition(" ")[2] for line in log_lines(run)]
    assert lines == [
        line
        for step in range(2)
        for phase in ("forward", "recompute")
        for line in (f"WARNING mine [step {step} partition 1 micro-batch 0 {phase} layer 1] two", "   lines")
    ] + ["ERROR mine [step 1] done %d"]


def test_lines_of_tasks(run):
    """At info, each forward task has its line, as the program's own logging would have it, and only once."""
    with observe(run):
        train(pipeline(), 1)
    expected = "INFO pipesight.pipeline [step 0 partition 1 micro-batch 1 forward] Micro-batch 1 (partition 1): "
    assert sum(expected in line for line in log_lines(run)) == 1
    assert sum("pipesight.pipeline" in line for line in log_lines(run)) == 4


def test_lines_of_tasks_that_the_program_logs_too(run, caplog):
    """A program that logs the tasks itself gets its lines, and the run has them once."""
    caplog.set_level(logging.INFO, "pipesight.pipeline")
    with observe(run):
        train(pipeline(), 1)
    assert sum("pipesight.pipeline" in line for line in log_lines(run)) == 4
    assert len(caplog.records) == 4


def test_what_a_program_prints_stays(run, capsys):
    """Levels, handlers, the handler of last resort and basicConfig do what they do without an observation."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with observe(run):
            logging.getLogger("mine").info("unseen")
            logging.getLogger("mine").warning("by last resort")
            logging.basicConfig(format="configured %(filename)s %(message)s")
            logging.getLogger("mine").info("unseen too")
            logging.getLogger("mine").warning("seen")
            logging.getLogger("mine").handle(logging.makeLogRecord({"msg": "handed over", "levelno": 10}))
            assert logging.getLogger("mine").getEffectiveLevel() == logging.WARNING
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err.splitlines() == [
        "by last resort",
        "configured test_observe.py seen",
        "configured  handed over",
    ]
    messages = [line.rpartition("] ")[2] for line in log_lines(run)]
    assert messages == ["unseen", "by last resort", "unseen too", "seen"]


def test_loggers_tell_a_program_the_truth(run):
    """Whoever asks a logger whether a level is enabled gets the same answer; lines are recorded all the same."""
    mine = logging.getLogger("mine.asked")
    adapter = logging.LoggerAdapter(mine)
    with observe(run):
        assert not mine.isEnabledFor(logging.INFO)
        assert not adapter.isEnabledFor(logging.INFO)
        assert mine.isEnabledFor(logging.WARNING)
        mine.info("by itself")
        mine.log(logging.INFO, "by number")
        adapter.info("by an adapter")
    assert [line.rpartition("] ")[2] for line in log_lines(run)] == ["by itself", "by number", "by an adapter"]


def test_disabled_loggers_stay_disabled(run):
    """What a program switches off is not recorded either."""
    mine = logging.getLogger("mine.off")
    with observe(run):
        mine.disabled = True
        mine.error("no")
        mine.disabled = False
        logging.disable(logging.ERROR)
        mine.error("no")
        logging.disable(logging.NOTSET)
        try:
            raise KeyError("x")
        except KeyError:
            mine.exception("yes")
    lines = log_lines(run)
    assert not any(line.endswith(" no") for line in lines)
    assert lines[0].endswith(" yes")
    assert lines[-1] == "    KeyError: 'x'"


def test_no_log(run):
    """Without a level there is no log."""
    with observe(run, logs=None):
        logging.getLogger("mine").error("no")
    assert not (run / "logs").exists()


# Sizes.


@pytest.mark.slow
def test_old_parts_go(run):
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


def test_traces_of_processes_that_have_ended_go(run):
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


@pytest.mark.parametrize("path", [3, None, b"RUN"])
def test_something_other_than_a_path(path):
    """What is no path is refused, with a path to pass instead."""
    rule = f"the path of a run directory must be a string or a pathlib.Path (path: {path!r}); give one: observe('RUN')"
    with pytest.raises(TypeError, match=re.escape(rule)):
        observe(path)


# Refusals, failures and the end.


def attached():
    """Return all that an observation puts somewhere."""
    import torch.distributed as dist
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return (
        logging.Logger.isEnabledFor,
        logging.Logger.callHandlers,
        list(logging.getLogger().handlers),
        logging.getLogger().level,
        context.observer._attached,
        context.steps._counter,
        dict(module._global_forward_pre_hooks),
        dict(module._global_forward_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        torch.autograd.backward,
        torch.autograd.grad,
        torch.save,
        torch.load,
        torch.Tensor.to,
        torch.cuda.CUDAGraph.capture_begin,
        torch.amp.GradScaler.step,
        dist.all_reduce,
        dataloader._BaseDataLoaderIter.__next__,
        os._exit,
        {name: value for name, value in os.environ.items() if name.startswith("PIPESIGHT")},
        sorted(t.name for t in threading.enumerate() if t.name.startswith("pipesight-trace")),
        list(trace._span.on_pass),
    )


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_stays_attached(run, failing):
    """After the block, hooks, handlers, threads, patches and the environment are as they were, and the model too."""
    model = pipeline()
    train(model, 1)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    before = attached()
    try:
        with observe(run, stats=STATS, steps=(1, 2)):
            train(model, 4)
            assert attached() != before
            if failing:
                raise KeyError("mine")
    except KeyError:
        assert failing
    assert attached() == before
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    train(model, 1)


def test_error_of_the_program(run):
    """An error leaves the block as itself, and `run.json` says what it was."""
    error = RuntimeError("out of luck\nand more")

    def fail():
        train(pipeline(), 1)
        raise error

    with pytest.raises(RuntimeError) as raised, observe(run):
        fail()
    assert raised.value is error
    found = description(run)
    assert found["outcome"] == "RuntimeError: out of luck"
    assert found["ended"] is not None
    assert len(tasks(run)) == 4


def test_nothing_is_left_of_a_refusal(run):
    """An observation that cannot begin leaves no directory behind, but one that was there stays."""
    for there_before in (False, True):
        with pytest.raises(FileNotFoundError, match="no such configuration"), observe(run, stats="nowhere.yaml"):
            pass
        assert run.exists() == there_before
        run.mkdir(exist_ok=True)


def test_error_of_a_layer(run):
    """Of an error in a pipeline, `run.json` says where it was raised too."""

    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("boom\nand more")

    model = GPipe(nn.Sequential(nn.Linear(4, 4), Failing()), [1, 1], devices=["cpu", "cpu"], chunks=2)
    with pytest.raises(ValueError, match="boom"), observe(run):
        model(torch.randn(4, 4))
    found = description(run)["outcome"]
    assert found == "ValueError: boom in partition 1, layer '1', micro-batch 0, forward"


@pytest.mark.parametrize(("code", "outcome"), [(0, "ok"), (None, "ok"), (3, "SystemExit: 3")])
def test_exit_of_the_program(run, code, outcome):
    """An exit is an outcome too."""
    with pytest.raises(SystemExit), observe(run):
        raise SystemExit(code)
    assert description(run)["outcome"] == outcome


def test_directory_of_another_recording(run, caplog):
    """A recording is left alone: the next goes beside it, with a number, unless it is to be replaced."""
    for number, where in enumerate(["RUN", "RUN-2", "RUN-3"], 1):
        with observe(run, stats=STATS) as recording:
            train(pipeline(), number)
        assert recording.path == run.with_name(where)
        assert {e["args"]["step"] for e in tasks(recording.path)} == set(range(number))
    assert [record.message for record in caplog.records] == [
        f"{run} already holds a recording; this one goes into {run}-{number}" for number in (2, 3)
    ]
    (run / "mine.txt").write_text("mine")
    with observe(run, overwrite=True) as recording:
        train(pipeline(), 4)
    assert recording.path == run
    assert {e["args"]["step"] for e in tasks(run)} == {0, 1, 2, 3}
    assert not (run / "stats/rank-00000.jsonl").exists()
    assert (run / "mine.txt").read_text() == "mine"


def test_directory_of_something_else(run):
    """A run is not mixed with what is no recording."""
    run.mkdir()
    (run / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"must be empty, but .* holds 'mine.txt'"), observe(run):
        pytest.fail("went on")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_agree_on_a_number(run, monkeypatch, ranks):
    """The ranks that one torchrun starts take the same directory, in any order, whatever was recorded before."""

    def claim(rank, launch, *, pid=1, local=2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_a/{launch}/attempt_0/{rank}/error.json")
        directory = RunDirectory(run)
        directory.claim()
        directory.description.parent.mkdir(exist_ok=True)
        facts = {"rank": rank, "restart": 0, "launch": directory.launch, "pid": pid}
        directory.description.write_text(json.dumps(facts))
        return directory.path.name

    for rank in range(ranks):
        assert claim(rank, "one", pid=os.getpid()) == "RUN"
    assert [claim(rank, "two", pid=os.getpid()) for rank in (1, 0)] == ["RUN-2", "RUN-2"]
    assert [claim(rank, "two", pid=os.getpid()) for rank in (1, 0)] == ["RUN-3", "RUN-3"]  # the same processes again
    assert [claim(rank, "three") for rank in (0, 1)] == ["RUN-4", "RUN-4"]
    assert [claim(rank, "three") for rank in (0, 1)] == ["RUN-4", "RUN-4"]  # started anew
    with pytest.raises(FileExistsError, match="record into another one"):  # of several machines
        claim(0, "four", local=1)


def test_ranks_that_begin_while_rank_0_looks(run, monkeypatch):
    """What other ranks write while rank 0 looks whether the directory is free is not taken for that of another run."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "100")
    plain_rglob, others = Path.rglob, itertools.count(1)

    def rglob(self, pattern):
        (run / "ranks").mkdir(parents=True, exist_ok=True)
        (run / "ranks" / f"rank-{next(others):05}.json").write_text("{}")
        return plain_rglob(self, pattern)

    monkeypatch.setattr(Path, "rglob", rglob)
    run.mkdir()
    RunDirectory(run).claim()
    (run / "other.txt").write_text("of another run")
    with pytest.raises(FileExistsError, match=r"must be empty, but .* holds 'other.txt'"):
        RunDirectory(run).claim()


def test_directory_that_is_a_file(run):
    """A file cannot be a run directory."""
    run.write_text("")
    with pytest.raises(FileExistsError, match="must be a folder"), observe(run):
        pytest.fail("went on")


def test_empty_directory(run):
    """An empty folder will do."""
    run.mkdir()
    with observe(run):
        train(pipeline(), 1)
    assert tasks(run)


def test_one_at_a_time(run):
    """One process records one run at a time, and no other trace; what is under way goes on."""
    with observe(run):
        train(pipeline(), 1)
        with pytest.raises(RuntimeError, match="already being recorded into"), observe(run.parent / "OTHER"):
            pytest.fail("went on")
        with pytest.raises(RuntimeError, match="already tracing into"):
            trace.start(run.parent / "other")
    assert not (run.parent / "OTHER").exists()
    assert tasks(run)
    with (
        trace.start(run.parent / "mine"),
        pytest.raises(RuntimeError, match=r"remove trace\.start"),
        observe(run.parent / "OTHER"),
    ):
        pytest.fail("went on")


def test_once(run):
    """An observation is used once."""
    observation = observe(run)
    with observation:
        pass
    with pytest.raises(RuntimeError, match="once"), observation:
        pass


def test_broken_disk(run, caplog):
    """If the directory goes away, training goes on, and somebody is told."""
    import shutil

    model = pipeline()
    with observe(run) as observation:
        train(model, 1)
        shutil.rmtree(run)
        run.write_text("in the way")
        observation.flush()
        train(model, 1)
    assert "cannot be written" in caplog.text


def test_no_trace(run):
    """Statistics and log lines alone, with the same steps."""
    model = pipeline()
    with observe(run, trace=False, stats=STATS):
        train(model, 3)
    assert not (run / "trace").exists()
    assert {r["iteration"] for r in statistics(run)} == {0, 1, 2}
    assert description(run)["observed"]["trace"] is False


def test_same_numbers(run):
    """Observed or not, the same gradients, of a pipeline and of a plain model."""
    for build in (pipeline, lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))):
        results = []
        for observed_too in (False, True):
            torch.manual_seed(0)
            model = build()
            if observed_too:
                with observe(run, stats=STATS, overwrite=True):
                    train(model, 3)
            else:
                train(model, 3)
            results.append([p.detach().clone() for p in model.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_workers_of_a_loader(run):
    """The workers of a DataLoader record their fetches too, into files of their own."""
    with observe(run):
        for _ in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, num_workers=2):
            pass
    assert len(list((run / "trace").glob("rank-00000-*.pfw.gz"))) == 2
    workers = [e["args"]["worker"] for e in events(run) if e["name"] == "fetch" and "worker" in e["args"]]
    assert sorted(workers) == [0, 0, 1, 1]


def test_forked_process(run):
    """A forked process that leaves the block writes no description, and its parent's run goes on."""
    with observe(run):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                observed.train(nn.Linear(4, 2), 1)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert description(run)["ended"] is None
        train(pipeline(), 1)
    assert description(run)["pid"] == os.getpid()
    assert description(run)["outcome"] == "ok"
    assert json.loads((run / "run.json").read_text())["pipelines"]


def test_model_is_let_go(tmp_path):
    """Once the block is left, nothing that observed keeps the model, so its workers end with it."""
    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), balance=[1, 1], devices=["cpu", "cpu"], chunks=2)
    section = {"enabled": True, "tensors": ["activation"], "stats": ["mean"]}
    config = {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "LogTensorStats": section}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe(tmp_path / "RUN", stats=config) as run:
        for _ in range(3):
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    assert gone() is None
    assert run.path == tmp_path / "RUN"
