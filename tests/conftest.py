"""Without devices, GPipe takes the GPUs that are there. Only the tests in tests/cuda are about them."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("anywhere", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("anywhere")


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Hide the GPUs from all other tests, so that these are the same on every machine."""
    if request.path.parent.name != "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
