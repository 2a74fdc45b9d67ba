"""Observing a block of code: what ends up in the run directory, and what is left when it ends."""

import json
import logging
import os
import re
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipesight import GPipe, trace
from pipesight.recording import observe
from support import observed
from support.observed import STATS, attached, description, events, log_lines, pipeline, sgd, statistics, tasks, train


def test_run_directory_holds_everything(run):
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
    forward, backward = pipe.pop("operator_seconds")
    assert 1e-7 < forward < backward < 1e-3
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
        "operators": 2,  # the view of the weight, and the product
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


@pytest.mark.parametrize("path", [3, None, b"RUN"])
def test_something_other_than_a_path(path):
    """What is no path is refused, with a path to pass instead."""
    rule = f"the path of a run directory must be a string or a pathlib.Path (path: {path!r}); give one: observe('RUN')"
    with pytest.raises(TypeError, match=re.escape(rule)):
        observe(path)


# Refusals, failures and the end.


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


def test_refusal_leaves_nothing_behind(run):
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


def test_one_observation_at_a_time(run):
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


def test_observation_is_used_once(run):
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


def test_training_gives_the_same_numbers(run):
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


def test_model_is_released(tmp_path):
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
