"""Symptoms on one rank of a failure on another: a transport error, or a main thread that waits in a collective.

Neither shows which rank is the cause. ::

    rank 3   killed, in a layer
    rank 2   in a collective of the same layer: "Connection closed by peer"     a symptom
    rank 0   waits for rank 2                                                   the same
"""

from __future__ import annotations

import dis
import re
from types import FrameType
from typing import Any

import torch.distributed as dist

from pipesight._torch.pipelining import COLLECTIVE_FILES, COLLECTIVE_WRAPPER_FILES

__all__ = ["collective_of", "is_late", "is_symptom", "seconds_waited"]

# Errors of gloo about broken connections and timeouts; others, such as sizes that do not match, are no symptoms.
_BROKEN = re.compile(
    r"(closed by peer|reset by peer|closed the connection|caused pair closure|[Bb]roken pipe|[Ss]ocket (unexpectedly )?"
    r"closed|[Tt]imed? ?out|[Cc]onnection refused|[Nn]o route to host|wait timeout)"
)
_GLOO = re.compile(r"gloo|pair\.cc|monitoredBarrier|pair closure", re.IGNORECASE)
_NETWORK: tuple[type[BaseException], ...] = tuple(
    kind for name in ("DistNetworkError", "DistBackendError") if (kind := getattr(dist, name, None)) is not None
)

_WAITS = ("wait", "wait_tensor")


def is_symptom(error: BaseException) -> bool:
    """Return whether an error is due to a broken connection to another rank, or to a timeout."""
    return _transport_error(error) is not None


def is_late(error: BaseException) -> bool:
    """Return whether the symptom is a timeout."""
    found = _transport_error(error)
    return found is not None and re.search(r"imed? ?out", str(found)) is not None


def seconds_waited(error: BaseException) -> float | None:
    """Return how long gloo waited before it gave up, if its error contains that."""
    found = re.search(r"(\d+) ?ms", str(_transport_error(error)))
    return None if found is None else int(found[1]) / 1000


def _transport_error(error: BaseException) -> BaseException | None:
    """Return the transport error that this error is, or was raised from, for example by a layer."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, _NETWORK):
            return current
        if isinstance(current, RuntimeError) and _GLOO.search(str(current)) and _BROKEN.search(str(current)):
            return current
        current = current.__cause__ or current.__context__
    return None


def collective_of(frame: FrameType | None) -> str | None:
    """Return the torch.distributed call that a thread waits in, given its frame, or ``None``."""
    if frame is None:
        return None
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename in COLLECTIVE_WRAPPER_FILES:
        inner = inner.f_back
    name = None
    while inner is not None and inner.f_code.co_filename in (*COLLECTIVE_FILES, *COLLECTIVE_WRAPPER_FILES):
        if inner.f_code.co_filename in COLLECTIVE_FILES:
            name = inner.f_code.co_name
        inner = inner.f_back
    # A wait for a work is a call of C++, which has no frame.
    return name or next((wait for wait in _WAITS if _is_calling(frame, wait)), None)


def _is_calling(frame: FrameType, name: str) -> bool:
    """Return whether the innermost frame is in a call of a method of this name."""
    code, last = frame.f_code, frame.f_lasti
    if name not in code.co_names:
        return False
    instructions = list(dis.get_instructions(code))
    now = next((entry.positions for entry in instructions if entry.offset == last), None)
    if now is None:
        return False
    within = (e.positions for e in instructions if e.offset < last and e.argval == name and e.positions is not None)
    return any(
        _place(p.lineno, p.col_offset) >= _place(now.lineno, now.col_offset)
        and p.end_lineno is not None
        and _place(p.end_lineno, p.end_col_offset) <= _place(now.end_lineno, now.end_col_offset)
        for p in within
    )


def _place(line: Any, column: Any) -> tuple[int, int]:
    return line or 0, column or 0
