"""A session: a configuration, its features, where values go, and the step counter."""

from __future__ import annotations

import atexit
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight import context
from pipesight._torch.tensors import in_transform, is_capturing_stream, is_transformed
from pipesight.context import Where
from pipesight.stats.actions import Action, TensorActions, action_for, actions_for
from pipesight.stats.config import Config
from pipesight.stats.config.rules import StatisticRequest, TensorRule
from pipesight.stats.config.steps import steps_of
from pipesight.stats.current_session import serving
from pipesight.stats.iteration_buffer import IterationBuffer
from pipesight.stats.measurements import Statistics
from pipesight.stats.measuring_feature import MeasuringFeature
from pipesight.stats.message_log import MessageLog
from pipesight.stats.moments._flat_pieces import ORDINARY
from pipesight.stats.moments.cuda_launch import QUICK, has_kernels
from pipesight.stats.moments.cuda_moments import is_capturing, is_quick
from pipesight.stats.moments.delayed_scaling import DelayedScaling
from pipesight.stats.moments.moments import LaterMoments
from pipesight.stats.moments.quantity import Source
from pipesight.stats.moments.shards import local_part
from pipesight.stats.nonfinite import Layers, Spot
from pipesight.stats.nonfinite_reporter import FirstRank, NonfiniteReporter
from pipesight.stats.rank_merging import RankMerging
from pipesight.stats.recomputation import is_recomputing
from pipesight.stats.registry import Registry
from pipesight.stats.sinks import Sinks
from pipesight.stats.watched_tensor import Series, Tap, Trial

__all__ = ["StatsSession"]

on_gpu = attrgetter("is_cuda")
CUDA = torch.device("cuda")

MOST_TENSORS = 100_000

TensorKey = tuple[str, str, str | None]


class StatsSession:
    """Measures what the configuration selects, and logs it. Made by ``initialize`` and ``watch``.

    Args:
        config: What to log.
        registry: The features.
        sinks: Where values go.
        messages: The general log.
        folder: Where bad tensors are dumped.
        rank: Of this process.
        step: The number of the first step.
        timeout: Seconds to wait for other ranks.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        sinks: Sinks,
        messages: MessageLog,
        *,
        folder: Path,
        rank: int = 0,
        step: int = 0,
        timeout: float = 300.0,
    ) -> None:
        self.config, self.registry, self.sinks, self.messages = config, registry, sinks, messages
        self.step_count = step
        self.merging = RankMerging(config, timeout=timeout)
        self.before_step: list[Callable[[], None]] = []
        """Called before the values of a step are logged."""
        self.after_step: list[Callable[[], None]] = []
        """Called when a step has ended and the next one is counted."""
        self.before_close: list[Callable[[], None]] = []
        """Called before the session ends."""
        self.met = False
        """Whether a tensor has come that the configuration selects at its step."""
        self._told_of_capture = False
        self._reporter = NonfiniteReporter(messages.warning, messages.info, folder, rank, first_rank=FirstRank())
        self._pending = IterationBuffer(self.merging, sinks, messages, self._reporter)
        self._devices, self._numbers = self._pending.devices, self._pending.numbers
        self._actions_of: dict[TensorKey, TensorActions | None] = {}
        self._actions: dict[tuple[Any, ...], Action] = {}
        self._delayed = DelayedScaling()
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    def actions_of(self, layer: str, tensor: str, gemm: str | None = None) -> TensorActions | None:
        """Return what the configuration says of a tensor."""
        key = (layer, tensor, gemm)
        try:
            return self._actions_of[key]
        except KeyError:
            if len(self._actions_of) >= MOST_TENSORS:  # names that are made up anew in each step
                self._actions_of.clear()
            actions = self._actions_of[key] = actions_for(self.config, self.registry, *key)
            return actions

    def log_tensor_stats(
        self,
        layer_name: str,
        tensor: Tensor,
        tensor_name: str,
        iteration: int | None = None,
        skip_reduction: bool = False,
        reduction_group: dist.ProcessGroup | None = None,
        gemm: str | None = None,
        early: bool = False,
    ) -> Mapping[str, Any]:
        """Measure a tensor, if the configuration says so; see `pipesight.stats.log_tensor_stats`."""
        try:
            actions = self._actions_of[layer_name, tensor_name, gemm]
        except KeyError:
            actions = self.actions_of(layer_name, tensor_name, gemm)
        step = self.step_count if iteration is None else self._turn_to(iteration)
        if actions is None:
            return {}
        action = actions.at(step)
        if action is None or is_recomputing() or self.is_captured():
            return {}
        self.met = True
        results: dict[str, Any] = {}
        for serve, rule in action.custom:
            with serving(self):
                served = serve(
                    rule.options,
                    layer_name,
                    tensor=tensor,
                    tensor_name=tensor_name,
                    iteration=step,
                    skip_reduction=skip_reduction,
                    reduction_group=reduction_group,
                )
            results.update(served if isinstance(served, Mapping) else {})
        if not action.sources:
            return results
        name = tensor_name if gemm is None else f"{gemm}_{tensor_name}"
        records = self._collect(layer_name, name, tensor, step, action, skip_reduction, reduction_group, early)
        statistics = Statistics(action, records)
        return {**results, **statistics} if results else statistics

    def _turn_to(self, iteration: int) -> int:
        """Log what there is if the iteration is a new one; on all ranks, whatever their layers are."""
        iteration = operator.index(iteration)
        if iteration != self._pending.iteration and not is_capturing():
            self._pending.turn_to(iteration)
        return iteration

    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured: what measures and reads back would break or become part of it."""
        capturing = is_capturing()
        if capturing and not self._told_of_capture:
            self.met = self._told_of_capture = True
            self.messages.warning(
                "nothing is measured while a CUDA graph is captured, nor when it is replayed; "
                "to log statistics, run some steps without the graph"
            )
        return capturing

    def wants(self, tap: Tap) -> bool:
        """Whether a tensor is to be measured in the current step."""
        if tap.step != self.step_count or tap.entries is not self._pending.entries:
            self._prepare(tap)
        return tap.action is not None

    def measure_quickly(self, tap: Tap, tensor: Tensor) -> bool:
        """Measure a tensor as `log_tensor_stats` does, if that takes a kernel or a copy alone; else return False."""
        if not self._prepare_quickly(tap):
            return False
        where = context.current()
        if not on_gpu(tensor):
            return not self.is_captured() and self._take_small(tensor, self._pending.series(tap), where, tap)
        if tensor.dtype not in QUICK or type(tensor) not in ORDINARY or is_transformed(tensor) or not has_kernels(CUDA):
            return False
        if is_capturing_stream():
            return self.is_captured()
        rows = self._pending.rows(tensor.get_device())
        if tap.waits:
            return rows.measure_later(tensor, self._pending.stand(tap, rows.measure_later), where)
        if not is_quick(tensor):
            return False
        number = next(self._numbers)
        spot = number if where is None else (number, where.partition, where.microbatch, where.phase)
        row = rows.measure_quickly(tensor, tap.powers)
        assert tap.entry is not None
        tap.entry.calls.append(((row,), spot))
        if tap.trial is not None and tap.trial.step == tap.step:
            tap.trial.at_once.append(row)
            rows.measure_later(tensor, tap.trial, where)
        return True

    def _take_small(self, tensor: Tensor, series: Series, where: Where | None, stands: Tap | None = None) -> bool:
        """Copy a tensor of a pipeline's task, to be measured with others, if it is small; else return False."""
        row = None if where is None else self._pending.small(tensor, series.action.sources[0])
        if row is None or where is None:
            return False
        series.calls.append(((row,), (next(self._numbers), where.partition, where.microbatch, where.phase)))
        if stands is not None:
            self._pending.stand(stands, self._take_small)
        return True

    def _prepare_quickly(self, tap: Tap) -> bool:
        """Look up what there is to do with a tensor in this step; return whether one kernel does it."""
        if not self.wants(tap) or not tap.quick or tap.action is None:
            return False
        if tap.entry is None:
            tap.entry = self._pending.entry(tap.layer, tap.tensor, tap.step, tap.action, None)
            tap.entries = self._pending.entries
            self.met = True
        return True

    def count_from(self, step: int) -> None:
        """Give the step under way another number."""
        if step != self.step_count:
            self.step_count = step
            self.prepare_anew()

    def prepare_anew(self) -> None:
        """Look up again what there is to do with each tensor: the step is another one, or a watch has ended."""
        self._pending.prepare_anew()

    def measure_waiting(self, *, here: bool = False) -> None:
        """Measure what waits to be measured together, on the current stream or on all, before it can change."""
        if not self.is_captured():  # what waits is of an earlier step, and must not become part of the graph
            self._pending.measure_waiting(here=here)

    def _prepare(self, tap: Tap) -> None:
        """Look up what there is to do with a tensor in the step that has begun."""
        tap.actions = actions = self.actions_of(tap.layer, tap.tensor)
        tap.step, tap.entries, tap.entry = self.step_count, self._pending.entries, None
        tap.action = action = actions.at(tap.step) if actions else None
        tap.quick = False
        if action is not None:
            tap.powers = action.sources[0].powers if action.sources else False
            if tap.waits is None and (tap.trial is None or not tap.trial.at_once):
                tap.trial = Trial(tap.step, tap.powers)
            elif tap.trial is not None and tap.trial.ready:
                tap.waits, tap.trial = tap.trial.passed, None
            if tap.waits and (tap.layer, tap.tensor) in self._pending.at_once:
                tap.waits = False
            tap.quick = (
                len(action.sources) == 1
                and not action.custom
                and action.on_nonfinite <= {"warn"}
                and self.merging.group_for(None, tap.layer) is None
            )

    @property
    def layers(self) -> Layers:
        """The layers of the models that are watched."""
        return self._pending.layers

    def log_many(
        self, tensors: Sequence[tuple[str, str, Tensor]], *, skip_reduction: bool = False, early: bool = False
    ) -> None:
        """Measure tensors, given as layer, name and tensor, as `log_tensor_stats` does; those of a device at once.

        Args:
            tensors: Weights or their gradients.
            skip_reduction: Log what this rank has.
            early: They are as they were before the forward.
        """
        together: dict[tuple[torch.device, bool], list[tuple[str, str, Tensor, Action]]] = {}
        for layer, name, tensor in tensors:
            actions = self.actions_of(layer, name)
            action = actions.at(self.step_count) if actions else None
            if action is None:
                continue
            if self.is_captured():
                return
            self.met = True
            if tensor.is_cuda and has_kernels(tensor.device) and not action.custom and type(tensor) in ORDINARY:
                key = (tensor.device, action.sources[0].powers)
                together.setdefault(key, []).append((layer, name, tensor, action))
            else:
                self.log_tensor_stats(layer, tensor, name, skip_reduction=skip_reduction, early=early)
        for (device, powers), members in together.items():
            rows = self._pending.rows(device.index).measure([tensor for _, _, tensor, _ in members], powers=powers)
            for (layer, name, tensor, action), row in zip(members, rows, strict=True):
                spot = self._pending.spot(early=early)
                records = [row, *self._measure(action.sources[1:], layer, name, self.step_count, tensor)]
                group = self.merging.group_for(None, layer, skip=skip_reduction)
                self._pending.keep(layer, name, self.step_count, action, group, records, spot)
                self._look(row, layer, name, self.step_count, spot, action, tensor)

    def collect_by(
        self,
        feature: MeasuringFeature,
        config: Mapping[str, Any],
        layer_name: str,
        *,
        tensor: Tensor,
        tensor_name: str,
        iteration: int | None = None,
        skip_reduction: bool = False,
        reduction_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> Mapping[str, Any]:
        """Measure a tensor by the settings of a feature, if they select the step."""
        step = self.step_count if iteration is None else self._turn_to(iteration)
        if not steps_of(config, inclusive=feature.inclusive).includes(step) or is_recomputing() or self.is_captured():
            return {}
        self.met = True
        stats = feature.requests(tuple(_request(entry) for entry in config.get("stats", ())), tensor_name)
        key = (stats, config.get("on_nonfinite"), tensor_name == "weight")
        action = self._actions.get(key)
        if action is None:
            rule = TensorRule(stats, on_nonfinite=config.get("on_nonfinite"))
            action = self._actions[key] = action_for([(rule, None)], tensor_name)
        records = self._collect(layer_name, tensor_name, tensor, step, action, skip_reduction, reduction_group)
        return Statistics(action, records)

    def _collect(
        self,
        layer: str,
        name: str,
        tensor: Tensor,
        step: int,
        action: Action,
        skip_reduction: bool,
        reduction_group: dist.ProcessGroup | None,
        early: bool = False,
    ) -> list[Any]:
        """Measure a tensor, and keep what was measured until the step ends; return a record a source."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a tensor (got {type(tensor).__name__}); pass torch.as_tensor(x)")
        if in_transform():
            raise TypeError("statistics cannot be logged inside a torch.func transform; log them outside it")
        group = self.merging.group_for(reduction_group, layer, skip=skip_reduction)
        part = local_part(tensor, None if group is None else dist.get_process_group_ranks(group))
        sources, spot = action.sources, self._pending.spot(early=early)
        if part.tensor.is_cuda and has_kernels(part.tensor.device):
            first: Any = self._pending.rows(part.tensor.get_device()).measure_one(part.tensor, powers=sources[0].powers)
        else:
            busy = context.current() is not None  # a worker of a pipeline, beside others
            first = self._pending.small(part.tensor, sources[0]) if busy and action.on_nonfinite <= {"warn"} else None
            if first is None:
                first = sources[0].measure(part.tensor)
        records = [first, *self._measure(sources[1:], layer, name, step, part.tensor)]
        self._pending.keep(layer, name, step, action, group, records if part.counts or group is None else None, spot)
        self._look(first, layer, name, step, spot, action, part.tensor)
        return records

    def _measure(self, sources: Sequence[Source], layer: str, name: str, step: int, tensor: Tensor) -> list[Any]:
        """Return a record a source, for those whose tensors are read as they come."""
        return [
            source.measure(tensor)
            if source.delayed is None
            else self._delayed.measure((layer, name, source.key), step, tensor, format=source.delayed)
            for source in sources
        ]

    def _look(self, record: Any, layer: str, name: str, step: int, spot: Spot, action: Action, tensor: Tensor) -> None:
        """Look for NaN and Inf at once, unless a warning is all that is asked for: that waits until the step ends."""
        if action.on_nonfinite <= {"warn"}:
            return
        moments = record.moments() if isinstance(record, LaterMoments) else record
        if moments.nans or moments.infs:
            self._pending.look(self.layers.bad(layer, name, step, spot, moments), action.on_nonfinite, tensor)

    def step(self) -> None:
        """End a step: merge what was measured, log it, and count on. While a CUDA graph is captured, do nothing."""
        if self.closed or self.is_captured():
            return
        try:
            for before in list(self.before_step):
                before()
            self._pending.end(self.step_count)
        finally:
            self.step_count += 1
        self._pending.begin(self.step_count)
        for after in list(self.after_step):
            after()

    def forget_config(self) -> None:
        """Select nothing from now on."""
        self.config = Config()
        self._actions_of.clear()
        self.prepare_anew()

    def flush(self) -> None:
        """Log what was measured so far, and wait for it."""
        self._pending.flush()

    def part_with_ranks(self) -> None:
        """Log what there is while the other ranks are there, and let go of them."""
        self._pending.read()
        self._reporter.part_with_ranks()
        self.merging.close()

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return isinstance(self._actions_of, _NoActions)

    def close(self, *, alone: bool = False) -> None:
        """Log what is left and close everything. A closed session measures nothing more.

        Args:
            alone: Whether other ranks may be gone, so that nothing can be merged with them.
        """
        if self.closed:
            return
        atexit.unregister(self._close_at_exit)
        try:
            try:
                for before in list(self.before_close):
                    before()
            finally:
                self._actions_of = _NoActions()
                (self._pending.flush_alone if alone else self._pending.flush)()
                self.prepare_anew()
                self._reporter.close()
        finally:
            self.merging.close()
            self.sinks.close()
            self.messages.close()

    def _close_at_exit(self) -> None:
        """Save what a script that never closed the session has measured; a forked child leaves that to its parent."""
        if os.getpid() == self._process:
            self.close(alone=True)


class _NoActions(dict[TensorKey, TensorActions | None]):
    def __missing__(self, key: TensorKey) -> None:
        return None


def _request(entry: str | Mapping[str, Any]) -> StatisticRequest:
    if isinstance(entry, str):
        return StatisticRequest(entry)
    ((name, options),) = entry.items()
    return StatisticRequest(name, tuple(options.items()))
