"""An opened run: its tasks, spans, layers, statistics and log lines, whatever state its files are in.

    with open_run("RUN") as run:
        tasks = run.tasks()
        for note in run.notes: ...

The files are read once. What cannot be read is skipped, and a note says so.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pipesight.runs.format import LOGS, RUN_FILE, STATS, TRACE
from pipesight.runs.reading._parquet_dataset import is_dataset
from pipesight.runs.reading.descriptions import read_description
from pipesight.runs.reading.process_liveness import is_gone, may_restart
from pipesight.runs.reading.reader_notes import NotARunError, Note
from pipesight.runs.reading.stats_and_logs import LogLine, foreign_statistics, log_lines, measured_steps, statistics

if TYPE_CHECKING:
    from pipesight.runs.reading.event_loading import Loaded
    from pipesight.runs.reading.event_tables import (
        Column,
        Communications,
        Kernels,
        LayerRuns,
        LayerTimes,
        NameTimes,
        Operations,
        Points,
        ProfilerSteps,
        ProgramSpans,
        Spans,
        Tasks,
        Transfers,
    )
    from pipesight.runs.reading.megatron_log import TrainingLog

__all__ = ["LogLine", "NotARunError", "Note", "Run", "is_dataset", "open_run"]


class Run:
    """A run, opened by `open_run`."""

    followed = False
    """Whether it is read while it grows, by a `Follower` that knows whether it has ended."""

    def __init__(self, path: Path, loaded: Loaded) -> None:
        self.path = path
        self.description = loaded.description
        """What ``run.json`` says; empty if there is none."""
        self.attempt = loaded.attempt
        """Which attempt of a restarted run it is."""
        self.events = loaded.count
        """The number of spans."""
        self._events = loaded.events
        self._loaded = loaded

    def __repr__(self) -> str:
        return f"<Run {str(self.path)!r}: {self.events:,} events>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the report of the run."""
        # A view draws it, which is above this package and is imported only here.
        html: str = importlib.import_module("pipesight.view.notebook").run_html(self)
        return html

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine that holds the events."""
        self._loaded.checks.stop()
        self._events.close()

    @property
    def notes(self) -> list[Note]:
        """Warnings about the files, as far as they have been read."""
        self._loaded.checks.finish()
        return list(self._loaded.notes)

    def was_killed(self) -> bool:
        """Return whether the run's process on this machine is gone without having written how it ended."""
        if not is_gone(self.description.get("pid"), self.description) or may_restart(self.description):
            return False
        try:  # it may have ended normally just now
            return read_description(self.path).get("outcome") is None
        except (OSError, ValueError):
            return False

    def tasks(self, steps: range | None = None) -> Tasks:
        """Return the tasks of all or some steps, by mini-batch and begin; on GPUs, as timed there."""
        from pipesight.runs.reading import event_queries

        return event_queries.tasks(self._events.frame, self._events.fetch, steps)

    def operations(self) -> Operations | None:
        """Return the operations of a trace that has these instead of events; ``None`` for any other run."""
        return self._loaded.operations

    def training_log(self) -> TrainingLog | None:
        """Return the iterations of a training log of Megatron-LM; ``None`` for any other run."""
        return self._loaded.log

    def transfers(self, steps: range | None = None) -> Transfers:
        """Return the transfers between partitions, by mini-batch and begin."""
        from pipesight.runs.reading import event_queries

        return event_queries.transfers(self._events.frame, self._events.fetch, steps)

    def spans(self) -> Spans:
        """Return what the main threads of ranks did outside pipelines."""
        from pipesight.runs.reading import event_queries

        return event_queries.spans(self._events.frame, self._events.fetch)

    def program(self) -> ProgramSpans:
        """Return everything the main threads of ranks did outside pipelines, the user's own spans included."""
        from pipesight.runs.reading import event_queries

        return event_queries.program(self._events.frame, self._events.fetch)

    def uses_devices(self) -> bool:
        """Return whether anything was timed on a GPU."""
        from pipesight.runs.reading import event_queries

        return event_queries.uses_devices(self._events.frame, self._events.fetch)

    def points(self) -> Points:
        """Return the counters and instants, by rank and time; none of a dataset that a cluster holds."""
        from pipesight.runs.reading.event_tables import Points

        found = getattr(self._events, "points", None)
        return Points.empty() if found is None else Points(**found())

    def communications(self) -> Communications:
        """Return what the main threads of ranks sent and received beside pipelines."""
        from pipesight.runs.reading import event_queries

        return event_queries.communications(self._events.frame, self._events.fetch)

    def kernels(self) -> Kernels:
        """Return what ran on GPUs, of a trace of PyTorch's profiler."""
        from pipesight.runs.reading import event_queries

        return event_queries.kernels(self._events.frame, self._events.fetch)

    @property
    def profiled_schedule(self) -> bool:
        """Whether ranks sent each other tensors in a trace of PyTorch's profiler, as schedules of pipelines do."""
        names = {str(name) for name in self.names().name.tolist()}
        return "c10d::send" in names and "c10d::recv_" in names

    def profiler_steps(self) -> ProfilerSteps:
        """Return the steps that PyTorch's profiler was told of."""
        from pipesight.runs.reading import event_queries

        return event_queries.profiler_steps(self._events.frame, self._events.fetch)

    def layer_times(self, steps: range | None = None, *, without: Mapping[int, Column] | None = None) -> LayerTimes:
        """Return the total time of each layer in all or some steps, without some mini-batches, by rank and number."""
        from pipesight.runs.reading import event_queries

        return event_queries.layer_times(self._events.frame, self._events.fetch, steps, without)

    def layer_runs(self, *steps: int) -> LayerRuns:
        """Return each run of each layer in some steps."""
        from pipesight.runs.reading import event_queries

        return event_queries.layer_runs(self._events.frame, self._events.fetch, steps)

    def names(self) -> NameTimes:
        """Return the total time of each name, longest first, whichever tool wrote the trace."""
        from pipesight.runs.reading import event_queries

        return event_queries.names(self._events.frame, self._events.fetch)

    def steps(self) -> list[int]:
        """Return the numbers of the steps, in order."""
        return self._steps

    def ranks(self) -> list[int]:
        """Return the ranks that have events, in order."""
        return self._ranks

    @cached_property
    def _steps(self) -> list[int]:
        if (operations := self.operations()) is not None:
            return sorted({*operations.step.tolist()})
        if (log := self.training_log()) is not None:
            return [entry.number for entry in log.iterations]
        from pipesight.runs.reading import event_queries

        return [int(step) for step in event_queries.steps(self._events.frame, self._events.fetch)]

    @cached_property
    def _ranks(self) -> list[int]:
        if (operations := self.operations()) is not None:
            return sorted({*operations.rank.tolist()})
        from pipesight.runs.reading import event_queries

        return [int(rank) for rank in event_queries.ranks(self._events.frame, self._events.fetch)]

    def statistics(self, *, words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the lines of statistics, each with its ``rank``; given ``words``, only lines that contain one."""
        yield from statistics(self.path / STATS, self._note, words=words, attempt=self.attempt)
        for path, rank in self._loaded.records:
            yield from foreign_statistics(path, rank)

    def measured_steps(self) -> set[int]:
        """Return the steps in which statistics of tensors were measured."""
        return measured_steps(self.path / STATS, attempt=self.attempt)

    def log_lines(self) -> Iterator[LogLine]:
        """Yield the log lines, rank by rank."""
        return log_lines(self.path / LOGS, self._note, attempt=self.attempt)

    def write_dataset(self, folder: str | os.PathLike[str]) -> int:
        """Write the run as a Parquet dataset, as ``pipesight convert --to parquet`` does.

        Every event is written with all its fields; a run that was not opened with ``whole`` is read again for that.
        Returns the number of events.

        Raises:
            NotARunError: it has no events: a trace of operations, or a training log.
            OSError: it could not be written.
            TypeError: the events are in a cluster: the run already is a dataset.
        """
        from pipesight.runs.reading._parquet_dataset import write_dataset
        from pipesight.runs.reading.duckdb_events import DuckEvents
        from pipesight.runs.reading.event_loading import load

        if self._loaded.operations is not None or self._loaded.log is not None:
            what = "a trace of operations" if self._loaded.operations is not None else "a training log"
            raise NotARunError(f"{what} has no events to make a dataset of: {str(self.path)!r}")
        if not isinstance(self._events, DuckEvents):
            raise TypeError(f"the run already is a dataset: {str(self.path)!r}")
        if self._events.is_whole:
            records = self._loaded.records
            return write_dataset(self._events, self.notes, source=self.path, target=Path(folder), records=records)
        with Run(self.path, load(self.path, attempt=self._loaded.asked, whole=True)) as whole:
            return whole.write_dataset(folder)

    def _note(self, note: Note) -> None:
        if note not in self._loaded.notes:
            self._loaded.notes.append(note)


def open_run(
    path: str | os.PathLike[str], *, engine: object = "duckdb", attempt: int | None = None, whole: bool = False
) -> Run:
    """Open a run directory, a folder of traces, a trace, or a dataset made by `pipesight convert --to parquet`.

    Example::

        >>> with open_run("RUN") as run:
        ...     print(len(run.tasks()), "tasks in", len(run.steps()), "steps")

    Args:
        path: what to read.
        engine: what runs the queries. For a dataset, it can be a cluster: ``"dask"``, ``"spark"``, a Dask client or a
            Spark session.
        attempt: which attempt of a restarted run, counted from 0; by default the last.
        whole: read every event with all its fields, for `Run.write_dataset`; everything else needs only spans.

    Raises:
        NotARunError: no events were found.
        ValueError: there is no such engine, or no such attempt.
        ImportError: the engine is not installed.
    """
    from pipesight.runs.reading.event_loading import load

    folder = Path(path)
    if folder.name == TRACE and (folder.parent / RUN_FILE).is_file():
        folder = folder.parent
    return Run(folder, load(folder, engine=engine, attempt=attempt, whole=whole))
