"""A recorded pipeline of any model: run, report, statistics and advice name its modules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline, observe
from pipesight.report import analyse, open_run
from support import observed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return {"out": x}


STATS = """
all:
  enabled: True
  layers:
    layer_name_regex_pattern: 'blocks.2.inner'
  LogTensorStats:
    enabled: True
    tensors: [activation]
    stats: [mean]
    freq: 1
"""


def test_run_report_and_statistics_name_the_modules(tmp_path: Path) -> None:
    pipe = Pipeline(Model(), ["blocks.1", "blocks.3"], chunks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    (tmp_path / "stats.yaml").write_text(STATS)
    means = []
    handle = pipe.blocks[2].inner.register_forward_hook(lambda _, __, output: means.append(output.detach().double()))
    with observe(tmp_path / "run", stats=tmp_path / "stats.yaml"):
        for _ in range(4):
            optimizer.zero_grad()
            pipe(torch.randn(8, 4))["out"].square().mean().backward()
            optimizer.step()
    handle.remove()
    described = json.loads((tmp_path / "run" / "run.json").read_text())["pipelines"][0]
    assert described["cuts"] == ["blocks.1", "blocks.3"]
    names = [["embed", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3"]]
    assert [(layer["name"], layer["partition"]) for layer in described["layers"]] == [
        (name, j) for j, group in enumerate(names) for name in group
    ]
    with open_run(tmp_path / "run") as run:
        report = analyse(run)
    assert {layer.name for layer in report.layers} == {name for group in names for name in group}
    assert len(observed.tasks(tmp_path / "run")) == 4 * 3 * 2
    logged = [line for line in observed.statistics(tmp_path / "run") if "blocks.2.inner" in str(line)]
    # Each micro-batch was seen twice, as the first one of a step is recomputed: of these, one counts.
    truth = torch.cat(means[:2]).mean().item()
    assert abs(logged[0]["value"] - truth) < 1e-6 * max(1.0, abs(truth))


def test_steps_are_described_with_their_schedule(tmp_path: Path) -> None:
    """Interleaved, two partitions share a worker: the bubble is that of the workers. The losses are a curve."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    pipe = Pipeline(
        nn.Sequential(*layers), balance=[1] * 4, chunks=4, schedule="interleaved-1f1b", loss_fn=nn.MSELoss()
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    losses = []
    with observe(tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(pipe.step(torch.randn(8, 8), torch.randn(8, 8)).item())
            optimizer.step()
    described = json.loads((tmp_path / "run" / "run.json").read_text())["pipelines"][0]
    assert (described["schedule"], described["workers"]) == ("interleaved-1f1b", [0, 1, 0, 1])
    with open_run(tmp_path / "run") as run:
        report, tasks = analyse(run), run.tasks()
    (curve,) = [curve for curve in report.curves if curve.name == "loss"]
    assert (curve.steps, curve.values) == ((0, 1, 2, 3), pytest.approx(losses))
    (pipeline,) = report.pipelines
    assert (pipeline.partitions, pipeline.workers) == (4, 2)
    begin, end, busy = (np.zeros((4, 2), np.int64) for _ in range(3))
    begin[:] = np.iinfo(np.int64).max
    where = tasks.step, tasks.partition % 2
    np.minimum.at(begin, where, tasks.begin)
    np.maximum.at(end, where, tasks.end)
    np.add.at(busy, where, tasks.end - tasks.begin)  # its tasks follow one another
    counted = report.steps.step[report.counted]
    window = (end.max(axis=1) - begin.min(axis=1))[counted]
    assert pipeline.bubble == pytest.approx(1 - busy[counted].sum() / 2 / window.sum())
    assert "4 partitions on 2 workers" in report.verdict.text
