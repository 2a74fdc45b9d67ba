"""Files that DuckDB cannot read as they are, because they are damaged, have overlong lines or another format.

They are converted to lines of events piece by piece, so that neither memory nor disk has to hold more than one piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipesight.runs.reading._decompression import Decompressor, without_surrogates
from pipesight.runs.reading._duckdb_sql import LONGEST
from pipesight.runs.reading._foreign_formats import ChromeReader, event_of, records
from pipesight.runs.reading.clock_shift import ClockShift
from pipesight.runs.reading.duckdb_events import DuckEvents, Source, UnreadableError
from pipesight.runs.reading.trace_files import TraceFile

__all__ = ["Normalizer"]

_PIECE = 2**26  # bytes of lines that are read together


class Normalizer:
    """Converts one file to lines that DuckDB reads."""

    def __init__(self, file: TraceFile) -> None:
        self.file = file
        self.unpacker = Decompressor(file.path)
        self.failure: str | None = None
        """Why the file could not be read to its end."""
        self._chrome: ChromeReader | None = None
        self._too_long = 0

    def read_into(self, events: DuckEvents, number: int, shift: ClockShift) -> None:
        """Read the events into the table, under this file number and with their times shifted."""
        foreign = self.file.form != "lines"
        source = Source(events.folder / "normalized.pfw", number, self.file.rank, own=self.file.own, packed=False)
        lines = self._lines()
        try:
            while piece := _take(lines, _PIECE):
                source.path.write_bytes(b"".join(piece))
                if self._chrome is not None:
                    rank = source.rank if self._chrome.rank is None else self._chrome.rank
                    source = replace(source, rank=rank, shift=shift.later(self._chrome.shift))
                else:
                    source = replace(source, shift=shift)
                events.read([source], foreign=foreign)
        except (OSError, UnreadableError) as error:
            self.failure = str(error).partition("\n")[0]
        finally:
            source.path.unlink(missing_ok=True)

    @property
    def place(self) -> int | None:
        """The place of the rank in its pipeline, if it is known; that of one which names no rank is its number."""
        known = self._chrome
        return known.place if known is not None and known.rank is not None else self.file.rank

    @property
    def is_broken_off(self) -> bool:
        """Whether a list of events has no end."""
        return self._chrome is not None and not self._chrome.ended

    @property
    def skipped(self) -> int:
        """How many entries are not events."""
        return self._too_long + (self._chrome.skipped if self._chrome is not None else 0)

    def _lines(self) -> Iterator[bytes]:
        if self.file.form == "chrome":
            self._chrome = ChromeReader(self.unpacker)
            for line in self._chrome:
                if len(line) > LONGEST:
                    self._too_long += 1
                else:
                    yield without_surrogates(line) + b"\n"
        elif self.file.form == "records":
            for record in records(line for text in self._whole_lines() for line in text.split(b"\n")):
                if (event := event_of(record)) is not None:
                    yield json.dumps(event).encode() + b"\n"
        else:
            yield from map(without_surrogates, self._whole_lines())

    def _whole_lines(self) -> Iterator[bytes]:
        """Yield the text in pieces that end at a line's end, without overlong lines."""
        rest: list[bytes] = []  # of a line, unless it is too long
        size = 0
        for text in self.unpacker:
            first, end = text.find(b"\n") + 1, text.rfind(b"\n") + 1
            if end:
                is_too_long = size + first > LONGEST
                self._too_long += is_too_long
                yield text[first:end] if is_too_long else b"".join([*rest, text[:end]])
                rest, size = [], 0
            size += len(text) - end
            rest = [*rest, text[end:]] if size <= LONGEST else []
        if size > LONGEST:
            self._too_long += 1
        elif rest and not self.unpacker.cut:
            yield b"".join([*rest, b"\n"])


def _take(lines: Iterable[bytes], size: int) -> list[bytes]:
    taken: list[bytes] = []
    for line in lines:
        taken.append(line)
        size -= len(line)
        if size <= 0:
            break
    return taken
