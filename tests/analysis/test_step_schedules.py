"""Plans for recorded steps of a `Pipeline`: for as many devices as it had workers, compared with its own schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipesight import Pipeline, observe
from pipesight.analysis.plan_outcome import make_plans
from pipesight.plan import Setting, measure
from pipesight.runs.reading.run import open_run

CHUNKS = 4
SETTINGS = {
    "interleaved-1f1b": Setting("interleaved", 2, CHUNKS, "never", 2),
    "v-half": Setting("v-half", 2, CHUNKS, "never"),
    "zero-bubble": Setting("zero-bubble", 4, CHUNKS, "never"),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SETTINGS)
def test_recorded_steps_are_a_setting(schedule: str, tmp_path: Path) -> None:
    """Its plan with the recorded balance is what the report and the planner compare others with."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)])
    pipe = Pipeline(
        model,
        balance=[2] * 4,
        devices=["cpu"] * 4,
        chunks=CHUNKS,
        checkpoint="never",
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.0)
    with observe(tmp_path / "run", logs=None):
        for _ in range(4):
            optimizer.zero_grad()
            pipe.step(torch.randn(2048, 256), torch.randn(2048, 256))
            optimizer.step()
    with open_run(tmp_path / "run") as opened:
        found = measure(opened)
    assert (found.setting, found.devices) == (SETTINGS[schedule], SETTINGS[schedule].partitions)
    outcome = make_plans(found.costs, found, chunks=[CHUNKS], checkpoints=["never"])
    crowd = {plan.setting.partitions for plan in outcome.plans}
    assert max(crowd) == found.devices
    same = next(plan for plan in outcome.plans if plan.setting == found.setting)
    assert same.step_seconds <= found.predicted_seconds * (1 + 1e-9)  # with the best balance
