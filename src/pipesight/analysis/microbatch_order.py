"""What operations would take if micro-batches that differ were in another order, or on other replicas."""

from __future__ import annotations

import numpy as np

from pipesight.analysis.operation_graph import BACKWARD, FORWARD
from pipesight.runs.reading.event_tables import Column, Operations
from pipesight.runs.reading.operation_kinds import KINDS
from pipesight.schedule.packing import longest_inside, pack

__all__ = ["rearranged"]


def rearranged(
    operations: Operations, durations: Column, even: Column, *, chunks: int | None = None, exchange: bool = False
) -> Column | None:
    """Return durations as if the longest micro-batches of each batch came in the middle; see `longest_inside`.

    What a micro-batch takes beyond the mean, in all stages, goes with it; the rest stays where it was.

    ``even`` is the ratio of even micro-batches to these, ``chunks`` the number of them in a batch if a step may have
    several. With ``exchange``, replicas exchange micro-batches before that, so that each has the same work; ``None`` is
    returned if there is one, or if they have different numbers of them.
    """
    rows = np.flatnonzero(np.isin(operations.kind, (FORWARD, BACKWARD)) & (operations.microbatch >= 0))
    own = operations.where(rows)
    longer = (durations * (1 - even))[rows]
    batch = np.zeros(len(rows), np.int64) if chunks is None else own.microbatch // chunks
    names, which = np.unique(np.stack([own.step, batch, own.replica, own.microbatch]), axis=1, return_inverse=True)
    which = which.ravel()
    usual = float((durations[rows] - longer).sum()) / max(names.shape[1], 1)
    length = np.maximum(usual + np.bincount(which, longer, names.shape[1]), 0.0)
    source = np.arange(len(length))
    if exchange:
        for begin, end in _groups(names[:2]):
            replicas, counts = np.unique(names[2, begin:end], return_counts=True)
            if len(replicas) < 2 or (counts != counts[0]).any():
                return None
            source[begin:end] = begin + np.array(pack(length[begin:end], len(replicas)))
    for begin, end in _groups(names[:3]):
        source[begin:end] = source[begin:end][longest_inside(length[source[begin:end]].tolist())]
    part = (np.where(own.part < 0, own.stage, own.part).astype(np.int64) + 1) * len(KINDS) + own.kind
    size = int(part.max(initial=0)) + 1
    code, wanted = which * size + part, source[which] * size + part
    order = np.argsort(code, kind="stable")
    at = order[np.minimum(np.searchsorted(code[order], wanted), max(len(order) - 1, 0))]
    found = durations.copy()
    found[rows] = durations[rows] - longer + np.where(code[at] == wanted, longer[at], longer)
    return found


def _groups(names: Column) -> list[tuple[int, int]]:
    """Return where the columns with the same names begin and end."""
    changes = (np.flatnonzero((np.diff(names) != 0).any(axis=0)) + 1).tolist()
    return list(zip([0, *changes], [*changes, names.shape[1]], strict=True))
