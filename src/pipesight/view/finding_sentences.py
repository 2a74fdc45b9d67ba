"""Findings of a report as sentences, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesight._formatting import percent, rough_percent, size, time
from pipesight._plurals import count_of, plural
from pipesight.analysis.collectives import Collective
from pipesight.analysis.rank_links import LinkReport
from pipesight.analysis.rank_waits import LateRank
from pipesight.analysis.report import Report
from pipesight.analysis.run_remarks import Remark, doing_title
from pipesight.analysis.stragglers import Straggler

__all__ = [
    "Finding",
    "finding_groups",
    "nonfinite_in",
    "numbers",
    "remarks_in",
    "warm_up_in",
]

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
    text = f"First non-finite tensor: {found.tensor} of layer {found.layer}, in {found.where}"
    text += f" ({', '.join(counts)})" if counts else ""
    text += f", on rank {found.rank}" if len(report.ranks) > 1 else ""
    if found.layers > 1 or found.iterations > 1:
        text += (
            f"; {count_of(found.layers, 'layer')} in that iteration, {count_of(found.iterations, 'iteration')} in total"
        )
    return Finding(f"{text}.", (found.iteration,))


def _pace_in(report: Report) -> list[Finding]:
    """Say since when steps take longer."""
    return [] if report.pace is None else [Finding(report.pace.text, (report.pace.since,))]


def _stragglers_in(report: Report) -> list[Finding]:
    """Name the ranks that delay the others, the slowest first."""
    return [_straggler(straggler, ranks=len(report.ranks) > 1) for straggler in report.stragglers]


def _links_in(report: Report) -> list[Finding]:
    """Name the links that are slow, or that much is lost to."""
    return [_link(link) for link in report.links if link.notable]


def _messages_in(links: Sequence[LinkReport]) -> list[Finding]:
    """Sum up all messages between ranks."""
    if not links:
        return []
    count, moved = sum(link.messages for link in links), sum(link.bytes for link in links)
    text = f"{count_of(count, 'message')} of {size(moved)} in total over {count_of(len(links), 'link')}"
    timed = [link for link in links if link.bandwidth is not None]
    if timed:
        slow, fast = (size(of(link.bandwidth or 0.0 for link in timed)) for of in (min, max))
        text += f", {slow}/s" if slow == fast else f", {slow}/s to {fast}/s"
    known = [link for link in links if link.overlap is not None]
    if known:
        weight = sum(link.messages for link in known)
        hidden = sum((link.overlap or 0.0) * link.messages for link in known) / weight
        text += f"; nobody waits for {rough_percent(hidden)} of their time on the way"
    return [Finding(text)]


def _held_in(report: Report) -> list[Finding]:
    """Say which ranks keep others waiting, and what they do meanwhile."""
    return [_held(held) for held in report.held]


def _collectives_in(report: Report) -> list[Finding]:
    """Name the collectives: their group, size, and the rank that arrives last."""
    return [_collective(collective) for collective in report.collectives]


def finding_groups(report: Report) -> list[tuple[str, list[Finding]]]:
    """Return what stands out, heading by heading, without the remarks."""
    groups = (
        ("Change of pace", _pace_in(report)),
        ("Stragglers", _stragglers_in(report)),
        ("Waits for one rank", _held_in(report)),
        ("Links", _links_in(report)),
        ("Collectives", _collectives_in(report)),
        ("Messages", _messages_in(report.links)),
    )
    return [(title, findings) for title, findings in groups if findings]


def warm_up_in(report: Report) -> Finding | None:
    """Name the steps that are excluded as warm-up."""
    steps = report.left.warm_up
    if not steps:
        return None
    return Finding(f"Excluded as warm-up: {numbers(steps)}, much slower than the rest.", steps)


def remarks_in(report: Report) -> list[Finding]:
    """Say what was not recorded, could not be read, or is in doubt."""
    return [_remark(remark) for remark in report.remarks]


def numbers(steps: Sequence[int]) -> str:
    """Name some steps.

    >>> numbers([3, 4])
    'steps 3, 4'
    """
    shown = ", ".join(str(step) for step in steps[:STEPS])
    more = f" and {len(steps) - STEPS} more" if len(steps) > STEPS else ""
    return f"{plural(len(steps), 'step')} {shown}{more}"


def _straggler(straggler: Straggler, *, ranks: bool) -> Finding:
    who = f"partition {straggler.partition}"
    who = f"rank {straggler.rank}, {who}" if ranks else who
    words = []
    if straggler.slower is not None:
        words.append(f"takes {straggler.slower:.2f} times as long as on other ranks (median)")
    if straggler.bursts:
        words.append(f"takes {straggler.burst:.1f} times its own median in {numbers(straggler.bursts)}")
    return Finding(f"{who} {'; '.join(words)}", straggler.bursts)


def _link(link: LinkReport) -> Finding:
    ends = [(link.source, link.source_host), (link.target, link.target_host)]
    way = " -> ".join(f"rank {rank}" + (f" on {host}" if host is not None else "") for rank, host in ends)
    others = f", others {time(link.others)}" if link.others is not None else ""
    took = f"{time(link.time or 0.0)} for {size(link.size)}{others}"
    return Finding(f"{way}: {took}; costs {percent(link.share)} of the step")


def _held(held: LateRank) -> Finding:
    who = f"{plural(len(held.ranks), 'rank')} {ranks_named(held.ranks)}"
    wait = f"{time(held.wait)}, {percent(held.share)} of the mean step"
    return Finding(f"rank {held.rank}: {doing_title(held.doing)} keeps {who} waiting {wait}")


def _collective(collective: Collective) -> Finding:
    moved = f" of {size(collective.bytes)}" if collective.bytes >= 0 else ""
    text = (
        f"{collective.name}{moved} among ranks {ranks_named(collective.ranks)}: {count_of(collective.calls, 'call')}, "
    )
    text += f"{time(collective.time)} each"
    text += f" ({size(collective.bandwidth)}/s)" if collective.bandwidth is not None else ""
    text += f", {percent(collective.overlap)} of it in the background" if collective.overlap >= 0.0005 else ""
    if collective.last is not None:
        share = f"{collective.last_share:.0%} of the time"
        text += f", after {time(collective.wait)} of waiting; rank {collective.last} arrived last {share}"
    return Finding(text)


def ranks_named(ranks: Sequence[int]) -> str:
    """Name some ranks, those in a row as a range.

    >>> ranks_named([0, 1, 2, 5])
    '0-2, 5'
    """
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rows[-1][-1] == rank - 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    parts = [str(row[0]) if len(row) == 1 else f"{row[0]}{', ' if len(row) == 2 else '-'}{row[-1]}" for row in rows]
    return ", ".join(parts)


def _remark(remark: Remark) -> Finding:
    return Finding(remark.text if remark.path is None else f"{remark.path}: {remark.text}")
