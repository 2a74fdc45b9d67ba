"""Where an exception came from, as a note on it."""

from __future__ import annotations

import bisect
import contextlib
import traceback

from torch.autograd.function import BackwardCFunction

from pipesight.context import Where

__all__ = ["annotate"]


def annotate(error: BaseException, where: Where) -> None:
    """Add a note such as ``in partition 1, layer '2', micro-batch 0, forward``."""
    if where.phase is None:
        note = f"in partition {where.partition}, between tasks"
    else:
        name = where.layer if where.layer is not None else _layer_of_backward(error, where)
        layer = "" if name is None else f", layer '{name}'"
        note = f"in partition {where.partition}{layer}, micro-batch {where.microbatch}, {where.phase}"
    with contextlib.suppress(Exception):  # an exception may refuse attributes, or have an add_note of its own
        # One object may be raised many times; what is left of earlier mini-batches would mislead. A pipeline inside a
        # layer of this one began after it, and its note stays.
        ours: list[tuple[int, str]] = getattr(error, "_pipesight_notes", [])
        for serial, old in ours:
            if serial < where.serial or old == note:
                error.__notes__.remove(old)
        error._pipesight_notes = [*(o for o in ours if o[0] >= where.serial and o[1] != note), (where.serial, note)]  # type: ignore[attr-defined]
        error.add_note(note)


def _layer_of_backward(error: BaseException, where: Where) -> str | None:
    """Return the layer whose backward raised, if Python code did: the traceback holds the node of the graph."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, BackwardCFunction):
            number = node._sequence_nr()
            index = bisect.bisect_right(where.marks, number, key=lambda mark: mark[0]) - 1
            return where.marks[index][1] if index >= 0 else None
    return None
