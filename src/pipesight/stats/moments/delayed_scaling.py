"""Delayed scaling: a tensor is cast with a scale from the steps before this one.

The history is that of Transformer Engine's recipe by default: the greatest magnitude of the last 1024 steps. A tensor
without one is cast as it is, with a scale of 1::

    step         0     1     2     3
    max |x|      3     5     4     4
    scale_inv    1    3/m   5/m   5/m        m: the greatest number of the format
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable

from torch import Tensor

from pipesight.stats.moments.cast_statistics import MOST, CastCounts
from pipesight.stats.moments.casting import greatest_magnitude, measure_cast

__all__ = ["DelayedScaling"]

LENGTH = 1024


class DelayedScaling:
    """Casts tensors by delayed scaling, and keeps their histories. Threads may share it.

    Example::

        scaling = DelayedScaling()
        for step, x in enumerate(activations):
            counts = scaling.measure(("fc1", "activation"), step, x, format="e4m3")
    """

    def __init__(self) -> None:
        self._histories: dict[Hashable, _History] = {}
        self._lock = threading.Lock()

    def measure(self, key: Hashable, step: int, tensor: Tensor, *, format: str) -> CastCounts:
        """Cast a tensor, and remember its magnitude for later steps."""
        amax = greatest_magnitude(tensor)
        with self._lock:
            past = self._histories.setdefault(key, _History()).before(step, amax)
        scale_inv = past / MOST[format] or 1.0
        return measure_cast(tensor, recipe="fp8_delayed_scaling", format=format, scale_inv=scale_inv)


class _History:
    """The greatest magnitude of a window of steps: those that a later, greater one has not made irrelevant."""

    __slots__ = ("_now", "_number", "_peaks", "_step")

    def __init__(self) -> None:
        self._step: int | None = None
        self._number = 0  # of the step under way, among those that were measured
        self._now = 0.0
        self._peaks: deque[tuple[int, float]] = deque()

    def before(self, step: int, amax: float) -> float:
        """Take note of a magnitude, and return the greatest before its step; 0 if there is none."""
        if step != self._step:
            while self._peaks and self._peaks[-1][1] <= self._now:
                self._peaks.pop()
            if self._now:
                self._peaks.append((self._number, self._now))
            self._step, self._number, self._now = step, self._number + 1, 0.0
            while self._peaks and self._peaks[0][0] < self._number - LENGTH:
                self._peaks.popleft()
        self._now = max(self._now, amax)
        return self._peaks[0][1] if self._peaks else 0.0
