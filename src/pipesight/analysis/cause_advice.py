"""What to do about the causes that replays find: a slow rank, a slow replica, micro-batches that differ."""

from __future__ import annotations

from collections.abc import Sequence

from pipesight._formatting import rough_percent
from pipesight.analysis.planned_changes import AT_MOST, Change
from pipesight.analysis.slow_causes import Cause, doing
from pipesight.analysis.what_if import WhatIf
from pipesight.plan.plans import WORTH

__all__ = ["changes_by_causes"]


def changes_by_causes(found: WhatIf, *, jitter: float) -> tuple[list[Change], float]:
    """Return changes for tasks that are longer than usual, and what is left of the jitter.

    Stages that are too long, links and collectives have advice of their own.

    ``jitter`` is the share of the step that is lost to tasks that vary. Where replays are in doubt, causes can save no
    more than that.
    """
    changes, left = [], jitter
    for cause in found.causes:
        if (words := _words(cause, found)) is None:
            continue
        saved = cause.share * found.ideal / max(found.replayed, 1e-9)
        gain = saved if found.trusted else min(saved, left)
        changes.append(Change(*words, min(gain, 1.0), AT_MOST))
        left = max(left - saved, 0.0)
    return changes, left


def _words(cause: Cause, found: WhatIf) -> tuple[str, str] | None:
    """Return what to do about a cause, and why."""
    usual = f"takes longer than usual for its stage{doing(cause)}, and others wait for it"
    if cause.kind == "rank":
        return f"check {' and '.join(_names(cause, found))}: its machine, and what else runs there", usual
    if cause.kind == "replica":
        return f"check the machines of data-parallel rank {cause.replica}", usual
    if cause.kind == "microbatches":
        why = "some take longer in all stages"
        ways = (
            ("the same ones, the longest in the middle,", found.reordered),
            ("exchanged among replicas,", found.exchanged),
        )
        for way, step in ways if found.trusted else ():
            if step is not None and (saved := 1 - step / max(found.replayed, 1e-9)) > WORTH:
                why += f"; {way} save {rough_percent(saved)} in a replay"
        return "even micro-batches: batch[pipesight.balance.pack(costs, chunks)]", why
    return None


def _names(cause: Cause, found: WhatIf) -> Sequence[str]:
    if not cause.partitions:
        return [f"rank {rank}" for rank in cause.ranks]
    several = len({worker.partition(":")[0] for worker in found.by_worker}) > 1
    ends = zip(cause.ranks, cause.partitions, strict=True)
    return [f"partition {part}" + f" of rank {rank}" * several for rank, part in ends]
