"""The progress of a training, and when it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

__all__ = ["Limit", "Meter", "Progress"]


@dataclass(frozen=True, slots=True)
class Limit:
    """The number of steps, or else of seconds, after which a training ends."""

    seconds: float = math.inf
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"number of steps must be a positive integer (steps: {self.steps})")
        if self.steps is None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be a positive, finite number (seconds: {self.seconds})")

    def share(self, step: int, elapsed: float) -> float:
        """Return the share of the training that is done, from 0 to 1."""
        return min(1.0, elapsed / self.seconds if self.steps is None else step / self.steps)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a training after a step."""

    step: int
    """Steps done."""
    steps: int | None
    """Steps in total, if known."""
    elapsed: float
    share: float
    loss: float
    first_loss: float
    smoothed_loss: float
    """The mean over the last few steps."""
    samples_per_second: float

    @property
    def count(self) -> str:
        """The number of the step, from 0 as in the report, at a constant width."""
        if self.steps is None:
            return f"step {self.step - 1:4}"
        last = self.steps - 1
        return f"step {self.step - 1:{len(str(last))}} of 0..{last}"

    @property
    def left(self) -> float:
        """The estimated seconds that are left."""
        return self.elapsed / self.share - self.elapsed


class Meter:
    """Turns the losses of a training into its progress. The clock starts when it is created.

    Example::

        meter = Meter(Limit(steps=100), batch=32)
        while not meter.done:
            print(meter.record(training.step()))
    """

    def __init__(self, limit: Limit, *, batch: int) -> None:
        self.latest: Progress | None = None
        self._limit, self._batch = limit, batch
        self._recent: deque[float] = deque(maxlen=20)
        self._begin = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether the limit is reached."""
        return self.latest is not None and self.latest.share == 1

    def record(self, loss: float) -> Progress:
        """Count a step with this loss."""
        before, elapsed = self.latest, time.perf_counter() - self._begin
        step = 1 if before is None else before.step + 1
        self._recent.append(loss)
        self.latest = Progress(
            step=step,
            steps=self._limit.steps,
            elapsed=elapsed,
            share=self._limit.share(step, elapsed),
            loss=loss,
            first_loss=loss if before is None else before.first_loss,
            smoothed_loss=sum(self._recent) / len(self._recent),
            samples_per_second=step * self._batch / elapsed,
        )
        return self.latest
