"""Statistics in Weights & Biases: ``pip install pipesight[wandb]``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from typing import Any

from pipesight.stats.sinks.record import Record

__all__ = ["WandbSink"]


class WandbSink:
    """Logs all values of an iteration with one ``run.log``, as ``stats/layer_tensor_statistic``.

    Example::

        wandb.init(project="demo")
        sink = WandbSink()

    The x axis of the charts is ``stats/iteration``. A run drops rows whose step is behind its own, so where the program
    logs to the run too, and its steps are ahead of the iterations, values join the row of the program's current step.

    Args:
        run: what ``wandb.init`` returned; the active run if it is not given.
        prefix: goes before each name; wandb makes one section of charts of it.

    Raises:
        ImportError: wandb is not installed.
        RuntimeError: there is no active run.
    """

    forgives = (Exception,)

    def __init__(self, run: Any = None, *, prefix: str = "stats/") -> None:
        self._run = _active_run() if run is None else run
        self._prefix = prefix
        self._last = (-1, -1)
        self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}iteration")

    def write(self, records: Sequence[Record]) -> None:
        """Log a row for each iteration."""
        for iteration, group in groupby(records, key=lambda record: record.iteration):
            row = {f"{self._prefix}{record.name}": record.value for record in group}
            self._log({**row, f"{self._prefix}iteration": iteration}, iteration)

    def _log(self, row: dict[str, float], iteration: int) -> None:
        step = max(iteration, self._run.step)
        known_step, known_iteration = self._last
        if step == known_step and iteration != known_iteration:
            step += 1  # in the same row it would replace the values of that iteration
        self._run.log(row, step=step)
        self._last = (step, iteration)

    def close(self) -> None:
        """Do nothing: the run is the user's to finish."""


def _active_run() -> Any:
    try:
        wandb = import_module("wandb")
    except ImportError as error:
        raise ImportError("wandb is not installed; run: pip install pipesight[wandb]") from error
    if wandb.run is None:
        raise RuntimeError("there is no active wandb run; call wandb.init() first, or pass one: WandbSink(run)")
    return wandb.run
