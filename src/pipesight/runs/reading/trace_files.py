"""The files of a run: which of them hold events, of which rank, and which are left out."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipesight.runs.reading._file_type import TRACES, FileType, Sniffed, sniff
from pipesight.runs.reading.attempts import Attempt, attempt_in, without_attempt
from pipesight.runs.reading.safe_open import open_plain, without_refused

__all__ = ["NotARunError", "Note", "TraceFile", "find_files", "read_object"]

_OTHERS = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_RANK = re.compile(r"rank[-_]?(?P<rank>\d{1,9})(?:-restart-\d{1,9})?(?:-(?P<child>\d+))?(?!\d)")
_PART = re.compile(r"(?P<stem>.+)\.part(?P<number>\d{1,9})")
_CHILD = re.compile(r"(?P<stem>.+)-(?P<child>\d+)")


class NotARunError(ValueError):
    """There is nothing to report: no file that can be read, or no event in any."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the reader of a report should know about its input."""

    path: Path
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file with events."""

    path: Path
    rank: int
    form: FileType
    own: bool = True
    """Whether it is of the rank's own process, not of one that this started."""
    attempt: int = 0
    part: int = 1
    child: str = ""
    pid: int | None = None
    packed: bool = False
    bracketed: bool = False
    """Whether the first line is a bracket."""

    @property
    def place(self) -> tuple[int, str, int]:
        """What no other file of the run has."""
        return self.rank, self.child, self.part


def find_files(
    path: Path,
    processes: Mapping[int, int],
    world_size: int | None,
    *,
    choose: Callable[[Collection[tuple[int, int]]], Attempt],
) -> tuple[list[TraceFile], list[Note], Attempt]:
    """Return the files with events in a run directory or any folder, or in one file and its parts.

    Args:
        path: the file or folder.
        processes: the ranks of processes, by their numbers, as far as they are known.
        world_size: how many ranks there were, if that is known.
        choose: given the rank and the attempt of each file, returns the attempt to keep.
    """
    notes: list[Note] = []
    every = [_look(file) for file in _candidates(path, notes)]
    attempt = choose({(file.rank, file.attempt) for file in every if file.form not in ("empty", "other")})
    if (others := attempt.left_out(path)) is not None:
        notes.append(Note(path, others))
    found = [file for file in every if file.attempt == attempt.of_rank(file.rank)]
    found = _numbered(found, processes if attempt.described else {})
    kept = []
    for file in found:
        if file.form == "empty":
            notes.append(Note(file.path, "left out: it is empty"))
        elif file.form == "other":
            notes.append(Note(file.path, "left out: there are no events in it"))
        elif world_size is not None and file.rank >= world_size and len(found) > 1:
            notes.append(Note(file.path, f"left out: of another run, as this one has ranks 0 to {world_size - 1}"))
        else:
            kept.append(file)
    return _unmixed(kept, processes, notes), notes, attempt


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: there is none.
        OSError: the file is not there, or is none.
    """
    try:
        with open_plain(path) as file:
            value = json.loads(file.read())
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


# Which files there are.


def _candidates(path: Path, notes: list[Note]) -> list[Path]:
    def refuse(file: Path, why: str) -> None:
        notes.append(Note(file, why))

    if not path.is_dir():
        stem, suffix = _split(path)
        parts = [file for file in path.parent.iterdir() if suffix in TRACES and file.name.endswith(suffix)]
        pattern = re.compile(re.escape(stem) + r"\.part\d+")
        parts = [part for part in parts if pattern.fullmatch(_split(part)[0])]
        return [path, *sorted(without_refused(parts, path.parent, refuse), key=_order)]
    folder = path / "trace" if (path / "trace").is_dir() else path
    files = sorted(folder.rglob("*"), key=_order)
    traces = without_refused((file for file in files if file.name.endswith(TRACES)), path, refuse)
    others = [file for file in files if file.name.endswith(_OTHERS) and not _is_ours(path, file)]
    others = without_refused(others, path, refuse)
    if not traces:
        return others
    notes.extend(
        Note(file, "left out: beside .pfw files, others are taken for copies") for file in others if _holds_events(file)
    )
    return traces


def _is_ours(folder: Path, file: Path) -> bool:
    """Tell whether a file is one of those of a run directory that hold no events."""
    return file.relative_to(folder).parts[0] in ("run.json", "notes.json", "ranks", "stats", "logs")


def _holds_events(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return sniff(file).form in ("lines", "chrome")
    return False


def _split(path: Path) -> tuple[str, str]:
    suffix = next((suffix for suffix in (*TRACES, *_OTHERS) if path.name.endswith(suffix)), "")
    return path.name.removesuffix(suffix), suffix


def _order(path: Path) -> tuple[Path, str, int]:
    """Return what sorts files by name, and the parts of one by number."""
    stem, _ = _split(path)
    part = _PART.fullmatch(stem)
    return (path.parent, part["stem"], int(part["number"])) if part else (path.parent, stem, 1)


# Whose they are.


def _look(path: Path) -> TraceFile:
    try:
        start = sniff(path)
    except OSError:
        start = Sniffed("other")
    name = _order(path)[1]
    rank = _RANK.search(name)
    child = (rank["child"] or "") if rank and path.name.endswith(TRACES) else ""  # others put dates there
    return TraceFile(
        path,
        rank=int(rank["rank"]) if rank else -1,
        form=start.form,
        own=not child,
        attempt=attempt_in(name) if path.name.endswith(TRACES) else 0,
        part=_order(path)[2],
        child=child,
        pid=start.pid,
        packed=start.packed,
        bracketed=start.bracketed,
    )


def _numbered(files: Sequence[TraceFile], processes: Mapping[int, int]) -> list[TraceFile]:
    """Give ranks to those whose names do not say: by their processes, or else one after the other."""
    stems = {(file.path.parent, without_attempt(_order(file.path)[1])) for file in files}
    ranks: dict[tuple[Path, str], int] = {}
    free = max((file.rank for file in files), default=-1) + 1
    numbered = []
    for file in files:
        if file.rank >= 0:
            numbered.append(file)
            continue
        stem = without_attempt(_order(file.path)[1])
        child = _CHILD.fullmatch(stem)
        parent = (file.path.parent, child["stem"]) if child else None
        is_child = child is not None and parent in stems
        key = parent if is_child and parent is not None else (file.path.parent, stem)
        if key not in ranks:
            known = processes.get(file.pid) if file.pid is not None and not is_child else None
            ranks[key] = free if known is None else known
            free += known is None
        numbered.append(
            replace(file, rank=ranks[key], own=not is_child, child=child["child"] if is_child and child else "")
        )
    return numbered


def _unmixed(files: Sequence[TraceFile], processes: Mapping[int, int], notes: list[Note]) -> list[TraceFile]:
    """Leave out what belongs to another run: folders, files and parts that claim a place that is taken.

    Those come first that are of processes of the run, and then the newest.
    """
    folders: dict[Path, list[TraceFile]] = {}
    for file in sorted(files, key=lambda file: _claim(file, processes), reverse=True):
        folders.setdefault(file.path.parent, []).append(file)
    kept: dict[tuple[int, str, int], TraceFile] = {}
    for folder, inside in folders.items():
        if taken := next((kept[file.place] for file in inside if file.place in kept), None):
            text = f"left out: {str(taken.path.parent)!r} has traces of the same ranks; name the folder that you mean"
            notes.append(Note(folder, text))
            continue
        for file in inside:
            if other := kept.get(file.place):
                text = f"left out: {other.path.name!r} is of rank {file.rank} too; name the file that you mean"
                notes.append(Note(file.path, text))
            else:
                kept[file.place] = file
    firsts = {(file.rank, file.child): file.pid for file in kept.values() if file.part == 1}
    whole = []
    for _, file in sorted(kept.items()):
        first = firsts.get((file.rank, file.child))
        if file.pid is not None and first is not None and file.pid != first:
            notes.append(Note(file.path, f"left out: it is of process {file.pid}, and the first part of {first}"))
        else:
            whole.append(file)
    return whole


def _claim(file: TraceFile, processes: Mapping[int, int]) -> tuple[bool, float]:
    is_known = file.pid is not None and processes.get(file.pid) == file.rank
    try:
        return is_known, file.path.stat().st_mtime
    except OSError:
        return is_known, 0.0
