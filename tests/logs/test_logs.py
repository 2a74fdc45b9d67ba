"""Log lines say which partition and which layer is running, to whoever wants to know, and cost nothing otherwise."""

from __future__ import annotations

import copy
import io
import logging
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

from pipesight import GPipe, context, register_layer_logging_hooks
from pipesight.logs import ContextFilter, context_filter
from support import warm


def named_model(**options):
    """Return a pipeline whose layers have names, on two partitions."""
    torch.manual_seed(0)
    layers = OrderedDict(embed=nn.Linear(4, 4), act=nn.Tanh(), head=nn.Linear(4, 2))
    return GPipe(nn.Sequential(layers), balance=[2, 1], **options)


def train(model):
    model(torch.rand(6, 4)).sum().backward()


@pytest.fixture
def debug(caplog):
    """The records from DEBUG on."""
    caplog.set_level(logging.DEBUG, logger="pipesight")
    return caplog


def of_layers(caplog, j):
    return [r for r in caplog.records if r.partition == j and r.levelno == logging.DEBUG]


def test_task_line_is_the_one_of_the_guide(caplog):
    """Every forward task gives one INFO line, with the words of the guide."""
    caplog.set_level(logging.INFO, logger="pipesight")
    train(named_model(chunks=3))
    assert sorted(caplog.messages) == sorted(
        f"Micro-batch {i} (partition {j}): checkpoint_stop=2, using_checkpointing={i < 2}"
        for i in range(3)
        for j in range(2)
    )
    assert "Micro-batch 0 (partition 1): checkpoint_stop=2, using_checkpointing=True" in caplog.messages
    assert {(r.name, r.levelname) for r in caplog.records} == {("pipesight.pipeline", "INFO")}


@pytest.mark.parametrize(
    ("checkpoint", "training", "stop"),
    [("always", True, 3), ("except_last", True, 2), ("never", True, 0), ("always", False, 0)],
)
def test_checkpoint_stop_counts_the_checkpointed_microbatches(caplog, checkpoint, training, stop):
    """Micro-batches below checkpoint_stop are checkpointed; in eval mode there are none."""
    caplog.set_level(logging.INFO, logger="pipesight")
    named_model(chunks=3, checkpoint=checkpoint).train(training)(torch.rand(6, 4))
    flags = {r.microbatch: r.getMessage().split(": ")[1] for r in caplog.records if r.partition == 1}
    assert flags == {i: f"checkpoint_stop={stop}, using_checkpointing={i < stop}" for i in range(3)}


def test_layer_lines_use_the_names_of_the_original_model(debug):
    """A layer keeps the name that it has in the model, whatever its partition."""
    model = named_model(chunks=2, checkpoint="never")
    register_layer_logging_hooks(model.partitions)
    train(model)
    assert [r.getMessage() for r in of_layers(debug, 0)] == [
        "Executing layer 'embed' in partition 0: Linear",
        "Executing layer 'act' in partition 0: Tanh",
    ] * 2
    assert [r.getMessage() for r in of_layers(debug, 1)] == ["Executing layer 'head' in partition 1: Linear"] * 2


def test_hooks_of_a_whole_pipeline(debug):
    """The model itself may be given in place of its partitions."""
    model = named_model(checkpoint="never")
    assert len(register_layer_logging_hooks(model)) == 3
    train(model)
    assert [r.layer for j in range(2) for r in of_layers(debug, j)] == ["embed", "act", "head"]


@pytest.mark.parametrize(
    "wrong", [nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh())), nn.Linear(2, 2), [nn.Sequential()], "model", 3]
)
def test_hooks_of_something_else(wrong):
    """What is neither a pipeline nor its partitions is a TypeError that shows the right call."""
    message = rf"expected a GPipe or its partitions, but got {type(wrong).__name__}: .*\(model.partitions\)"
    with pytest.raises(TypeError, match=message):
        register_layer_logging_hooks(wrong)


def test_hooks_of_a_single_partition():
    """One partition is not a list of them: its layers are none."""
    with pytest.raises(TypeError, match="but got Partition"):
        register_layer_logging_hooks(named_model().partitions[0])


def test_one_handle_a_layer_ends_its_lines(debug):
    """Removing the handle of a layer silences that layer and no other."""
    model = named_model(chunks=2, checkpoint="never")
    embed, act, head = register_layer_logging_hooks(model.partitions)
    embed.remove()
    train(model)
    assert [r.layer for r in of_layers(debug, 0)] == ["act"] * 2
    act.remove()
    head.remove()
    debug.clear()
    train(model)
    assert {r.levelno for r in debug.records} == {logging.INFO}


def test_hooks_work_after_earlier_runs(debug):
    """A model that has run can be given hooks, and lose them, and be given them again."""
    model = named_model(chunks=2, checkpoint="never")
    for _ in range(2):
        train(model)
        debug.clear()
        hooks = register_layer_logging_hooks(model.partitions)
        train(model)
        assert len(of_layers(debug, 0)) == 4
        for hook in hooks:
            hook.remove()


def test_hooks_are_copied_with_the_model(debug):
    """A deep copy of the model logs its layers too."""
    model = named_model(chunks=2, checkpoint="never")
    register_layer_logging_hooks(model.partitions)
    train(copy.deepcopy(model))
    assert [r.layer for r in of_layers(debug, 1)] == ["head"] * 2


def test_layer_lines_outside_of_a_pipeline(debug):
    """A partition that is called by itself logs its layers, with no micro-batch."""
    model = named_model()
    register_layer_logging_hooks(model.partitions)
    model.partitions[1](torch.rand(1, 4))
    (record,) = debug.records
    assert (record.layer, record.partition, record.microbatch, record.phase) == ("head", 1, None, None)


def test_records_carry_the_context(debug):
    """Records have the attributes step, partition, microbatch, phase and layer."""
    model = named_model(chunks=2, checkpoint="never")
    register_layer_logging_hooks(model.partitions)
    train(model)
    debug.clear()
    train(model)
    found = [(r.step, r.partition, r.microbatch, r.phase, r.layer) for r in debug.records if r.partition == 1]
    assert found == [
        (1, 1, 0, "forward", None),
        (1, 1, 0, "forward", "head"),
        (1, 1, 1, "forward", None),
        (1, 1, 1, "forward", "head"),
    ]


def test_format_string_shows_the_context(debug):
    """A format string can name the attributes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(step)s [%(partition)s/%(microbatch)s] %(phase)s %(layer)s"))
    logger = logging.getLogger("pipesight")
    logger.addHandler(handler)
    try:
        model = named_model(checkpoint="never")
        register_layer_logging_hooks(model.partitions)
        train(model)
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().splitlines() == [
        "0 [0/0] forward None",
        "0 [0/0] forward embed",
        "0 [0/0] forward act",
        "0 [1/0] forward None",
        "0 [1/0] forward head",
    ]


def test_recomputed_layers_are_logged_as_such(debug):
    """A layer that runs again for its backward is logged again, in the phase recompute; its task is not."""
    model = named_model(chunks=2, checkpoint="always")
    register_layer_logging_hooks(model.partitions)
    train(model)
    assert [(r.phase, r.microbatch, r.layer) for r in of_layers(debug, 0)] == [
        (phase, i, layer)
        for phase, order in (("forward", [0, 1]), ("recompute", [1, 0]))
        for i in order
        for layer in ("embed", "act")
    ]
    assert {r.phase for r in debug.records if r.levelno == logging.INFO} == {"forward"}


class Talkative(nn.Linear):
    def forward(self, input):
        logging.getLogger("someone.else").warning("at work")
        return super().forward(input)


def test_context_filter_works_for_other_loggers():
    """With ContextFilter on a handler, lines that a layer logs by itself show where; elsewhere it shows None."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(ContextFilter())
    handler.setFormatter(logging.Formatter("[%(partition)s/%(microbatch)s] %(phase)s %(layer)s: %(message)s"))
    logger = logging.getLogger("someone.else")
    logger.addHandler(handler)
    try:
        model = GPipe(nn.Sequential(nn.Linear(4, 4), Talkative(4, 4)), [1, 1], chunks=2, checkpoint="always")
        train(model)
        logger.warning("done")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().splitlines() == [
        "[1/0] forward 1: at work",
        "[1/1] forward 1: at work",
        "[1/1] recompute 1: at work",
        "[1/0] recompute 1: at work",
        "[None/None] None None: done",
    ]


def test_context_filter_keeps_existing_attributes():
    """ContextFilter overwrites nothing that the record has."""
    record = logging.makeLogRecord({"layer": "mine"})
    assert ContextFilter().filter(record)
    assert (record.layer, record.partition) == ("mine", None)


def test_import_configures_no_logging():
    """Importing pipesight, and training, adds no handler, sets no level and prints nothing."""
    script = """
import logging, torch, pipesight
model = pipesight.GPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), [1])
pipesight.register_layer_logging_hooks(model.partitions)
model(torch.rand(2, 2)).sum().backward()
assert logging.getLogger().level == logging.WARNING
for name in (None, "pipesight", "pipesight.pipeline", "pipesight.context"):
    assert not logging.getLogger(name).handlers, name
    assert logging.getLogger(name).getEffectiveLevel() == logging.WARNING
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_lines_are_logged_whatever_was_imported():
    """A program that imports GPipe alone gets the lines of partitions."""
    script = """
import logging, sys, torch
from pipesight import GPipe
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s")
GPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), [1])(torch.rand(2, 2))
"""
    done = warm.run("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "pipesight.pipeline\n", "")


class Watched(nn.Linear):
    def forward(self, input):
        where = context.current()
        assert where is not None
        self.observed = bool(where.observers)
        return super().forward(input)


@pytest.mark.parametrize(("level", "observed"), [(logging.INFO, True), (logging.WARNING, False)])
def test_level_turns_the_lines_on_and_off(caplog, level, observed):
    """Below INFO there is an observer; above, there is none, and not one record is made."""
    caplog.set_level(level, logger="pipesight")
    made = []

    def make(*args, **kwargs):
        record = logging.LogRecord(*args, **kwargs)
        made.append(record)
        return record

    before = logging.getLogRecordFactory()
    model = GPipe(nn.Sequential(Watched(4, 4)), [1], chunks=2)
    register_layer_logging_hooks(model.partitions)
    logging.setLogRecordFactory(make)
    try:
        train(model)
    finally:
        logging.setLogRecordFactory(before)
    assert model[0].observed is observed
    assert len(made) == (2 if observed else 0)
    assert bool(context.observers()) is observed


def test_level_can_change_between_passes(caplog):
    """The level is read at every pass, so that lines can be turned on in the middle of a training."""
    model = named_model(chunks=2)
    for level, lines in ((logging.WARNING, 0), (logging.INFO, 4), (logging.WARNING, 0)):
        caplog.set_level(level, logger="pipesight")
        caplog.clear()
        train(model)
        assert len(caplog.records) == lines


class Broken(logging.Handler):
    """A handler whose own `emit` raises, as those that send lines over a network may."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def emit(self, record):
        self.calls += 1
        raise OSError("the log server is gone")


@pytest.fixture
def broken():
    """A handler that raises, on the root logger, which gets every line."""
    handler = Broken()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("kind", ["handler", "filter"])
def test_handler_that_raises_does_not_break_a_pass(kind, broken, caplog, capfd, monkeypatch):
    """The library's own lines may fail: a pass goes on, and the first error of a logger is shown."""
    monkeypatch.setattr(context_filter.lines, "_failed", False)
    if kind == "filter":
        broken.addFilter(lambda record: record.no_such_attribute)
    caplog.set_level(logging.DEBUG, logger="pipesight")
    expected, model = named_model(chunks=2), named_model(chunks=2)
    register_layer_logging_hooks(model)
    torch.manual_seed(1)
    train(model)
    logging.getLogger().removeHandler(broken)
    torch.manual_seed(1)
    train(expected)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert broken.calls > 1 or kind == "filter"
    shown = capfd.readouterr().err
    assert shown.count("a handler of the logger 'pipesight.pipeline' failed") == 1
    assert ("the log server is gone" if kind == "handler" else "no_such_attribute") in shown


def test_report_of_a_failing_observer_that_cannot_be_logged(broken, capfd, monkeypatch):
    """An observer is detached, and training goes on, even if its failure cannot be logged."""
    monkeypatch.setattr(context.observer.logger, "_failed", False)

    class Failing(context.Observer):
        def task_started(self, where):
            raise ValueError("broken observer")

    observer = Failing()
    context.attach(observer)
    train(named_model(chunks=2))
    assert not context.detach(observer)
    shown = capfd.readouterr().err
    assert "the log server is gone" in shown
    assert "broken observer" in shown  # what was to be logged


def test_lines_name_the_code_that_logged_them(caplog):
    """Records name the line that logged them."""
    caplog.set_level(logging.INFO, logger="pipesight.pipeline")
    train(named_model(chunks=2))
    assert {(r.filename, r.funcName) for r in caplog.records} == {("task_lines.py", "task_started")}


def test_your_own_lines_raise(broken):
    """What a handler does with a program's own lines is not for the library to change."""
    model = named_model(chunks=2)
    model[0].register_forward_pre_hook(lambda *_: logging.getLogger("mine").warning("hello"))
    with pytest.raises(OSError, match="the log server is gone"):
        train(model)
