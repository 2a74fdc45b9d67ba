"""Where am I: the step, partition, micro-batch, phase and layer of the running code, and who observes it.

An engine keeps one `Where` per worker thread and changes it in place; observers (log lines, spans, statistics) read it.

    engines --set--> Where <--read-- observers
"""

from __future__ import annotations

from pipesight.context.kept import Kept as Kept  # these "as" are for engines and observers
from pipesight.context.observer import Observer, attach, detach, observers
from pipesight.context.observer import Observers as Observers
from pipesight.context.steps import StepCounter as StepCounter
from pipesight.context.steps import catch_up as catch_up
from pipesight.context.steps import count_steps as count_steps
from pipesight.context.steps import counted_step
from pipesight.context.steps import step_counter as step_counter
from pipesight.context.steps import step_of_call as step_of_call
from pipesight.context.where import MicrobatchToken as MicrobatchToken
from pipesight.context.where import (
    Phase,
    Where,
    current,
    current_microbatch,
    exchanging,
    is_checkpointing,
    is_recomputing,
)
from pipesight.context.where import Unrepeatable as Unrepeatable
from pipesight.context.where import enter_thread as enter_thread

__all__ = [
    "Observer",
    "Phase",
    "Where",
    "attach",
    "counted_step",
    "current",
    "current_microbatch",
    "detach",
    "exchanging",
    "is_checkpointing",
    "is_recomputing",
    "observers",
]


def __dir__() -> list[str]:
    return __all__
