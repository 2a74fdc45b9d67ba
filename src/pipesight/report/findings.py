"""What stands out in a report, in sentences: the terminal prints them, and the page shows the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesight.report._text import percent, size, time
from pipesight.report.analysis.analysing import Report
from pipesight.report.analysis.links import Link
from pipesight.report.analysis.remarks import Remark
from pipesight.report.analysis.stragglers import Straggler

__all__ = ["Finding", "links_in", "nonfinite_in", "numbers", "remarks_in", "stragglers_in", "warm_up_in"]

STEPS = 12
"""How many steps a sentence names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence, and the steps that it is about."""

    text: str
    steps: tuple[int, ...] = ()


def nonfinite_in(report: Report) -> Finding | None:
    """Name the first tensor that was not finite."""
    found = report.nonfinite
    if found is None:
        return None
    counts = [f"{count:,} {what}" for count, what in ((found.nans, "NaN"), (found.infs, "Inf")) if count]
    text = f"Not finite: {found.tensor} of layer {found.layer} is the first, in {found.where}"
    text += f" ({', '.join(counts)})" if counts else ""
    text += f", on rank {found.rank}" if len(report.ranks) > 1 else ""
    if found.layers > 1 or found.iterations > 1:
        text += f"; {_count(found.layers, 'layer')} then, {_count(found.iterations, 'iteration')} in all"
    return Finding(f"{text}.", (found.iteration,))


def stragglers_in(report: Report) -> list[Finding]:
    """Say who holds the others up, the slowest first."""
    return [_straggler(straggler, ranks=len(report.ranks) > 1) for straggler in report.stragglers]


def links_in(report: Report) -> list[Finding]:
    """Name the links that are slow, or that much is lost to."""
    return [_link(link) for link in report.links if link.notable]


def warm_up_in(report: Report) -> Finding | None:
    """Name the first steps that are in no number but their own."""
    steps = report.left.warm_up
    if not steps:
        return None
    return Finding(f"Left out: {numbers(steps)}, warm-up, which took much longer than the others.", steps)


def remarks_in(report: Report) -> list[Finding]:
    """Say what was left out when the run was recorded or read, and what is in doubt."""
    return [_remark(remark) for remark in report.remarks]


def numbers(steps: Sequence[int]) -> str:
    """Name some steps.

    >>> numbers([3, 4])
    'steps 3, 4'
    """
    shown = ", ".join(str(step) for step in steps[:STEPS])
    more = f" and {len(steps) - STEPS} more" if len(steps) > STEPS else ""
    return f"step{'s' * (len(steps) != 1)} {shown}{more}"


def _straggler(straggler: Straggler, *, ranks: bool) -> Finding:
    who = f"partition {straggler.partition}"
    who = f"rank {straggler.rank}, {who}" if ranks else who
    words = []
    if straggler.slower is not None:
        words.append(f"takes {straggler.slower:.2f} times as long as the same on other ranks, at the median")
    if straggler.bursts:
        words.append(f"takes {straggler.burst:.1f} times its own median in {numbers(straggler.bursts)}")
    return Finding(f"{who} {'; '.join(words)}", straggler.bursts)


def _link(link: Link) -> Finding:
    ends = [(link.source, link.source_host), (link.target, link.target_host)]
    way = " -> ".join(f"rank {rank}" + (f" on {host}" if host is not None else "") for rank, host in ends)
    others = f", others {time(link.others)}" if link.others is not None else ""
    took = f"{time(link.time or 0.0)} for {size(link.size)}{others}"
    return Finding(f"{way}: {took}; costs {percent(link.share)} of the step")


def _remark(remark: Remark) -> Finding:
    return Finding(remark.text if remark.path is None else f"{remark.path}: {remark.text}")


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"
