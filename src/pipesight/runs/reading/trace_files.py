"""Find the files of a run that hold events, and the rank of each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipesight.runs.format import LOGS, NOTES, RANKS, RUN_FILE, STATS, TRACE, TRACE_SUFFIXES, part_order
from pipesight.runs.reading._file_type import FileType, Sniffed, sniff
from pipesight.runs.reading.attempts import Attempt, attempt_in, without_attempt
from pipesight.runs.reading.reader_notes import Note
from pipesight.runs.reading.safe_open import without_refused
from pipesight.runs.reading.trace_reader import find_traces

__all__ = ["TraceFile", "find_files"]

_OTHER_SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_SUFFIXES = (*TRACE_SUFFIXES, *_OTHER_SUFFIXES)
_RANK = re.compile(r"rank[-_]?(?P<rank>\d{1,9})(?:-restart-\d{1,9})?(?:-(?P<child>\d+))?(?!\d)")
_CHILD = re.compile(r"(?P<stem>.+)-(?P<child>\d+)")


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file with events."""

    path: Path
    rank: int
    form: FileType
    own: bool = True
    """Whether it is of the rank's own process, not of one that it started."""
    attempt: int = 0
    part: int = 1
    child: str = ""
    pid: int | None = None
    packed: bool = False
    bracketed: bool = False
    """Whether the first line is a bracket."""

    @property
    def place(self) -> tuple[int, str, int]:
        """The place in the run that no other file has."""
        return self.rank, self.child, self.part


def find_files(
    path: Path,
    processes: Mapping[int, int],
    world_size: int | None,
    *,
    choose: Callable[[Collection[tuple[int, int]]], Attempt],
) -> tuple[list[TraceFile], list[Note], Attempt]:
    """Return the files with events in a run directory or any folder, or in one file and its parts.

    ``processes`` are the ranks by process ID, as far as they are known; ``choose`` is given the rank and the attempt of
    each file, and returns the attempt to keep.
    """
    notes: list[Note] = []
    every = [_look(file) for file in _candidates(path, notes)]
    attempt = choose({(file.rank, file.attempt) for file in every if file.form not in ("empty", "other")})
    if (others := attempt.others_note(path)) is not None:
        notes.append(Note(path, others))
    found = [file for file in every if file.attempt == attempt.of_rank(file.rank)]
    found = _numbered(found, processes if attempt.described else {})
    kept = []
    for file in found:
        if file.form == "empty":
            notes.append(Note(file.path, "skipped: it is empty"))
        elif file.form == "other":
            notes.append(Note(file.path, "skipped: it contains no events"))
        elif world_size is not None and file.rank >= world_size and len(found) > 1:
            notes.append(Note(file.path, f"skipped: of another run; this one has ranks 0 to {world_size - 1}"))
        else:
            kept.append(file)
    return _unmixed(kept, processes, notes), notes, attempt


# Which files there are.


def _candidates(path: Path, notes: list[Note]) -> list[Path]:
    def refuse(file: Path, why: str) -> None:
        notes.append(Note(file, why))

    if not path.is_dir():
        return find_traces(path, refuse=refuse)
    folder = path / TRACE if (path / TRACE).is_dir() else path
    files = sorted(folder.rglob("*"), key=_order)
    traces = without_refused((file for file in files if file.name.endswith(TRACE_SUFFIXES)), path, refuse)
    others = [file for file in files if file.name.endswith(_OTHER_SUFFIXES) and not _is_ours(path, file)]
    others = without_refused(others, path, refuse)
    if not traces:
        return others
    notes.extend(Note(file, "skipped: taken for a copy of the .pfw files") for file in others if _holds_events(file))
    return traces


def _is_ours(folder: Path, file: Path) -> bool:
    """Return whether a file is one of a run directory that holds no events."""
    return file.relative_to(folder).parts[0] in (RUN_FILE, NOTES, RANKS, STATS, LOGS)


def _holds_events(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return sniff(file).form in ("lines", "chrome")
    return False


def _order(path: Path) -> tuple[Path, str, int]:
    return part_order(path, _SUFFIXES)


# Whose they are.


def _look(path: Path) -> TraceFile:
    try:
        start = sniff(path)
    except OSError:
        start = Sniffed("other")
    name = _order(path)[1]
    rank = _RANK.search(name)
    child = (rank["child"] or "") if rank and path.name.endswith(TRACE_SUFFIXES) else ""  # other tools put dates there
    return TraceFile(
        path,
        rank=int(rank["rank"]) if rank else -1,
        form=start.form,
        own=not child,
        attempt=attempt_in(name) if path.name.endswith(TRACE_SUFFIXES) else 0,
        part=_order(path)[2],
        child=child,
        pid=start.pid,
        packed=start.packed,
        bracketed=start.bracketed,
    )


def _numbered(files: Sequence[TraceFile], processes: Mapping[int, int]) -> list[TraceFile]:
    """Give ranks to files whose names have none: by their processes, or else in order."""
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
    """Drop folders, files and parts of other runs, whose place in the run is already taken.

    Files of known processes of the run take precedence, then newer files.
    """
    folders: dict[Path, list[TraceFile]] = {}
    for file in sorted(files, key=lambda file: _claim(file, processes), reverse=True):
        folders.setdefault(file.path.parent, []).append(file)
    kept: dict[tuple[int, str, int], TraceFile] = {}
    for folder, inside in folders.items():
        if taken := next((kept[file.place] for file in inside if file.place in kept), None):
            text = f"skipped: {str(taken.path.parent)!r} has traces of the same ranks; give the folder that you mean"
            notes.append(Note(folder, text))
            continue
        for file in inside:
            if other := kept.get(file.place):
                text = f"skipped: {other.path.name!r} is of rank {file.rank} too; give the file that you mean"
                notes.append(Note(file.path, text))
            else:
                kept[file.place] = file
    firsts = {(file.rank, file.child): file.pid for file in kept.values() if file.part == 1}
    whole = []
    for _, file in sorted(kept.items()):
        first = firsts.get((file.rank, file.child))
        if file.pid is not None and first is not None and file.pid != first:
            notes.append(Note(file.path, f"skipped: of process {file.pid}, but the first part is of process {first}"))
        else:
            whole.append(file)
    return whole


def _claim(file: TraceFile, processes: Mapping[int, int]) -> tuple[bool, float]:
    is_known = file.pid is not None and processes.get(file.pid) == file.rank
    try:
        return is_known, file.path.stat().st_mtime
    except OSError:
        return is_known, 0.0
