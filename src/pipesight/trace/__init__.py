"""Trace a training program into a file that Perfetto and DFTracer's tools open.

Example::

    import pipesight.trace as trace

    with trace.start("trace.pfw.gz"), trace.instrument():  # what PyTorch does
        for batch in trace.ai.dataloader.fetch.iter(loader):  # what you annotate
            with trace.ai.compute.step:
                train_step(batch)

Events have the names of DFTracer's ``ai`` conventions; `ai` is the tree of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipesight.context import attach
from pipesight.trace._compile import prepare_for_compiler
from pipesight.trace.ai import ai
from pipesight.trace.node import Node
from pipesight.trace.pipeline_spans import PipelineSpans
from pipesight.trace.point_events import counter, instant
from pipesight.trace.trace_session import Session, flush, start, start_if_asked, stop
from pipesight.trace.use import Use

if TYPE_CHECKING:
    from pipesight.trace.automatic import instrument

__all__ = ["Node", "Session", "Use", "ai", "counter", "flush", "instant", "instrument", "start", "stop"]


def __getattr__(name: str) -> Any:
    if name != "instrument":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipesight.trace.automatic import instrument  # it imports torch

    return instrument


def __dir__() -> list[str]:
    return __all__


attach(PipelineSpans())
prepare_for_compiler()
start_if_asked()
