"""Every way in which a large tensor on the CPU may be measured: by NumPy and torch, and by a kernel of numba."""

from __future__ import annotations

import contextlib
import importlib.util
from unittest import mock

import torch

from pipesight.stats.moments import cpu_moments

WAYS = ("numpy", "numba") if importlib.util.find_spec("numba") else ("numpy",)


@contextlib.contextmanager
def way(name):
    """Measure in this way."""
    if name == "numpy":
        with mock.patch.object(cpu_moments, "_kernel", return_value=None):
            yield
    else:
        assert cpu_moments._kernel(torch.float32) is not None
        with mock.patch.object(cpu_moments, "FEW_THREADS", 1 << 10):
            yield


def measured(tensor, **asked):
    """Yield the moments of a tensor, measured in every way."""
    for name in WAYS:
        with way(name):
            yield cpu_moments.measure(tensor, **asked)
