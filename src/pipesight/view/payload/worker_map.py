"""What the page shows of replays: their figures, and the slowdown of each worker."""

from __future__ import annotations

from typing import Any

from pipesight._plurals import count_of
from pipesight.analysis.what_if import WhatIf

__all__ = ["what_if_of"]

CELLS = 4096
"""The most workers that are drawn: of more, all stages of the data-parallel ranks that slow the job most."""


def what_if_of(found: WhatIf | None) -> dict[str, Any] | None:
    """Return the replays, as the page draws them."""
    if found is None:
        return None
    layout = found.layout
    rows = sorted(range(len(layout.dp_ranks)), key=lambda d: -found.by_dp_rank[layout.dp_ranks[d]])
    shown = sorted(rows[: max(CELLS // len(layout.stages), 1)])
    left = len(rows) - len(shown)
    return {
        "verdict": found.verdict,
        "replayed": found.replayed,
        "ideal": found.ideal,
        "reordered": found.reordered,
        "exchanged": found.exchanged,
        "slowdown": round(found.slowdown, 4),
        "m_w": None if found.m_w is None or not found.is_certain else round(found.m_w, 4),
        "m_s": None if found.m_s is None or not found.is_certain else round(found.m_s, 4),
        "dp_ranks": [layout.dp_ranks[d] for d in shown],
        "stages": list(layout.stages),
        "ranks": [list(layout.ranks[d]) for d in shown],
        "slowdowns": [
            [None if rank is None else round(found.slowdown_of(d, s), 4) for s, rank in enumerate(layout.ranks[d])]
            for d in shown
        ],
        "remarks": list(found.remarks),
        "left": f"{count_of(left, 'more replica')} slowing the job less" if left else "",
    }
