"""Programs without a pipeline, recorded: what they really did, beside what the report says of it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import pipesight
from pipesight.analysis.analyse import analyse
from pipesight.analysis.report import Report
from pipesight.runs.reading.run import open_run
from pipesight.trace import ai, counter

STEPS = 12


def report_of(run) -> Report:
    with open_run(run) as opened:
        return analyse(opened)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))


def test_plain_loop(run, model):
    """Steps, samples, losses, learning rates, modules and the user's own spans are those of the program."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    criterion, losses, rates = nn.CrossEntropyLoss(), [], []
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 8, 4), torch.randint(0, 2, (STEPS * 8,))), batch_size=8)
    metrics = ai.derive("metrics")
    with pipesight.observe(run, logs=None):
        for x, y in loader:
            loss = criterion(model(x), y)
            with metrics:
                losses.append(loss.item())
                counter("halves", value=losses[-1] / 2)
            loss.backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)
    report = report_of(run)
    program = report.program
    assert program is not None
    assert program.steps.step.tolist() == list(range(STEPS))
    assert program.steps.samples.tolist() == [8] * STEPS
    assert program.steps.parts.sum(axis=0).tolist() == program.steps.period.tolist()
    assert {"data_loading", "forward", "loss", "backward", "optimizer", "between"} < {*program.parts}
    assert program.evaluations == 1
    curves = {curve.name: curve.values for curve in report.curves}
    assert curves["loss"] == pytest.approx(losses, rel=1e-6)
    assert curves["learning rate"] == pytest.approx(rates)
    assert curves["halves"] == pytest.approx([loss / 2 for loss in losses], rel=1e-6)
    assert {"0", "1", "2", "2.0", "2.1", "Sequential"} < {module.name for module in program.modules.modules}
    (own,) = report.own_spans
    assert (own.name, own.count) == ("metrics", STEPS)
    known = json.loads((run / "run.json").read_text())["program"]
    assert known["loaders"][0]["num_workers"] == 0
    assert known["optimizers"][0]["class"] == "SGD"
    (described,) = known["models"]
    assert described["operators"] == 3 * 2 + 1  # transpose and addmm of each layer, and the activation
    assert all(0 < seconds < 1e-2 for seconds in described["operator_seconds"])
    units = known["models"][0]["units"]
    assert [(unit["name"], unit["calls"]) for unit in units] == [(name, 1) for name in ("0", "1", "2.0", "2.1")]


def test_losses_of_a_scaler_and_of_accumulation(run, model):
    """The loss is the one before it was scaled; where several backwards make a step, it is their mean."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pipesight.observe(run, logs=None):
        for _ in range(2):
            for value in (1.0, 3.0):
                loss = model(torch.ones(2, 4)).sum() * 0 + value
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    curves = {curve.name: curve.values for curve in report_of(run).curves}
    assert curves["loss"] == (2.0, 2.0)


class Checkpointed(nn.Module):
    """Calls its second half again in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=False)


def test_recomputed_modules_keep_their_names(run):
    """What checkpointing calls again in a backward is the same module, and no other model."""
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipesight.observe(run, logs=None):
        for _ in range(STEPS):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
    modules = report_of(run).program.modules
    assert {module.name for module in modules.modules} == {"Checkpointed", "first", "second", "second.0", "second.1"}
    assert {module.name for module in modules.modules if module.recompute} == {"second", "second.0", "second.1"}
    assert modules.steps < STEPS
    (described,) = json.loads((run / "run.json").read_text())["program"]["models"]
    assert described["class"] == "Checkpointed"


def test_transforms_are_no_forwards(run, model):
    """What a torch.func transform calls is not the forward of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipesight.observe(run, logs=None):
        for _ in range(3):
            x = torch.randn(3, 4)
            torch.func.vmap(model)(x)
            model(x).sum().backward()
            optimizer.step()
    with open_run(run) as opened:
        spans = opened.program()
    assert ((spans.name == "forward") & (spans.layer == "")).sum() == 3


def test_compiled_modules_are_compiled_once(run):
    """Recording does not change the hooks that compiled code was compiled for: it would be compiled again each step."""
    torch.compiler.reset()
    counted = []

    def backend(graph, _):
        counted.append(graph)
        return graph.forward

    model = torch.compile(nn.Linear(4, 2), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipesight.observe(run, logs=None):
        for _ in range(4):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    torch.compiler.reset()
    assert len(counted) == 1
    lead = report_of(run).lead
    assert lead is not None
    assert lead.refusal is not None


def test_gpipe_with_spans_of_your_own(run):
    """Time between forward and backward, and between steps, that a span covers has its name and is in the breakdown."""
    model = pipesight.GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    assert "balance=[1, 1], devices=['cpu', 'cpu'], chunks=2, checkpoint='except_last'" in repr(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_span, logging_span = ai.derive("my loss"), ai.derive("my logging")
    work = torch.randn(300, 300)
    with pipesight.observe(run, logs=None):
        for _ in range(4):
            out = model(torch.randn(8, 4))
            with loss_span:
                work @ work
            out.sum().backward()
            optimizer.step()
            with logging_span:
                work @ work
    report = report_of(run)
    assert report.overall is not None
    found = {(own.name, own.part): own.time for own in report.own_times}
    between = found["my logging", "between_steps"]
    assert 0 < between <= report.overall.parts["between_steps"]
    assert 0 <= found.get(("my loss", "host_gaps"), 0) <= report.overall.parts["host_gaps"]
    assert [curve.name for curve in report.curves] == ["loss", "learning rate"]


def test_lines_of_tasks_come_last_on_the_page(run):
    """The page has room for the program's lines before pipesight's own of each task."""
    from pipesight.view.payload.log_lines import logs_of

    model = pipesight.GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    with pipesight.observe(run):
        model(torch.randn(4, 4))
        logging.getLogger("mine").info("hello")
    with open_run(run) as opened:
        lines = list(opened.log_lines())
    assert len(lines) == 5
    found = logs_of(lines, steps=[0], begin=0, most=1)["lines"]
    assert [(line["text"], line["own"]) for line in found] == [("hello", True)]
