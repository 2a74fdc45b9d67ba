"""Spans of a pipeline, by themselves: its tasks, their layers, its transfers, and arrows from task to task.

======================================  =================================================
``forward``, ``backward``               one micro-batch in one partition
``forward.recompute``                   its forward again, for the backward
``forward.layer`` and so on             one layer in it
``transfer``                            tensors from another device
======================================  =================================================

Each carries ``step``, ``partition``, ``microbatch`` and, for layers, ``layer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pipesight.context import Observer, Where
from pipesight.trace._span import Mark, Span, begin, current, end, put, resume
from pipesight.trace.ai import ai
from pipesight.trace.device import DeviceSpan, device_spans
from pipesight.trace.node import Node, is_recording

__all__ = ["PipelineSpans"]

_TASKS: dict[str, Node] = {
    "forward": ai.compute.forward,
    "recompute": ai.compute.forward.derive("recompute"),
    "backward": ai.compute.backward,
}
_LAYERS = {phase: node.derive("layer") for phase, node in _TASKS.items()}


class PipelineSpans(Observer):
    """Records what the engine tells."""

    def __init__(self) -> None:
        # Every worker has a place of its own, and is at one task and one layer at a time.
        self._tasks: dict[Where, _Open] = {}
        self._layers: dict[Where, _Open] = {}
        self._transfers: dict[Where, _Open] = {}

    def wanted(self) -> bool:
        """Whether there is a trace to record for."""
        return is_recording()

    def task_started(self, where: Where) -> None:
        """Begin the task's span, and the arrows from the task before it and to the one after."""
        assert where.phase is not None
        node = _TASKS[where.phase]
        if not node.recording:
            return
        task = self._tasks[where] = _Open(current(), begin(node), _args(where), _begin_on_device(node, where))
        for phase, key in _arrows(where):
            put(Mark(phase, "micro-batch", "pipeline", key), {}, task.span[3])

    def task_ended(self, where: Where) -> None:
        """End the task's span, and that of a layer that raised."""
        self.layer_ended(where)
        self._end(self._tasks.pop(where, None))

    def layer_started(self, where: Where) -> None:
        """Begin the layer's span, inside the task's: the layer runs in the context of whoever called the pipeline."""
        assert where.phase is not None
        task = self._tasks.get(where)
        node = _LAYERS[where.phase]
        if task is None or not node.recording:
            return
        outside = current()
        resume(task.span)
        args = {**task.args, "layer": where.layer}
        self._layers[where] = _Open(outside, begin(node), args, _begin_on_device(node, where))

    def layer_ended(self, where: Where) -> None:
        """End the layer's span."""
        self._end(self._layers.pop(where, None))

    def transfer_started(self, where: Where, source: str, target: str, size: int) -> None:
        """Begin the span of a transfer."""
        node = ai.device.transfer
        if node.recording:
            args = {**_args(where), "from": source, "to": target, "size": size}
            self._transfers[where] = _Open(current(), begin(node), args, None)

    def transfer_ended(self, where: Where, source: str, target: str, size: int) -> None:
        """End it."""
        self._end(self._transfers.pop(where, None))

    def _end(self, opened: _Open | None) -> None:
        if opened is None:
            return
        if opened.on_device is not None:
            device_spans.end(opened.on_device, opened.args)
        end(opened.span, {**opened.span[0].args, **opened.args})
        resume(opened.outside)


class _Open:
    """A span that has begun, and the one around it."""

    __slots__ = ("args", "on_device", "outside", "span")

    def __init__(self, outside: Span, span: Span, args: dict[str, Any], on_device: DeviceSpan | None) -> None:
        self.outside, self.span, self.args, self.on_device = outside, span, args, on_device


def _begin_on_device(node: Node, where: Where) -> DeviceSpan | None:
    return device_spans.begin(node) if where.device is not None and where.device.type == "cuda" else None


def _args(where: Where) -> dict[str, Any]:
    return {"step": where.step, "partition": where.partition, "microbatch": where.microbatch}


def _arrows(where: Where) -> Iterator[tuple[Literal["f", "s"], int]]:
    """Yield the ends of the arrows into and out of a task: a micro-batch's way through the partitions and back."""
    if where.phase == "recompute":
        return
    way = -1 if where.phase == "backward" else 1
    if 0 <= where.partition - way < where.partitions:
        yield "f", _arrow(where, where.partition - way)
    if 0 <= where.partition + way < where.partitions:
        yield "s", _arrow(where, where.partition)


def _arrow(where: Where, source: int) -> int:
    """Return a number for the way of a micro-batch out of a partition; viewers keep 53 bits of it."""
    direction = where.serial % 2**24 * 2 + (where.phase == "backward")
    return (direction * 2**16 + where.microbatch % 2**16) * 2**12 + source % 2**12
