"""Queries on a Parquet dataset in a cluster: the same as in DuckDB, run by Dask or Spark.

Only the results of queries come to this process. The workers must see the dataset under the same path.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import narwhals
import numpy as np

from pipesight.runs.format import EVENTS
from pipesight.runs.reading.event_queries import of_dataset

if TYPE_CHECKING:
    from pipesight.runs.reading.event_loading import Events
    from pipesight.runs.reading.event_queries import Frame
    from pipesight.runs.reading.event_tables import Column

__all__ = ["DaskEvents", "SparkEvents", "events_in"]


def events_in(engine: object, dataset: Path) -> Events:
    """Return the events of a dataset in an engine: ``"dask"``, ``"spark"``, a Dask client, or a Spark session.

    Raises:
        ValueError: there is no such engine.
        ImportError: it is not installed.
    """
    package = type(engine).__module__.partition(".")[0]
    if engine == "dask" or package == "distributed":
        return DaskEvents(dataset, None if engine == "dask" else engine)
    if engine == "spark" or package == "pyspark":
        return SparkEvents(dataset, None if engine == "spark" else engine)
    raise ValueError(
        f"engine must be 'duckdb', 'dask', 'spark', a dask.distributed.Client or a SparkSession (engine: {engine!r})"
    )


class DaskEvents:
    """Events in Dask: on the cluster of a client, or else on Dask's default one."""

    def __init__(self, dataset: Path, client: Any = None) -> None:
        try:
            import dask.dataframe
        except ImportError as error:
            raise ImportError(f'Dask is not installed ({error}): pip install "pipesight[dask]"') from error
        self._client = client
        found = dask.dataframe.read_parquet(str(dataset.absolute() / EVENTS), dtype_backend="numpy_nullable")
        self._frame: Frame = of_dataset(narwhals.from_native(found).lazy())

    @property
    def frame(self) -> Frame:
        """The events, as a lazy frame."""
        return self._frame

    def fetch(self, query: Frame) -> Mapping[str, Column]:
        """Run a query on the cluster, and return its columns."""
        found = query.to_native()
        table = found.compute() if self._client is None else self._client.compute(found, sync=True)
        return {name: _plain(table[name].to_numpy()) for name in table.columns}

    def close(self) -> None:
        """Do nothing: the cluster belongs to the caller."""


class SparkEvents:
    """Events in Spark: in a session, or else in the active one."""

    def __init__(self, dataset: Path, session: Any = None) -> None:
        try:
            sql = importlib.import_module("pyspark.sql")
        except ImportError as error:
            raise ImportError(f'Spark is not installed ({error}): pip install "pipesight[spark]"') from error
        session = sql.SparkSession.builder.getOrCreate() if session is None else session
        self._frame: Frame = of_dataset(narwhals.from_native(session.read.parquet(str(dataset.absolute() / EVENTS))))

    @property
    def frame(self) -> Frame:
        """The events, as a lazy frame."""
        return self._frame

    def fetch(self, query: Frame) -> Mapping[str, Column]:
        """Run a query on the cluster, and return its columns."""
        found = query.to_native()
        rows = found.collect()
        return {
            name: np.array([row[place] for row in rows], object if kind == "string" else np.int64)
            for place, (name, kind) in enumerate(found.dtypes)
        }

    def close(self) -> None:
        """Do nothing: the session belongs to the caller."""


def _plain(column: Column) -> Column:
    """Return a column as a plain array of numbers or Python strings."""
    return column if column.dtype.kind in "biu" else column.astype(object)
