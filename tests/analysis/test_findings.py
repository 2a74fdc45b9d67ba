"""Any run is reported: traces without tasks, descriptions that are wrong, real recordings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse
from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.described_pipelines import pipelines_of
from pipesight.runs.reading.run import open_run
from support import warm
from support.analysed import add_up, analysed, even, parts
from support.synthetic import Made


def test_trace_without_tasks(made):
    """A trace without a pipeline has no bubble; the report says why, and where the time went."""
    made.span("io", "read", begin=0, dur=300)
    made.span("io", "read", begin=400, dur=100)
    made.span("compute", "forward", begin=600, dur=50)
    report = analysed(made)
    assert report.overall is None
    assert "no pipeline tasks" in report.verdict.text
    assert [(name.category, name.name, name.count, name.total) for name in report.names] == [
        ("io", "read", 2, 400),
        ("compute", "forward", 1, 50),
    ]


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["partitions", "devices", "layers", "name", "partition", "balance"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["pipelines", "left_out", "outcome"]), anything))
def test_any_description_will_do(description):
    """Whatever a description says, what makes sense is taken, and nothing is raised."""
    for facts in pipelines_of(description):
        assert facts.partitions > 0
        assert facts.devices is None or len(facts.devices) == facts.partitions


def test_wrong_description_is_overruled_by_tasks(made):
    """Where the description cannot be, the tasks still tell of the bubble."""
    made.gpipe(0, even)
    made.description.update(pipelines=[{"partitions": "two"}, None], left_out=7, outcome={})
    assert analysed(made).overall.bubble == pytest.approx(1 / 3)


RECORD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import pipesight.trace
from pipesight import GPipe

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
pipe = GPipe(model, balance=[4, 2], devices=["cpu", "cpu"], chunks=4, checkpoint=sys.argv[2])
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=64)
with pipesight.trace.start(sys.argv[1]), pipesight.trace.instrument():
    for (x,) in loader:
        pipe(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        pipe.eval()(x)
"""


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_recorded_run_adds_up(tmp_path, checkpoint):
    """In a real run, busy + every loss = window, and the parts of a step = its period, to within 0.1%."""
    path = tmp_path / "trace.pfw.gz"
    ended = warm.run("-c", RECORD, path, checkpoint)
    assert ended.returncode == 0, ended.stderr
    with open_run(path) as run:
        report = analyse(run)
        tasks = run.tasks()
    add_up(report)
    assert report.steps.step.tolist() == list(range(8))
    assert report.evaluations == 1
    assert report.left.incomplete == 0
    assert len(report.layers) == 6
    for step in report.steps.step.tolist():
        own = tasks.where((tasks.step == step) & (tasks.minibatch == step + 1))
        window = own.end.max() - own.begin.min()
        busy = [(own.end - own.begin)[own.partition == j].sum() for j in range(2)]
        row = report.steps.step.tolist().index(step)
        assert report.steps.window[row] == window
        assert report.steps.bubble[row] == pytest.approx(1 - sum(busy) / 2 / window)
    assert (report.overall.recompute > 0) == (checkpoint != "never")
    assert {"computing", "optimizer", "data_loading"} <= {*parts(report)}
    assert {*LOSSES} <= {*report.overall.parts}


def test_more_partitions_than_processors_are_told(tmp_path):
    """Partitions on the CPU that have to share processors slow each other down, and the verdict says so."""
    texts = []
    for processors in (1, 2):
        made = Made(tmp_path / str(processors), chunks=2, processors=processors)
        for step in range(3):
            made.gpipe(step, lambda phase, i, j: 100, at=step * 1000)
        with open_run(made.write()) as run:
            texts.append(analyse(run).verdict.text)
    assert "2 partitions share 1 processor and slow each other down." in texts[0]
    assert "processor" not in texts[1]
