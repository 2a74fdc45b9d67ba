"""Whether a trace is being written: one switch for all trees of events, and the lock for changes to them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["ALWAYS", "NEVER", "Switch", "changing", "is_recording", "roots", "set_recording"]


class Switch:
    """Tells whether spans that start now are recorded: by an attribute, which costs less than a call."""

    recording = False


ALWAYS = Switch()
"""On while a trace is being written."""
NEVER = Switch()

roots: weakref.WeakSet[Any] = weakref.WeakSet()
"""The roots of all trees, which are nodes."""

_lock = threading.RLock()


def changing() -> threading.RLock:
    """Return the lock to hold while nodes are added, switched or given arguments."""
    return _lock


def is_recording() -> bool:
    """Tell whether a trace is being written."""
    return ALWAYS.recording


def set_recording(on: bool) -> None:
    """Let all enabled nodes record, or none."""
    with changing():
        if ALWAYS.recording == on:
            return
        ALWAYS.recording = on
        for root in list(roots):
            for node in root.subtree():
                node._choose_class()


def _renew_lock() -> None:
    """Replace the lock in a forked process: a thread that exists only in the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
