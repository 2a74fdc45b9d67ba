"""What tests of the analysis share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.synthetic import Made


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "run", balance=[1, 1], chunks=2)  # a window of 900, of which 600 are busy
