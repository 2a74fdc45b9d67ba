"""A run directory for each test."""

from __future__ import annotations

import pytest


@pytest.fixture
def run(tmp_path):
    return tmp_path / "RUN"
