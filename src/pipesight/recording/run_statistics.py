"""Tensor statistics of a run: models are found when they are called, and steps are those of the run."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesight.recording.pipeline_description import is_pipeline
from pipesight.stats import current_session
from pipesight.stats.api import CheckedConfig, open_session
from pipesight.stats.model_watch import Watch
from pipesight.stats.model_watch.model_part import Model
from pipesight.stats.sinks import Record
from pipesight.stats.stats_session import StatsSession
from pipesight.stats.watched_tensor import Tap
from pipesight.trace import ai

__all__ = ["Config", "RunStatistics"]

Config = str | os.PathLike[str] | Mapping[str, Any]
"""A YAML file, or what it would hold."""


class RunStatistics:
    """Watches every pipeline that is called, and otherwise the outermost module that is called in training.

    ``begin`` is called before a watched model runs, which may begin a step; ``log`` takes messages and their levels.
    """

    def __init__(
        self,
        config: CheckedConfig,
        folder: os.PathLike[str],
        *,
        first: int,
        begin: Callable[[], None],
        log: Callable[[int, str], None],
    ) -> None:
        self._session = open_session(config, log_dir=folder, sinks=[_Nowhere()], log=log)
        self._session.step_count = first
        current_session.of_run = self._session
        if current_session.of_process is not None:
            self._session.merging.set_as(current_session.of_process.merging)
        self._begin = begin
        self._watches: list[_RunWatch] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: set[str] = set()
        self._chosen = False
        self.observing = True
        """Whether the current step is recorded."""
        self._paused = True
        self.trained = False
        """Whether the current step has called a model or stepped an optimizer. If not, it only follows the last one."""

    @property
    def found(self) -> bool:
        """Whether a model is being watched."""
        return bool(self._watches)

    def watch(self, model: Model) -> None:
        """Watch this model, and look for no others."""
        self._chosen = True
        if _module(model) not in self._known:
            self._add(model)

    def meet_pipeline(self, pipeline: Model) -> None:
        """Watch a pipeline, unless it is part of what is watched."""
        if self.observing and not self._chosen and _module(pipeline) not in self._known:
            self._add(pipeline)

    def meet_module(self, module: nn.Module, prefix: str = "") -> None:
        """Watch a module that training calls, unless it is part of what is watched, or holds a pipeline.

        ``prefix`` comes before the names of its layers: modules of other ranks may have the same.
        """
        if self._chosen or not self.observing or module in self._known or not _trains(module):
            return
        pipelines = [inner for inner in module.modules() if is_pipeline(inner)]
        if pipelines and not (len(pipelines) == 1 and _wraps(module, pipelines[0])):
            return  # each is watched when it is called
        self._add(module, prefix)

    def end_step(self) -> None:
        """Log the values of a step."""
        if self.observing and self.trained:
            self.trained = False
            with ai.comm(enable=False):  # merging over ranks is not communication of the program
                self._session.step()

    def part_with_ranks(self) -> None:
        """Log what was measured while the other ranks can still be reached: the program is about to leave them."""
        self.end_step()
        with ai.comm(enable=False):
            self._session.part_with_ranks()

    def begin_step(self, number: int, *, observing: bool) -> None:
        """Begin a step."""
        self.observing, self.trained = observing, False
        self._session.count_from(number)
        for watch in self._watches:
            watch.begin_step()

    def flush(self) -> None:
        """Log what was measured so far."""
        with ai.comm(enable=False):
            self._session.flush()

    def pause(self, begins: bool) -> None:
        """Leave out what follows, which is no training, or end that."""
        if begins:
            self._paused, self.observing = self.observing, False
        else:
            self.observing = self._paused

    def close(self, *, failed: bool) -> None:
        """Log the last step, and remove all hooks; if the run failed, do not wait for other ranks."""
        try:
            if not failed:
                self.end_step()
        finally:
            try:
                while self._watches:
                    self._watches.pop().remove()
            finally:
                if current_session.of_run is self._session:
                    current_session.of_run = None
                self._session.close(alone=failed)

    def _add(self, model: Model, prefix: str = "") -> None:
        watch = _RunWatch(self._session, model, self, self._begin, prefix)
        self._known.update(_module(model).modules())
        self._session.merging.once |= not isinstance(model, nn.Module)
        same = self._names & set(watch.layers)
        if same:
            watch.remove()
            self._session.messages.warning(
                f"a second model, {type(model).__name__}, is not watched: it has layers with the same names as the "
                f"first, such as {min(same)!r}; choose one: run.watch(model)"
            )
            return
        self._names |= set(watch.layers)
        self._watches.append(watch)


class _RunWatch(Watch):
    """A watch whose steps are those of the run."""

    def __init__(
        self, session: StatsSession, model: Model, statistics: RunStatistics, begin: Callable[[], None], prefix: str
    ) -> None:
        self._statistics, self._begin_step = statistics, begin
        super().__init__(session, model, auto_step=True, own=False, prefix=prefix)

    def begin_step(self) -> None:
        """Prepare for a step that has begun."""
        self._prepare()

    def _needs_hooks(self, step: int) -> bool:
        return self._statistics.observing and super()._needs_hooks(step)

    def _before_model(self, *args: object) -> None:
        self._begin_step()
        super()._before_model(*args)

    def _counts(self) -> bool:
        counts = self._statistics.observing and super()._counts()
        self._statistics.trained |= counts
        return counts

    def _wants(self, tap: Tap) -> bool:
        return self._statistics.observing and super()._wants(tap)

    def log(self, tap: Tap, tensors: Sequence[Tensor]) -> None:
        if self._statistics.observing:
            super().log(tap, tensors)

    def _log_weights(self, weights: list[tuple[str, str, Tensor]], early: bool) -> None:
        if self._statistics.observing and (self._part.is_first or not self._part.alike):
            super()._log_weights(weights, early)

    def _begin(self) -> None:
        """Do nothing: the run knows when a step begins."""

    def _after_optimizer(self) -> None:
        """Remember that the step has trained; the run knows when it has ended."""
        self._statistics.trained = True


class _Nowhere:
    """A sink that drops everything, in place of the text log that a run directory does not have."""

    def write(self, records: Sequence[Record]) -> None:
        """Take records."""

    def close(self) -> None:
        """Do nothing."""


def _module(model: Model) -> nn.Module:
    return model if isinstance(model, nn.Module) else model.module


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _wraps(module: nn.Module, pipeline: nn.Module) -> bool:
    """Return whether a module only wraps a pipeline, as ``DistributedDataParallel`` does."""
    while module is not pipeline:
        children = list(module.children())
        if len(children) != 1 or any(True for _ in module.parameters(recurse=False)):
            return False
        module = children[0]
    return True
