"""Notes on the traces of a run: what is damaged, lost, cut off or missing."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pipesight._plurals import count_of, plural
from pipesight.runs.reading._decompression import Decompressor
from pipesight.runs.reading._file_conversion import Normalizer
from pipesight.runs.reading.duckdb_events import FileFacts
from pipesight.runs.reading.reader_notes import Note
from pipesight.runs.reading.trace_files import TraceFile

__all__ = ["file_notes", "missing_ranks", "nothing_found"]

_MOST_RANKS = 1_000_000
_SHOWN = 8


def file_notes(
    file: TraceFile, facts: FileFacts, normalized: Normalizer | None, text: Decompressor, *, whole: bool
) -> Iterator[Note]:
    """Yield notes on a trace.

    ``normalized`` is what read it, unless DuckDB read it directly, and ``text`` what checked its checksums. ``whole``
    says that every event was read, not just spans.
    """

    def note(words: str) -> Note:
        return Note(file.path, words)

    if normalized is not None and normalized.failure is not None:
        yield note(f"read in part: {normalized.failure}")
    if text.damaged:
        unchecked = text.unchecked or normalized is None
        yield note(
            f"damaged: the checksum fails for {count_of(text.damaged, 'byte')}; "
            + ("some of its events may be wrong" if unchecked else "the events in them are skipped")
        )
    if facts.lost:
        yield note(f"{count_of(facts.lost, 'event')} {plural(facts.lost, 'was', 'were')} lost while recording")
    if file.form == "lines":
        last = text.tail.rstrip(b"\0 \t\r\n")
        is_broken_off = not text.tail.endswith((b"\n", b"]", b"}")) and normalized is None
        if not facts.ended and not last.endswith(b"]") and not text.damaged:
            yield note("incomplete: its process was killed, or is still writing")
        # Brackets, a last line that was cut off, and where bytes are missing, the lines on both sides.
        expected = file.bracketed + last.endswith(b"]") + is_broken_off + (2 if text.damaged else 0)
    else:
        expected = 0
        if text.cut or (normalized is not None and normalized.is_broken_off and facts.spans):
            yield note("incomplete: it was cut off")
    skipped = facts.damaged + (normalized.skipped if normalized is not None else 0) - expected
    if skipped > 0:
        yield note(f"skipped: {count_of(skipped, 'line')} that {plural(skipped, 'is no event', 'are no events')}")
    if not facts.spans and file.form != "records":
        yield note("it contains no spans")
    if whole and text.has_surrogates:
        yield note("lone surrogates, not valid Unicode, are replaced by \ufffd")


def missing_ranks(there: Collection[int], world_size: object) -> str | None:
    """Return a note on the ranks that have no trace; ``None`` if all that should have one do."""
    if not there:
        return "it contains no trace"
    if type(world_size) is not int or len(there) >= world_size:
        return None
    missing = [rank for rank in range(min(world_size, _MOST_RANKS)) if rank not in there]
    shown = ", ".join(map(str, missing[:_SHOWN])) + (", .." if len(missing) > _SHOWN else "")
    return f"no trace of {plural(len(missing), 'rank')} {shown} of {world_size:,}"


def nothing_found(path: Path, notes: Sequence[Note]) -> str:
    """Return the message of a `NotARunError`: no events, and why."""
    if path.is_dir() and (operations := sorted(path.glob("*.parquet"))):
        return f"no events in {str(path)!r}; give one of the files in it: {shlex.quote(str(operations[0]))}"
    more = f"; and {len(notes) - 1} more" if len(notes) > 1 else ""
    why = f" ({notes[0].path.name}: {notes[0].text}{more})" if notes else ""
    return f"no events in {str(path)!r}{why}; give a run directory, or a trace such as trace.pfw.gz"
