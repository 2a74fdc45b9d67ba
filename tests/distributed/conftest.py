"""Pipelines over ranks need a newer torch than the rest of pipesight."""

from __future__ import annotations

import pytest

from support.torchrun import skip_old_torch


@pytest.fixture(scope="session", autouse=True)
def _torch_is_supported(request):
    skip_old_torch()
