"""The log lines of a run, and that the program's own logging does not change."""

import logging

from torch import nn

from pipesight import GPipe
from pipesight.recording import observe
from support.observed import log_lines, pipeline, train


class Loud(nn.Linear):
    def forward(self, input):
        logging.getLogger("mine").warning("two\nlines")
        return super().forward(input)


def test_lines_name_their_place_in_the_pipeline(run):
    """A line from a layer has step, partition, micro-batch, phase and layer; one from outside has the step."""

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


def test_a_program_that_logs_at_info_is_not_flooded(run, caplog):
    """Lines of tasks go to the run alone, unless the program asks for them by name; its own lines do not change."""
    caplog.set_level(logging.INFO)
    model = pipeline()
    with observe(run):
        train(model, 2)
        logging.getLogger("mine").info("loss")
        assert [record.name for record in caplog.records if record.name != "pipesight"] == ["mine"]
        logging.getLogger("pipesight").setLevel(logging.INFO)
        try:
            train(model, 1)
        finally:
            logging.getLogger("pipesight").setLevel(logging.NOTSET)
    assert sum(record.name == "pipesight.pipeline" for record in caplog.records) == 4
    assert sum("pipesight.pipeline" in line for line in log_lines(run)) == 3 * 4


def test_program_prints_the_same(run, capsys):
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
        "configured test_log_lines.py seen",
        "configured  handed over",
    ]
    messages = [line.rpartition("] ")[2] for line in log_lines(run)]
    assert messages == ["unseen", "by last resort", "unseen too", "seen"]


def test_loggers_report_their_own_level(run):
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
