"""What ranks send each other, as the page lists it: collectives and messages."""

from __future__ import annotations

from typing import Any

from pipesight.analysis.report import Report
from pipesight.view.finding_sentences import ranks_named

__all__ = ["traffic_of"]

ROWS = 200
"""The most collectives, and the most links, that the page lists: those that cost most."""


def traffic_of(report: Report) -> dict[str, Any] | None:
    """Return the collectives of ranks and the links between them; ``None`` if there are none."""
    if not report.collectives and not report.links:
        return None
    return {
        "collectives": [
            {
                "name": one.name,
                "ranks": ranks_named(one.ranks),
                "calls": one.calls,
                "bytes": one.bytes if one.bytes >= 0 else None,
                "time": one.time,
                "wait": one.wait if one.last is not None else None,
                "bandwidth": one.bandwidth,
                "overlap": round(one.overlap, 4),
                "last": one.last,
                "last_share": round(one.last_share, 4),
            }
            for one in report.collectives[:ROWS]
        ],
        "more_collectives": max(len(report.collectives) - ROWS, 0),
        "links": [
            {
                "way": [link.source, link.target],
                "hosts": [link.source_host, link.target_host],
                "partitions": list(link.partitions),
                "messages": link.messages,
                "bytes": link.size,
                "time": link.time,
                "error": link.error,
                "bandwidth": link.bandwidth,
                "overlap": None if link.overlap is None else round(link.overlap, 4),
                "wait": link.wait,
                "share": round(link.share, 5),
                "notable": link.notable,
            }
            for link in report.links[:ROWS]
        ],
        "more_links": max(len(report.links) - ROWS, 0),
    }
