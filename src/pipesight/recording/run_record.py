"""`run.json` of this rank, kept up to date while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipesight.recording.options import RecordingOptions
from pipesight.recording.pipeline_description import Pipeline, PipelineDescription
from pipesight.recording.program_description import ProgramDescription
from pipesight.recording.rank_clocks import RankClocks
from pipesight.runs.description import Description
from pipesight.runs.directory import RunDirectory
from pipesight.runs.disk_quota import DiskQuota

__all__ = ["RunRecord"]

_INTERVAL = 10.0  # seconds between looks at the run's files, at least


class RunRecord:
    """What is known of the run: its pipelines, the clock of this rank, and how much was dropped.

    Args:
        directory: Where it is written.
        options: What is recorded.
        quota: What removes traces that are too much.
        clocks: The clock of this rank, compared with that of rank 0.
        clock_offset: Nanoseconds from the monotonic clock to that of the trace.
        dropped: Returns how many steps, events and log lines were dropped.
    """

    def __init__(
        self,
        directory: RunDirectory,
        options: RecordingOptions,
        quota: DiskQuota,
        clocks: RankClocks,
        *,
        clock_offset: int,
        dropped: Callable[[], dict[str, int]],
    ) -> None:
        self._quota, self._clocks, self._clock_offset, self._dropped = quota, clocks, clock_offset, dropped
        self._pipelines: dict[int, PipelineDescription] = {}
        self._adding = threading.Lock()
        self._program = ProgramDescription()
        self._program.attach()
        versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
        self._description = Description(directory, clock=self._clock(), observed=options.as_json(), versions=versions)

    def write(self) -> None:
        """Write what is known now."""
        self._description.update(
            clock=self._clock(),
            pipelines=[pipeline.as_json() for pipeline in list(self._pipelines.values())],
            program=self._program.as_json(),
            left_out=self._dropped(),
        )

    def write_now_and_then(self) -> None:
        """Write, and enforce the disk quota, unless that was done a moment ago."""
        if time.monotonic() - self._description.written > _INTERVAL:
            self._quota.enforce()
            self.write()

    def add_pipeline(self, pipeline: Pipeline) -> None:
        """Describe a pipeline that is called, and again once a mini-batch has gone through it."""
        known = self._pipelines.get(id(pipeline))
        if known is None:
            with self._adding:
                self._pipelines.setdefault(id(pipeline), PipelineDescription(pipeline))
            self.write()
        elif known.settle():
            self.write()

    def add_module(self, module: nn.Module) -> None:
        """Describe a module that the program calls itself."""
        self._program.meet_module(module)

    def take_off_hooks(self) -> None:
        """Learn no more about the program and its pipelines."""
        self._program.detach()
        with self._adding:
            for pipeline in self._pipelines.values():
                pipeline.settle()
                pipeline.remove()
                pipeline.measure_operators()

    def end(self, outcome: str) -> None:
        """Write that the run has ended, and how."""
        self._description.end(outcome)
        self.write()

    def forget_pipelines(self) -> None:
        """Keep no model alive once the run is over."""
        self._pipelines.clear()

    def _clock(self) -> dict[str, Any]:
        return {"offset_ns": self._clock_offset, **self._clocks.as_json()}
