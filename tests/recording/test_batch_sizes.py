"""Samples per second, and what a pipeline is described by, whatever batches the program calls it with."""

import pytest
import torch
from torch import nn

from pipesight import GPipe
from pipesight.analysis.analyse import analyse
from pipesight.analysis.latest_step import steps_of
from pipesight.recording import observe
from pipesight.runs.reading.run import open_run
from support.observed import description

WIDTH = 8


def record(run, sizes, *, check=None, checkpoint="never", grad=False, accumulate=1):
    """Train on batches of these sizes, after a call that does not train; return the samples of each step."""
    model = GPipe(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), [1, 1], chunks=2, checkpoint=checkpoint
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trained = []
    with observe(run, logs=None):
        if check is not None:
            model.train(not grad)
            with torch.set_grad_enabled(grad):
                model(torch.randn(check, WIDTH))
            model.train()
        for k in range(0, len(sizes), accumulate):
            trained.append(0)
            for size in sizes[k : k + accumulate]:
                model(torch.randn(size, WIDTH)).sum().backward()
                trained[-1] += size
            optimizer.step()
    return trained


def analysed(path):
    with open_run(path) as run:
        return analyse(run)


@pytest.mark.parametrize(
    ("sizes", "options", "usual"),
    [
        ([40] * 6, {"check": 4}, 40),
        ([40] * 6, {"check": 4, "checkpoint": "always"}, 40),
        ([8] * 6, {"check": 64}, 8),
        ([8] * 6, {"check": 64, "grad": True}, 8),
        ([400] + [8] * 7, {}, 8),
        ([32] * 5 + [6], {}, 32),
        ([32, 8, 32, 8, 32, 6], {"accumulate": 2}, 32),
    ],
)
def test_samples_are_those_of_training(run, sizes, options, usual):
    """The report counts what the loop trains on, over the counted steps; other calls do not count."""
    trained = record(run, sizes, **options)
    report = analysed(run)
    assert report.overall is not None
    counted = sum(trained[step] for step in report.steps.step[report.counted].tolist())
    assert report.overall.samples_per_second == pytest.approx(counted / report.overall.elapsed * 1e6)
    watched = [(step.step, round(step.samples_per_second * step.time / 1e6)) for step in steps_of(report)]
    assert watched == list(enumerate(trained))
    (pipeline,) = report.pipelines
    assert pipeline.facts.batch_size == usual
    assert [layer.output_bytes for layer in pipeline.facts.layers] == [4 * WIDTH * usual] * 2
    assert report.measured is not None
    assert report.measured.costs.samples == usual
    assert [layer.output_bytes for layer in report.measured.costs.layers] == [4 * WIDTH * usual] * 2
    assert not any("samples/s" in remark.text for remark in report.remarks)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("check", "grad"), [(4, False), (64, False), (64, True)])
def test_description_is_of_training(run, checkpoint, check, grad):
    """`run.json` describes the first mini-batch that trains, not a shape check or an evaluation before it."""
    record(run, [16, 8], check=check, grad=grad, checkpoint=checkpoint)
    (pipeline,) = description(run)["pipelines"]
    assert pipeline["batch_size"] == 16
    assert [layer["output_bytes"] for layer in pipeline["layers"]] == [4 * WIDTH * 16] * 2


def test_description_without_training(run):
    """A run that only evaluates is described by its first call, and its samples count."""
    record(run, [], check=12)
    (pipeline,) = description(run)["pipelines"]
    assert pipeline["batch_size"] == 12
    assert pipeline["layers"][0]["output_bytes"] == 4 * WIDTH * 12
    assert analysed(run).steps.samples.tolist() == [12]


def test_datasets_keep_samples(run, tmp_path):
    """A run as a dataset has the same samples."""
    trained = record(run, [8, 6, 8, 4])
    with open_run(run) as opened:
        opened.write_dataset(tmp_path / "dataset")
    assert analysed(tmp_path / "dataset").steps.samples.tolist() == trained
