"""What records a run in one process: the trace, the hooks on modules, statistics and log lines, on and off by step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

from pipesight import trace as tracing
from pipesight._import_watch import ImportWatch
from pipesight.recording._guard import Guard
from pipesight.recording.log_capture import LogCapture
from pipesight.recording.memory import MemoryRecorder
from pipesight.recording.options import RecordingOptions
from pipesight.recording.pipeline_description import Pipeline
from pipesight.recording.process_stops import StopWatch
from pipesight.recording.run_statistics import RunStatistics
from pipesight.recording.step_counter import StepCounter
from pipesight.recording.torch_pipelines import TorchPipeline
from pipesight.runs.directory import RunDirectory
from pipesight.runs.disk_quota import DiskQuota
from pipesight.stats.api import CheckedConfig, check_config
from pipesight.trace.automatic import Instrumentation, instrument

if TYPE_CHECKING:
    from pipesight.recording.torch_pipelines.schedule_hooks import ScheduleHooks

__all__ = ["Recorders"]

SCHEDULES = "torch.distributed.pipelining.schedules"
"""The module with torch's schedules."""
_ALL_MODULES = 64
"""The depth at which modules are recorded in some steps: that of any model."""
_OFTEN = 10
"""One of so many recorded steps has the times of all modules. Each call of a module costs 10 µs then."""


class Recorders:
    """Attached to this process by `attach`, until `detach`."""

    def __init__(self, options: RecordingOptions, counter: StepCounter) -> None:
        self._options, self._counter = options, counter
        self.session: tracing.Session | None = None
        self.statistics: RunStatistics | None = None
        self._config: CheckedConfig | None = None
        self._log: LogCapture | None = None
        self._stops: StopWatch | None = None
        self._hooks: Instrumentation | None = None
        self._hooks_paused = False
        self._imports: ImportWatch | None = None
        self._schedules: ScheduleHooks | None = None
        self._memory: MemoryRecorder | None = None
        self._recorded = 0
        self.on = True
        """Whether the current step is recorded."""

    def check(self) -> None:
        """Read the statistics configuration, and raise what is wrong with it, before anything is written or removed."""
        if self._options.stats is not None:
            self._config = check_config(self._options.stats)

    def attach(self, directory: RunDirectory, quota: DiskQuota, stack: contextlib.ExitStack) -> None:
        """Start to record, after `check`; ``stack`` undoes it if what follows fails."""
        options = self._options
        if self._config is not None:
            self.statistics = RunStatistics(
                self._config,
                directory.path,
                first=options.first_step,
                begin=self._counter.begin,
                log=self._write_statistics_message,
            )
            stack.callback(self.statistics.close, failed=True)
        if options.log_level is not None:
            self._log = LogCapture(
                directory.log,
                level=options.log_level,
                max_bytes=quota.log_bytes,
                step=lambda: self._counter.number,
            )
            stack.callback(self._log.remove)
        if options.trace:
            self.session = tracing.start(directory.trace, max_bytes=quota.part_bytes, max_parts=quota.parts)
            stack.callback(self.session.stop)
            self._stops = StopWatch()
            stack.callback(self._stops.close)
        if options.trace or options.stats is not None:
            self._hooks = instrument(depth=1 if options.trace else 0).__enter__()
            stack.callback(self._hooks.__exit__, None, None, None)
            if options.trace:
                self._memory = MemoryRecorder(self._hooks.modules)
                self._memory.attach()
                stack.callback(self._memory.detach)
        # After `instrument`: what a pipeline sends is recorded with its place.
        self._imports = ImportWatch(SCHEDULES, self._follow_schedules)
        stack.callback(self._leave_schedules)

    def _follow_schedules(self) -> None:
        """Follow pipelines of bare torch, now that the program has imported them."""
        from pipesight.recording.torch_pipelines.schedule_hooks import ScheduleHooks

        self._schedules = ScheduleHooks(self._pause_statistics)

    def _pause_statistics(self, begins: bool) -> None:
        if self.statistics is not None:
            self.statistics.pause(begins)

    def _leave_schedules(self) -> None:
        if self._imports is not None:
            self._imports.remove()
        if self._schedules is not None:
            self._schedules.remove()
            self._schedules = None

    def detach(self, guard: Guard) -> None:
        """Stop, and leave modules and loggers as they were. The caller closes the statistics."""
        guard("leave torch's schedules", self._leave_schedules)
        if self._hooks is not None:
            if self._hooks_paused:
                self._hooks.modules.pause(False)
                self._hooks_paused = False
            guard("remove the hooks", self._hooks.__exit__, None, None, None)
            self._hooks = None
        if self._stops is not None:
            guard("end the watch for stops", self._stops.close)
        if self.session is not None:
            self.session.resume()
            guard("end the trace", self.session.stop)
        if self._memory is not None:
            guard("stop counting memory", self._memory.detach)
        if self._log is not None:
            guard("end the log", self._log.remove)

    def switch(self, step: int) -> None:
        """Record this step, or do not, as the sampling says."""
        self.on = self._options.sampling.include(step)
        if self.statistics is not None:
            self.statistics.begin_step(step, observing=self.on)
        if self._log is not None:
            self._log.tasks = self.on
        if self.session is not None:
            if self.on:
                self.session.resume()
            else:
                self.session.pause()
        if self._memory is not None:
            self._memory.switch(step, recorded=self.on)
        self._want_hooks(self.on)
        self._recorded += self.on
        if self._hooks is not None and self._options.trace:
            self._hooks.modules.depth = _ALL_MODULES if self._recorded % _OFTEN == _OFTEN // 2 else 1

    def prepare(self, step: int) -> None:
        """Be ready for a step that may begin with the call of a module."""
        if self._options.sampling.include(step):
            self._want_hooks(True)

    def _want_hooks(self, wanted: bool) -> None:
        """Keep the hooks on modules, which slow down each call, only for steps that are recorded."""
        if self._hooks is not None and wanted == self._hooks_paused:
            self._hooks_paused = not wanted
            self._hooks.modules.pause(not wanted)

    def meet_pipeline(self, pipeline: Pipeline) -> None:
        """Take statistics of a pipeline that is called, and count its memory."""
        if self._memory is not None:
            self._memory.meet_pipeline(pipeline)
        if self.statistics is None:
            return
        if isinstance(pipeline, TorchPipeline):
            for j, module in pipeline.stages.items():
                self.statistics.meet_module(module, f"stage{j}.")
        else:
            self.statistics.meet_pipeline(pipeline)

    def meet_module(self, module: nn.Module) -> None:
        """Take statistics of a module that is called from outside all others, and count its memory."""
        if self._memory is not None:
            self._memory.meet_module(module)
        if self.statistics is not None:
            self.statistics.meet_module(module)

    def flush(self) -> None:
        """Write everything that was recorded so far."""
        if self.session is not None:
            self.session.flush()
        if self.statistics is not None:
            self.statistics.flush()

    @property
    def dropped_events(self) -> int:
        """How many events were lost, or removed to stay within the disk quota."""
        return 0 if self.session is None else self.session.lost + self.session.removed

    @property
    def dropped_lines(self) -> int:
        """How many log lines were lost, or removed to stay within the disk quota."""
        return 0 if self._log is None else self._log.left_out

    def _write_statistics_message(self, level: int, message: str) -> None:
        least = self._options.log_level
        if self._log is not None and least is not None and level >= least:
            self._log.write(level, "pipesight.stats", message, place=f"step {self._counter.number}")
