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
    """Logs all values of a step with one ``log_batch``, as ``layer/tensor/statistic``.

    Example::

        with mlflow.start_run():
            sink = MlflowSink()

    MLflow takes names for paths, which it shows in groups, and refuses a batch for one that it does not like. So ``%``
    becomes ``_percent``, what is not a letter, a digit or one of ``_-./`` and space an underscore, dots that a part
    begins with are left out, and a name that is too long keeps its end.

    Args:
        run_id: the run; the active one if it is not given.
        prefix: goes before each name.
        separator: goes between its parts; ``"_"`` gives names as in the log file.

    Raises:
        ImportError: mlflow is not installed.
        RuntimeError: there is no active run.
    """

    forgives = (Exception,)

    def __init__(self, run_id: str | None = None, *, prefix: str = "", separator: str = "/") -> None:
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
        self._prefix, self._separator = prefix, separator
        self._client: Any = mlflow.MlflowClient()
        self._metric: Any = entities.Metric

    def write(self, records: Sequence[Record]) -> None:
        """Log a batch of metrics."""
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(self._key(record), record.value, now, record.iteration) for record in records]
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST])

    def _key(self, record: Record) -> str:
        return _path(f"{self._prefix}{record.joined(self._separator)}")

    def close(self) -> None:
        """Do nothing: the run is the user's to end."""


def _path(name: str) -> str:
    parts = [_NOT_ALLOWED.sub("_", part).lstrip(".") for part in name.replace("%", "_percent").split("/")]
    return "/".join(part for part in parts if part)[-_LONGEST:].lstrip("./")
