"""Without devices, GPipe takes the GPUs that are there. Only the tests in test_cuda* are about them."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Hide the GPUs from all other tests, so that these are the same on every machine."""
    if not request.module.__name__.startswith("test_cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
