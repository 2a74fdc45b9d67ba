"""Steps that all ranks of a pipeline end together: one without parameters has no optimizer that would tell it.

Ranks tell each other their steps at each call of a `DistributedPipeline`, before anything runs::

    rank 0    optimizer.step()   call: step 0 has ended   |   ranks agree    |   logs step 0, runs
    rank 1    (no optimizer)     call: step 0             |   to be at 1     |   logs step 0, runs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipesight import context
from pipesight.stats.stats_session import StatsSession

__all__ = ["AgreedSteps"]


class AgreedSteps:
    """Counts the steps of a session for all pipelines of the process. See `context.StepCounter`.

    ``has_ended`` says whether an optimizer has ended the step that the session is at.
    """

    def __init__(self, session: StatsSession, has_ended: Callable[[], bool]) -> None:
        self._session, self._has_ended = session, has_ended

    def attach(self) -> None:
        """Begin to count, unless somebody does already: a run that is being recorded."""
        if context.counted_step() is None:
            context.count_steps(self)

    def detach(self) -> None:
        """Count no longer."""
        if context.step_counter() is self:
            context.count_steps(None)

    @property
    def number(self) -> int:
        """The step that a call would belong to."""
        return self._session.step_count + self._has_ended()

    def called(self, pipeline: Any) -> int:
        """Return the step of a call; on other ranks it may be a later one."""
        return self.number

    def catch_up(self, number: int) -> None:
        """Log the step that has ended, on all ranks alike."""
        while self._session.step_count < number and not self._session.closed:
            self._session.step()
