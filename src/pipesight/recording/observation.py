"""`observe`: record a training run, whatever it trains, into one run directory."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from pipesight._logger import own_logger
from pipesight.recording._guard import Guard
from pipesight.recording.notebook_line import NotebookLine, in_notebook
from pipesight.recording.options import RecordingOptions, level_number
from pipesight.recording.pipeline_description import Pipeline
from pipesight.recording.rank_clocks import RankClocks
from pipesight.recording.recorders import Recorders
from pipesight.recording.run_record import RunRecord
from pipesight.recording.run_statistics import Config
from pipesight.recording.step_counter import StepCounter
from pipesight.recording.step_sampling import StepRanges, StepSampling
from pipesight.runs.description import outcome_of
from pipesight.runs.directory import RunDirectory
from pipesight.runs.disk_quota import DiskQuota
from pipesight.trace import trace_session

if TYPE_CHECKING:
    from pipesight.distributed import DistributedPipeline

__all__ = ["Observation", "observe"]

logger = own_logger(__name__)

GIBIBYTE = 2**30


def observe(
    path: str | os.PathLike[str],
    *,
    trace: bool = True,
    stats: Config | None = None,
    logs: str | int | None = "info",
    steps: StepRanges = None,
    every: int = 1,
    max_bytes: int | None = GIBIBYTE,
    first_step: int = 0,
    overwrite: bool = False,
) -> Observation:
    """Record what a block of code does, whatever it trains, into a run directory.

    Example::

        with pipesight.observe("RUN", stats="stats.yaml", steps=(10, 20)):
            train()

    Args:
        path: The run directory, which is created. If it already holds a recording, that one is kept, and this one goes
            into ``RUN-2``, ``RUN-3`` and so on.
        trace: Record the tasks and layers of pipelines, and what else PyTorch does.
        stats: Log the tensor statistics that this configuration selects: a YAML file or a dict.
        logs: Keep log lines from this level on; ``None`` keeps none.
        steps: The first and the last step to record, or several such pairs; ``None`` for all.
        every: Record only every Nth step, counted from the first of each pair.
        max_bytes: Disk quota for the trace and the log lines of each rank; the oldest go first. ``None`` for no limit.
        first_step: The number of the first step, for example after loading a checkpoint.
        overwrite: Replace a recording that is already there.

    Returns:
        A context manager, which returns itself.

    Raises:
        TypeError: The path is neither a string nor a `pathlib.Path`.
        ValueError: Another argument is out of range.
        FileExistsError: The directory holds something other than a recording.
        ConfigError: The statistics configuration has mistakes.
        RuntimeError: A run is already being recorded.
    """
    options = RecordingOptions(
        trace=bool(trace),
        stats=stats,
        log_level=None if logs is None else level_number(logs),
        sampling=StepSampling.of(steps, every=every),
        max_bytes=max_bytes,
        first_step=first_step,
        overwrite=overwrite,
    )
    return Observation(RunDirectory(path), options)


class Observation:
    """A run that is being recorded. Made by `observe`.

    It owns the life cycle: `Recorders` record, `RunRecord` keeps ``run.json``, and `StepCounter` says when a step
    begins.
    """

    def __init__(self, directory: RunDirectory, options: RecordingOptions) -> None:
        self._directory, self._options = directory, options
        self.of_command = False
        """Whether ``pipesight run`` records; an `observe` in the program itself then records nothing."""
        self._begun = False
        self._process = 0  # that records; a forked one does not
        self._counter = StepCounter(options.first_step, self)
        self._recorders = Recorders(options, self._counter)
        self._record: RunRecord | None = None
        self._clocks: RankClocks | None = None
        self._guard = Guard()
        self._skipped_steps = 0
        self._line: NotebookLine | None = None

    def __repr__(self) -> str:
        return f"<Observation {str(self.path)!r}, step {self.step_number}>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def step_number(self) -> int:
        """The current step."""
        return self._counter.number

    def step(self, number: int) -> None:
        """Begin the step of this number; from now on, steps of optimizers are not counted."""
        self._counter.tell(operator.index(number))

    def watch(self, model: nn.Module | DistributedPipeline) -> None:
        """Log statistics of this model, instead of those that are found."""
        if self._recorders.statistics is not None:
            self._recorders.statistics.watch(model)

    def flush(self) -> None:
        """Write everything that was recorded so far."""
        self._recorders.flush()
        self._write_record()

    # The block.

    def __enter__(self) -> Observation:
        global _running
        if self._begun:
            raise RuntimeError("an observation can be used only once; call observe() again")
        if _running is not None and _running._process == os.getpid():
            if _running.of_command:
                return self._defer_to(_running)
            raise RuntimeError(
                f"a run is already being recorded into {str(_running.path)!r}; a process records one run at a time"
            )
        traced = trace_session.running()
        if self._options.trace and traced is not None and not traced.from_environment:
            raise RuntimeError(
                f"a trace is already being written to {str(traced.path)!r}, and a run writes its own; "
                "remove trace.start(), or use observe(..., trace=False)"
            )
        self._recorders.check()
        asked = self.path
        self._directory.claim(overwrite=self._options.overwrite)
        if self.path != asked and self._directory.rank == 0:
            logger.warning("%s already holds a recording; this one goes into %s", asked, self.path)
        with contextlib.ExitStack() as stack:
            stack.callback(self._directory.leave)
            self._start(stack)
            stack.pop_all()
        self._begun, self._process, _running = True, os.getpid(), self
        self._guard("show the recording", self._show)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _running
        if self._record is None:  # `pipesight run` records
            return
        if _running is self:
            _running = None
        if self._process == os.getpid():
            self._finish(outcome_of(error), failed=error is not None)
        else:
            self._detach()

    def _defer_to(self, running: Observation) -> Observation:
        """Record nothing, since `pipesight run` does; pass on what the program says of steps and models."""
        if running._directory.rank == 0:
            logger.warning(
                "`pipesight run` already records this program into %s; observe(%r) records nothing: give its options "
                "to `pipesight run`",
                running.path,
                str(self.path),
            )
        self._begun = True
        self._directory, self._counter, self._recorders = running._directory, running._counter, running._recorders
        return self

    def _show(self) -> None:
        if self._directory.rank == 0 and in_notebook():
            self._line = NotebookLine(self.path)

    def _start(self, stack: contextlib.ExitStack) -> None:
        directory, recorders = self._directory, self._recorders
        quota = DiskQuota(directory, self._options.max_bytes)
        recorders.attach(directory, quota, stack)
        if recorders.session is not None:
            recorders.session.of_command = self.of_command
            trace_session.on_finish(self._end_with_process)
            stack.callback(trace_session.on_finish, self._end_with_process, remove=True)
        self._counter.attach()
        stack.callback(self._counter.detach)
        session = recorders.session
        offset = time.time_ns() - time.perf_counter_ns() if session is None else session.clock_offset
        self._clocks = RankClocks(
            directory.rank, directory.ranks, directory.restart, lambda: time.perf_counter_ns() + offset
        )
        stack.callback(self._clocks.end, failed=True)

        def dropped() -> dict[str, int]:
            events = quota.removed_events + recorders.dropped_events
            return {"steps": self._skipped_steps, "events": events, "log_lines": recorders.dropped_lines}

        self._record = RunRecord(directory, self._options, quota, self._clocks, clock_offset=offset, dropped=dropped)
        recorders.switch(self._options.first_step)
        self._record.write()
        self.join()

    def _finish(self, outcome: str, *, failed: bool) -> None:
        """End everything, in reverse order. An error of the recording must not hide that of the training."""
        assert self._record is not None
        assert self._clocks is not None
        if not self._recorders.on and self._counter.ended:
            self._skipped_steps += 1
        self._record.take_off_hooks()
        self._counter.detach()
        self._guard("compare clocks", self._clocks.end, failed=failed)
        statistics, self._recorders.statistics = self._recorders.statistics, None
        try:
            if statistics is not None and failed:
                self._guard("close the statistics", statistics.close, failed=True)
            elif statistics is not None:
                statistics.close(failed=False)  # may raise: a missing rank concerns the program
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._detach()
            self._record.end(outcome)
            self._record.forget_pipelines()
            if self._line is not None:
                self._guard("show the recording", self._line.end, outcome, whole=self._counter.ended)

    def _detach(self) -> None:
        """Remove everything that is attached to this process."""
        trace_session.on_finish(self._end_with_process, remove=True)
        self._counter.detach()
        self._recorders.detach(self._guard)

    def _end_with_process(self) -> None:
        """Write what can still be written: the process ends inside the block."""
        if self._process != os.getpid() or self._record is None or self._clocks is None:
            return
        if self._recorders.statistics is not None:
            self._guard("close the statistics", self._recorders.statistics.close, failed=True)
        self._guard("compare clocks", self._clocks.end, failed=True)
        self._record.end(trace_session.ending() or "the process ended")

    # What `StepCounter` calls; see `StepListener`. None of it may break the training.

    def turn(self, last: int, step: int) -> None:
        """A step has ended, and another begins."""
        if not self._recorders.on:
            self._skipped_steps += 1
        elif self._recorders.statistics is not None:
            self._recorders.statistics.end_step()  # raises where the configuration, or a missing rank, asks for it
        self._guard("turn to another step", self._recorders.switch, step)
        self.join()
        if self._record is not None and self._process == os.getpid():
            self._guard("describe the run", self._record.write_now_and_then)
        if self._line is not None and self._process == os.getpid():
            self._guard("show the recording", self._line.turn, last)

    def stepped(self) -> None:
        """An optimizer has stepped, so the next step may begin."""
        self._recorders.prepare(self._counter.number + 1)

    def join(self) -> None:
        """The program may have joined other ranks."""
        if self._clocks is not None:
            self._guard("compare clocks", self._clocks.begin)

    def part(self) -> None:
        """The program is about to leave the other ranks."""
        if self._recorders.statistics is not None:
            self._recorders.statistics.part_with_ranks()
        if self._clocks is not None:
            self._guard("compare clocks", self._clocks.end)

    def meet_pipeline(self, pipeline: Pipeline) -> None:
        """A pipeline is called."""
        if self._record is not None and self._process == os.getpid():
            self._guard("describe a pipeline", self._record.add_pipeline, pipeline)
        self._recorders.meet_pipeline(pipeline)

    def meet_module(self, module: nn.Module) -> None:
        """A module is called from outside all others."""
        if self._record is not None and self._process == os.getpid():
            self._guard("describe a model", self._record.add_module, module)
        self._recorders.meet_module(module)

    def _write_record(self) -> None:
        if self._record is not None and self._process == os.getpid():
            self._record.write()


_running: Observation | None = None
