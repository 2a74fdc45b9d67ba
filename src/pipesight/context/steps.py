"""Which training step it is, for everything in the process."""

from __future__ import annotations

from typing import Any, Protocol

from pipesight._logger import own_logger

__all__ = ["StepCounter", "catch_up", "count_steps", "counted_step", "step_counter", "step_of_call"]

logger = own_logger(__name__)


class StepCounter(Protocol):
    """Counts the training steps of the process, for example by the steps of its optimizers."""

    @property
    def number(self) -> int:
        """The current step."""

    def called(self, pipeline: Any) -> int:
        """Return the step that a call of a pipeline belongs to."""

    def catch_up(self, number: int) -> None:
        """Advance to the step that other ranks of the same mini-batch have reached."""


_counter: StepCounter | None = None


def count_steps(counter: StepCounter | None) -> None:
    """Set what counts steps; ``None`` to let each pipeline count its calls."""
    global _counter
    _counter = counter


def step_counter() -> StepCounter | None:
    """Return what counts steps, if anything does."""
    return _counter


def counted_step() -> int | None:
    """Return the current training step, or ``None`` if nothing counts steps (`pipesight.observe` does)."""
    counter = _counter
    return None if counter is None else counter.number


def step_of_call(pipeline: Any, own: int) -> int:
    """Return the step that a call of a pipeline belongs to; ``own`` if nothing counts steps. For engines."""
    counter = _counter
    if counter is not None:
        try:
            return counter.called(pipeline)
        except Exception:
            _lose_count()
    return own


def catch_up(step: int) -> None:
    """Advance to the step of the other ranks: one without parameters has no optimizer to count. For engines."""
    counter = _counter
    if counter is not None:
        try:
            counter.catch_up(step)
        except Exception:
            _lose_count()


def _lose_count() -> None:
    count_steps(None)
    logger.exception("counting steps failed; from now on, pipelines count their calls; training continues")
