"""`observe`: everything on, around any training code, into one run directory."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipesight import trace as tracing
from pipesight._logger import own_logger
from pipesight.recording.log_capture import LogCapture, level_number
from pipesight.recording.pipeline_description import Pipeline, PipelineDescription
from pipesight.recording.rank_clocks import RankClocks
from pipesight.recording.run_statistics import Config, RunStatistics
from pipesight.recording.step_counter import StepCounter
from pipesight.recording.step_sampling import Steps, StepSampling
from pipesight.runs.description import Description, outcome_of
from pipesight.runs.directory import RunDirectory
from pipesight.runs.disk_quota import DiskQuota
from pipesight.trace import trace_session
from pipesight.trace.automatic import Instrumentation, instrument

if TYPE_CHECKING:
    from pipesight.distributed import DistributedPipeline

__all__ = ["Observation", "observe"]

logger = own_logger(__name__)

GIBIBYTE = 2**30
_REFRESH = 10.0  # seconds from one look at the run's files to the next, at least


def observe(
    path: str | os.PathLike[str],
    *,
    trace: bool = True,
    stats: Config | None = None,
    logs: str | int | None = "info",
    steps: Steps = None,
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
        path: The run directory; it is made. If it holds a recording, that is left alone, and this one goes into the
            next of its name: ``RUN-2``.
        trace: Record tasks and layers of pipelines, and what else PyTorch does.
        stats: Log the statistics that this configuration says, a YAML file or a dict.
        logs: Keep the log lines from this level on; ``None`` for none.
        steps: The first and the last step to record, or several such pairs; ``None`` for all.
        every: Record each Nth step only, counted from the first of a window.
        max_bytes: Of trace and log lines of one rank; the oldest go. ``None`` for no limit.
        first_step: The number of the first step, after a checkpoint was loaded for example.
        overwrite: Replace the recording that is there instead.

    Returns:
        What to use as a context manager; it gives itself.

    Raises:
        FileExistsError: The directory holds something else than a recording.
        ConfigError: The configuration of statistics has mistakes.
        RuntimeError: Something is being recorded already.
    """
    return Observation(
        path,
        trace=trace,
        stats=stats,
        logs=logs,
        windows=StepSampling.of(steps, every=every),
        max_bytes=max_bytes,
        first_step=first_step,
        overwrite=overwrite,
    )


class Observation:
    """A run that is being recorded. Made by `observe`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        trace: bool,
        stats: Config | None,
        logs: str | int | None,
        windows: StepSampling,
        max_bytes: int | None,
        first_step: int,
        overwrite: bool,
    ) -> None:
        if max_bytes is not None and max_bytes < DiskQuota.LEAST:
            raise ValueError(
                f"max_bytes must be {DiskQuota.LEAST:,} or more, or None for no limit (max_bytes: {max_bytes!r})"
            )
        if not isinstance(first_step, int) or isinstance(first_step, bool) or first_step < 0:
            raise ValueError(f"first_step must be an integer from 0 on (first_step: {first_step!r})")
        self._directory = RunDirectory(path)
        self._trace, self._stats, self._windows = bool(trace), stats, windows
        self._logs = None if logs is None else (logs, level_number(logs))
        self._max_bytes, self._first, self._overwrite = max_bytes, first_step, overwrite
        self._left_out = 0
        self._process = 0
        self._begun = False
        self._steps_back = False
        self.of_command = False
        """Whether this is of ``pipesight run``: what the program itself then wants recorded steps back."""
        self._pipelines: dict[int, PipelineDescription] = {}
        self._meeting = threading.Lock()
        self._complaints: set[str] = set()
        self._observing = True
        self._without_hooks = False
        self._count = StepCounter(first_step, self)
        self._session: tracing.Session | None = None
        self._instrumentation: Instrumentation | None = None
        self._statistics: RunStatistics | None = None
        self._log_lines: LogCapture | None = None
        self._description: Description | None = None

    def __repr__(self) -> str:
        return f"<Observation {str(self.path)!r}, step {self.step_number}>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def step_number(self) -> int:
        """The step under way."""
        return self._count.number

    def step(self, number: int) -> None:
        """Say that the step of this number begins; from now on, optimizers' steps are not counted."""
        self._count.tell(operator.index(number))

    def watch(self, model: nn.Module | DistributedPipeline) -> None:
        """Say which model the statistics are of, instead of having it found."""
        if self._statistics is not None:
            self._statistics.watch(model)

    def flush(self) -> None:
        """Write everything that was recorded so far."""
        if self._session is not None:
            self._session.flush()
        if self._statistics is not None:
            self._statistics.flush()
        self._refresh()

    # The block.

    def __enter__(self) -> Observation:
        global _running
        if self._begun:
            raise RuntimeError("an observation can be used once; call observe() again for another")
        if _running is not None and _running._process == os.getpid():
            if _running.of_command:
                return self._step_back(_running)
            raise RuntimeError(
                f"a run is being recorded already, into {str(_running.path)!r}; one process records one run at a time"
            )
        under_way = trace_session.running()
        if self._trace and under_way is not None and not under_way.from_environment:
            raise RuntimeError(
                f"a trace is being written already, to {str(under_way.path)!r}, and a run has its own; "
                "leave out trace.start(), or observe(..., trace=False)"
            )
        asked = self.path
        self._directory.claim(overwrite=self._overwrite)
        if self.path != asked and self._directory.rank == 0:
            logger.warning("%s holds a recording already; this one goes into %s", asked, self.path)
        with contextlib.ExitStack() as stack:
            stack.callback(self._directory.leave)
            self._start(stack)
            stack.pop_all()
        self._begun, self._process, _running = True, os.getpid(), self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _running
        if self._steps_back:
            return
        if _running is self:
            _running = None
        if self._process == os.getpid():  # else a forked process leaves the block
            self._finish(outcome_of(error), failed=error is not None)
        else:
            self._let_go()

    def _step_back(self, running: Observation) -> Observation:
        """Record nothing, as another does already; what the program says of steps and models goes to that one."""
        if running._directory.rank == 0:
            logger.warning(
                "this program is recorded by `pipesight run` already, into %s; observe(%r) steps back, and what it "
                "would record has to be asked of `pipesight run`",
                running.path,
                str(self.path),
            )
        self._begun = self._steps_back = True
        self._directory, self._count = running._directory, running._count
        self._session, self._statistics = running._session, running._statistics
        return self

    def _start(self, stack: contextlib.ExitStack) -> None:
        directory = self._directory
        if self._stats is not None:
            self._statistics = RunStatistics(
                self._stats, directory.path, first=self._first, begin=self._count.begin, log=self._log
            )
            stack.callback(self._statistics.close, failed=True)
        room = DiskQuota(directory, self._max_bytes)
        self._room = room
        if self._logs is not None:
            self._log_lines = LogCapture(
                directory.log, level=self._logs[1], max_bytes=room.log_bytes, step=lambda: self._count.number
            )
            stack.callback(self._log_lines.remove)
        if self._trace:
            self._session = tracing.start(directory.trace, max_bytes=room.part_bytes, max_parts=room.parts)
            self._session.of_command = self.of_command
            stack.callback(self._session.stop)
            trace_session.on_finish(self._end_with_process)
            stack.callback(trace_session.on_finish, self._end_with_process, remove=True)
        if self._trace or self._stats is not None:
            self._instrumentation = instrument(depth=1 if self._trace else 0).__enter__()
            stack.callback(self._instrumentation.__exit__, None, None, None)
        self._count.attach()
        stack.callback(self._count.detach)
        offset = time.time_ns() - time.perf_counter_ns() if self._session is None else self._session.clock_offset
        self._clock_offset = offset
        self._clocks = RankClocks(
            directory.rank, directory.ranks, directory.restart, lambda: time.perf_counter_ns() + offset
        )
        stack.callback(self._clocks.end, failed=True)
        self._description = Description(
            directory,
            clock=self._clock(),
            observed=self._observed(),
            versions={"torch": str(torch.__version__), "cuda": torch.version.cuda},
        )
        self._switch(self._first)
        self._description.update()
        self.join()

    def _observed(self) -> dict[str, Any]:
        stats = self._stats
        return {
            "trace": self._trace,
            "steps": self._windows.as_json(),
            "every": self._windows.every,
            "stats": os.fspath(stats) if isinstance(stats, str | os.PathLike) else None if stats is None else "a dict",
            "logs": None if self._logs is None else logging.getLevelName(self._logs[1]).lower(),
            "max_bytes": self._max_bytes,
        }

    def _finish(self, outcome: str, *, failed: bool) -> None:
        """End everything, last first. An error of ours must not hide that of the training."""
        if not self._observing and self._count.ended:
            self._left_out += 1
        with self._meeting:
            for known in self._pipelines.values():
                known.settle()
                known.remove()
        self._count.detach()
        self._safely("compare clocks", self._clocks.end, failed=failed)
        statistics, self._statistics = self._statistics, None
        try:
            if statistics is not None and failed:
                self._safely("close the statistics", statistics.close, failed=True)
            elif statistics is not None:
                statistics.close(failed=False)  # a rank that is missing is the program's affair
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._let_go()
            if self._description is not None:
                self._description.end(outcome)
                self._refresh()
            self._pipelines.clear()  # whoever keeps this object keeps no model

    def _let_go(self) -> None:
        """Take off what is attached to this process."""
        trace_session.on_finish(self._end_with_process, remove=True)
        self._count.detach()
        if self._instrumentation is not None:
            if self._without_hooks:
                self._instrumentation.modules.pause(False)
                self._without_hooks = False
            self._safely("remove the hooks", self._instrumentation.__exit__, None, None, None)
            self._instrumentation = None
        if self._session is not None:
            self._session.resume()
            self._safely("end the trace", self._session.stop)
        if self._log_lines is not None:
            self._safely("end the log", self._log_lines.remove)

    def _end_with_process(self) -> None:
        """Note what can be noted: the process ends inside of the block."""
        if self._process != os.getpid() or self._description is None:
            return
        if self._statistics is not None:
            self._safely("close the statistics", self._statistics.close, failed=True)
        self._safely("compare clocks", self._clocks.end, failed=True)
        self._description.end(trace_session.ending() or "the process ended")
        self._refresh()

    # How the run goes on; see `StepListener`. None of it may break the training.

    def turn(self, last: int, step: int) -> None:
        """A step has ended, and another begins."""
        statistics = self._statistics
        if not self._observing:
            self._left_out += 1
        elif statistics is not None:
            statistics.end_step()  # raises where the configuration, or a rank that is missing, says so
        self._safely("turn to another step", self._switch, step)
        self.join()
        if self._description is not None and time.monotonic() - self._description.written > _REFRESH:
            self._safely("describe the run", self._look_around)

    def stepped(self) -> None:
        """A step may be over: be ready for the next, which begins with the call of a module perhaps."""
        if self._windows.include(self._count.number + 1):
            self._want_hooks(True)

    def join(self) -> None:
        """The program may have joined other ranks."""
        self._safely("compare clocks", self._clocks.begin)

    def part(self) -> None:
        """The program is about to leave the other ranks."""
        if self._statistics is not None:
            self._statistics.part_with_ranks()
        self._safely("compare clocks", self._clocks.end)

    def meet_pipeline(self, pipeline: Pipeline) -> None:
        """A pipeline is called."""
        if os.getpid() == self._process:
            self._safely("describe a pipeline", self._describe_pipeline, pipeline)
        if self._statistics is not None:
            self._statistics.meet_pipeline(pipeline)

    def meet_module(self, module: nn.Module) -> None:
        """A module is called, from outside of all others."""
        if self._statistics is not None:
            self._statistics.meet_module(module)

    def _switch(self, step: int) -> None:
        """Record, or do not, as the windows say."""
        observing = self._observing = self._windows.include(step)
        if self._statistics is not None:
            self._statistics.begin_step(step, observing=observing)
        if self._log_lines is not None:
            self._log_lines.tasks = observing
        if self._session is not None:
            if observing:
                self._session.resume()
            else:
                self._session.pause()
        self._want_hooks(observing)

    def _want_hooks(self, wanted: bool) -> None:
        """Have the hooks of modules, which cost something in each call, only while they are good for something."""
        if self._instrumentation is not None and wanted == self._without_hooks:
            self._without_hooks = not wanted
            self._instrumentation.modules.pause(not wanted)

    def _describe_pipeline(self, pipeline: Pipeline) -> None:
        known = self._pipelines.get(id(pipeline))
        if known is None:
            with self._meeting:
                self._pipelines.setdefault(id(pipeline), PipelineDescription(pipeline))
            self._refresh()
        elif known.settle():
            self._refresh()

    def _look_around(self) -> None:
        self._room.make()
        self._refresh()

    def _refresh(self) -> None:
        if self._description is None or self._process != os.getpid():
            return
        events = self._room.removed
        if self._session is not None:
            events += self._session.lost + self._session.removed
        lines = 0 if self._log_lines is None else self._log_lines.left_out
        self._description.update(
            clock=self._clock(),
            pipelines=[known.as_json() for known in list(self._pipelines.values())],
            left_out={"steps": self._left_out, "events": events, "log_lines": lines},
        )

    def _clock(self) -> dict[str, Any]:
        return {"offset_ns": self._clock_offset, **self._clocks.as_json()}

    def _log(self, level: int, message: str) -> None:
        if self._log_lines is not None and self._logs is not None and level >= self._logs[1]:
            self._log_lines.write(level, "pipesight.stats", message, place=f"step {self._count.number}")

    def _safely(self, what: str, action: Any, *args: Any, **kwargs: Any) -> None:
        try:
            action(*args, **kwargs)
        except Exception:
            if what not in self._complaints:
                self._complaints.add(what)
                logger.exception("the recording of a run could not %s; training goes on", what)


_running: Observation | None = None
