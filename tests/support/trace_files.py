"""Read trace files without pipesight's own readers."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["end_of", "event_names", "events_by_process", "events_of", "is_complete", "lines_of", "zcat"]


def zcat(path: Path) -> str:
    """Return what the command ``zcat`` prints; it must not complain."""
    result = subprocess.run(["zcat", str(path)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return all lines but the brackets."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines if line not in ("[", "]", "")]


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines without header and footer."""
    return [line for line in lines_of(path) if line["cat"] != "dftracer"]


def end_of(path: Path) -> dict[str, Any]:
    """Return the counts in the footer."""
    return next(line["args"] for line in lines_of(path) if line["name"] == "end")


def is_complete(path: Path) -> bool:
    """Tell whether the file ends with a footer, which counts all events and no lost ones."""
    end = lines_of(path)[-1]
    counts = {"num_events": len(events_of(path)), "lost_events": 0}
    return end["name"] == "end" and end["args"] | counts == end["args"]


def event_names(path: Path) -> list[str]:
    """Return the names of the events."""
    return [event["name"] for event in events_of(path)]


def events_by_process(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the events of all files in a folder by process; each process must have one complete file."""
    found = {}
    for path in folder.glob("*.pfw.gz"):
        (pid,) = {line["pid"] for line in lines_of(path)}
        events = events_of(path)
        assert is_complete(path), path
        assert pid not in found
        assert len({event["id"] for event in events}) == len(events)
        found[pid] = events
    return found
