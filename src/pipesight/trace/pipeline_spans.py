"""The spans of pipelines: tasks, their layers, transfers, and arrows from task to task.

======================================  =================================================
``forward``, ``backward``               one micro-batch in one partition
``forward.recompute``                   its forward again, for the backward
``backward.weight``                     the gradients of its weights, where a schedule computes them separately
``forward.layer`` and so on             one layer in it
``transfer``                            tensors from another device
======================================  =================================================

Each carries ``step``, ``minibatch`` (its number in the process), ``partition``, ``microbatch`` and, for layers,
``layer``; forwards of partition 0 also carry ``samples``, how many the mini-batch has. There are many of these spans,
and workers wait while they are recorded, so little is done here: arguments stay a tuple, `_span_events.Place`,
which the encoder thread turns into text.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pipesight.context import Observer, Where
from pipesight.trace import _span_events
from pipesight.trace._pipeline_lines import carried
from pipesight.trace._recording_switch import is_recording
from pipesight.trace._span_events import (
    BACKLOG_MASK,
    EVENTS,
    ROOT_ID,
    Span,
    begin,
    current,
    end,
    next_id,
    now,
    on_loss,
    on_pass,
    resume,
)
from pipesight.trace.ai import ai
from pipesight.trace.gpu_spans import DeviceTask, device_spans, is_capturing
from pipesight.trace.node import Node

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PipelineSpans"]

_TASKS: dict[str | None, Node] = {
    "forward": ai.compute.forward,
    "recompute": ai.compute.forward.derive("recompute"),
    "backward": ai.compute.backward,
    "weight": ai.compute.backward.derive("weight"),
}
_LAYERS = {phase: node.derive("layer") for phase, node in _TASKS.items()}
_WAYS = {"forward": 1, "recompute": 0, "backward": -1, "weight": 0}
_add = EVENTS.extend


class _Track:
    """The open spans of one worker."""

    __slots__ = ("layer", "on_device", "outside", "root", "task", "thread", "transfer", "way")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.root: Span = (None, ROOT_ID, None, 0, 1, self.thread)
        self.task: Span | None = None
        self.layer: Span | None = None
        self.outside: Span = self.root  # the span of the pipeline's caller, which is open around layers
        self.transfer: Span | None = None
        self.on_device: DeviceTask | None = None
        self.way = 0
        _span_events.adopt(self.root)


def _track_of(where: Where) -> _Track:
    track: _Track | None = where.track
    thread = where.thread or threading.get_ident()
    if track is None or track.thread != thread:
        track = where.track = _Track(thread)
    return track


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.outside: list[Span] = []  # the spans that passes were called in


_here = _PerThread()


class PipelineSpans(Observer):
    """Records the tasks, layers and transfers of pipelines while a trace is being written."""

    def wanted(self) -> bool:
        """Return whether a trace is being written, and no CUDA graph captured."""
        return is_recording() and not is_capturing()

    def pass_started(self) -> None:
        """Notify `on_pass`: from now on the pipeline calls the modules."""
        _here.outside.append(current())
        for begun in on_pass:
            begun(True)

    def pass_ended(self) -> None:
        """Notify `on_pass`, and return to the span that the pass was called in: tasks may have run in its context."""
        if _here.outside:
            resume(_here.outside.pop())
        for begun in on_pass:
            begun(False)

    def step_ended(self, loss: Tensor) -> None:
        """Notify `on_loss`."""
        for told in on_loss:
            told(loss)

    def task_started(self, where: Where) -> None:
        """Begin the task's span."""
        track = _track_of(where)
        node = _TASKS[where.phase]
        if not node.recording:
            track.task = None
            return
        assert where.phase is not None
        track.way = _WAYS[where.phase]
        track.layer = None
        track.task = (node, next_id(), track.root, now(), 2, track.thread)
        track.on_device = None if where.stream is None else device_spans.begin_task(where.stream)

    def task_ended(self, where: Where) -> None:
        """End the task's span, and that of a layer that has raised."""
        moment = now()
        track: _Track | None = where.track
        if track is None or track.task is None:
            return
        if track.layer is not None:
            self.layer_ended(where)
        node, number, _, start, _, thread = track.task
        track.task = None
        resume(track.root)
        where_it_was = (where.step, where.serial, where.partition, where.microbatch, None, where.partitions, where.pipe)
        counts = where.partition == 0 and where.phase == "forward"
        known = carried(node, {"samples": where.samples}) if counts else node.args
        _add((node, number, ROOT_ID, start, moment, 2, thread, (known, track.way, *where_it_was)))
        if track.on_device is not None:
            device_spans.end_task(track.on_device, node, where_it_was, more=track.way < 0)
        if not number & BACKLOG_MASK:
            _span_events.check_backlog()

    def layer_started(self, where: Where) -> None:
        """Begin the layer's span inside the task's, although the layer runs in the context of the pipeline's caller."""
        track: _Track | None = where.track
        if track is None or (task := track.task) is None:
            return
        node = _LAYERS[where.phase]
        if not node.recording:
            return
        if track.layer is None:  # else it starts again, because it could not be checkpointed
            track.outside = current()
        if track.on_device is not None:
            track.on_device.begin_layer()
        span = track.layer = (node, next_id(), task, now(), 3, task[5])
        resume(span)

    def layer_ended(self, where: Where) -> None:
        """End the layer's span."""
        moment = now()
        track: _Track | None = where.track
        if track is None or (layer := track.layer) is None:
            return
        track.layer = None
        resume(track.outside)
        node, number, task, start, _, thread = layer
        place = (node.args, 0, where.step, where.serial, where.partition, where.microbatch, where.layer, 0, 0)
        _add((node, number, task[1], start, moment, 3, thread, place))
        if track.on_device is not None:
            track.on_device.end_layer(node, place[2:])

    def transfer_started(self, where: Where, source: str, target: str, size: int) -> None:
        """Begin the span of a transfer."""
        track = _track_of(where)
        resume(track.root)
        track.transfer = begin(ai.device.transfer) if ai.device.transfer.recording else None

    def transfer_ended(self, where: Where, source: str, target: str, size: int) -> None:
        """End the span of a transfer."""
        track: _Track | None = where.track
        if track is None or track.transfer is None:
            return
        span, track.transfer = track.transfer, None
        known = carried(ai.device.transfer, {"from": source, "to": target, "size": size})
        end(span, (known, 0, where.step, where.serial, where.partition, where.microbatch, None, 0, 0))
