"""The code of a plan for the steps of a `Pipeline`: it builds, and its workers have the plan's stages."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from pipesight import Pipeline
from pipesight.plan import Costs, Layer, Setting, predict, save_schedule
from pipesight.schedule.argument_checks import SCHEDULES


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_code_builds_the_pipeline_of_the_plan(schedule: str, by_file: bool, tmp_path: Path) -> None:
    """Written to a file, the order has plain gradients, too."""
    several = schedule not in ("gpipe", "1f1b", "zero-bubble")
    setting = Setting(schedule, 2, 4, "never", rounds=2 if several else 1)
    costs = Costs(tuple(Layer(str(k), 1.0, 2.0) for k in range(setting.stages)))
    plan = predict(costs, setting, [1] * setting.stages)
    file = tmp_path / "plan.csv"
    save_schedule(plan.schedule, file)
    code = plan.call(["cpu", "cpu"], in_steps=True, file=str(file), by_file=by_file)
    assert code is not None
    assert str(file) in code or not by_file
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(setting.stages)])
    pipe = eval(code, {"Pipeline": lambda *args, **more: Pipeline(*args, loss_fn=nn.MSELoss(), **more), "model": model})
    inputs, targets, plain = torch.randn(4, 2), torch.randn(4, 2), copy.deepcopy(model)
    pipe.step(inputs, targets)
    nn.functional.mse_loss(plain(inputs), targets).backward()
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert pipe.ran["workers"] == list(plan.schedule.device_of_stage)


def test_what_the_cpu_cannot_run() -> None:
    costs = Costs(tuple(Layer(str(k), 1.0, 2.0) for k in range(6)))
    plan = predict(costs, Setting("looped-bfs", 2, 4, "never", rounds=3), [1] * 6)
    assert plan.call(["cpu", "cpu"], in_steps=True) is None
    assert plan.call(in_steps=True) is None
    on_gpus = plan.call(["cuda:0", "cuda:1"], in_steps=True)
    assert '"cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0", "cuda:1"' in str(on_gpus)
