"""The code of a plan for the steps of a `Pipeline`: it builds, and its workers have the plan's stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipesight import Pipeline
from pipesight.plan import Costs, Layer, Setting, predict
from pipesight.schedule.argument_checks import SCHEDULES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_code_builds_the_pipeline_of_the_plan(schedule: str) -> None:
    several = schedule not in ("gpipe", "1f1b", "zero-bubble")
    setting = Setting(schedule, 2, 4, "never", rounds=2 if several else 1)
    costs = Costs(tuple(Layer(str(k), 1.0, 2.0) for k in range(setting.stages)))
    plan = predict(costs, setting, [1] * setting.stages)
    code = plan.call(["cpu", "cpu"], in_steps=True)
    assert code is not None
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(setting.stages)])
    pipe = eval(code, {"Pipeline": lambda *args, **more: Pipeline(*args, loss_fn=nn.MSELoss(), **more), "model": model})
    pipe.step(torch.randn(4, 2), torch.randn(4, 2))
    assert pipe.ran["workers"] == list(plan.schedule.device_of_stage)


def test_what_the_cpu_cannot_run() -> None:
    costs = Costs(tuple(Layer(str(k), 1.0, 2.0) for k in range(6)))
    plan = predict(costs, Setting("looped-bfs", 2, 4, "never", rounds=3), [1] * 6)
    assert plan.call(["cpu", "cpu"], in_steps=True) is None
    assert plan.call(in_steps=True) is None
    on_gpus = plan.call(["cuda:0", "cuda:1"], in_steps=True)
    assert '"cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0", "cuda:1"' in str(on_gpus)
