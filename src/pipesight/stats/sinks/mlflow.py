"""Statistics in MLflow: ``pip install pipesight[mlflow]``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pipesight.stats.sinks.record import Record

__all__ = ["MlflowSink"]

_MOST = 1000  # metrics that MLflow takes in one call
_LONGEST = 250  # characters of a name
_NOT_ALLOWED = re.compile(r"[^\w\-. ]", re.ASCII)


class MlflowSink:
    """Logs all values of a step with one ``log_batch``, as ``layer_tensor_statistic``.

    Example::

        with mlflow.start_run():
            sink = MlflowSink()

    MLflow takes names for paths, and refuses a batch for one that it does not like. So ``%`` becomes ``_percent``,
    ``/`` a dot, what is not a letter, a digit or one of ``_-.`` and space an underscore, and a name that is too long
    keeps its end.

    Args:
        run_id: the run; the active one if it is not given.

    Raises:
        ImportError: mlflow is not installed.
        RuntimeError: there is no active run.
    """

    forgives = (Exception,)

    def __init__(self, run_id: str | None = None) -> None:
        try:
            mlflow = import_module("mlflow")
            entities = import_module("mlflow.entities")
        except ImportError as error:
            raise ImportError("mlflow is not installed; run: pip install pipesight[mlflow]") from error
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise RuntimeError(
                    "there is no active mlflow run; call mlflow.start_run() first, or pass one: MlflowSink(run_id)"
                )
            run_id = active.info.run_id
        self._run_id = run_id
        self._client: Any = mlflow.MlflowClient()
        self._metric: Any = entities.Metric

    def write(self, records: Sequence[Record]) -> None:
        """Log a batch of metrics."""
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(_key(record.name), record.value, now, record.iteration) for record in records]
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST])

    def close(self) -> None:
        """Do nothing: the run is the user's to end."""


def _key(name: str) -> str:
    key = _NOT_ALLOWED.sub("_", name.replace("%", "_percent").replace("/", "."))
    return key[-_LONGEST:].lstrip(".")
