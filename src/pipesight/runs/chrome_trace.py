"""Traces of a run as one JSON object, ``{"traceEvents": [...]}``, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pipesight.runs.format import rank_in
from pipesight.runs.reading.descriptions import read_ranks, shifts_of
from pipesight.runs.reading.profiler_trace import ProfilerTrace
from pipesight.runs.reading.trace_reader import NotATraceError, TraceReader

__all__ = ["chrome_trace"]


def chrome_trace(
    readers: Iterable[TraceReader | ProfilerTrace], run: Path, *, skip_unreadable: bool = False
) -> Iterator[bytes]:
    """Yield the object piece by piece, with all times by the clock of rank 0.

    ``run`` is the run directory, which says how the clocks of the ranks differ, or else the folder or file. With
    ``skip_unreadable``, files that turn out not to be traces, or that cannot be read, are left out.

    Raises:
        NotATraceError: A file is not a trace.
        OSError: A file cannot be read.
    """
    shifts = shifts_of({}, read_ranks(run))
    before = b'{"traceEvents":[\n'
    for reader in readers:
        rank = rank_in(reader.path.name)
        shift = None if rank is None else shifts.get(rank)
        try:
            for line in reader:
                yield before + (line if shift is None else shift.apply_to(line))
                before = b",\n"
        except (NotATraceError, OSError):
            if not skip_unreadable:
                raise
    yield b"\n]}\n" if before == b",\n" else before + b"]}\n"
