"""Text for a terminal: colour, bars, columns, wrapped lines."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["LEAST", "NAMED", "Style", "bar", "beside", "broken", "broken_code", "columns", "shown_width", "spark"]

LEAST = 40
"""The narrowest terminal that text is written for."""
NAMED = 24
"""Columns that the name of a part may take; a longer one has a line to itself."""
READABLE = 100
"""The most columns of a sentence; longer lines are hard to follow."""

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "magenta": "35"}
_BREAKABLE = ".,(=[/_"
_WORDS_OF_CODE = re.compile(r'(?:"(?:\\.|[^"\\])*"|[^" ])+')
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")
# Names come from files: what would move the cursor, or turn text around, is shown as a question mark.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")


@dataclass(frozen=True, slots=True)
class Style:
    """How text is written: its width, with or without colour, in ASCII or not."""

    width: int = 80
    colour: bool = False
    ascii: bool = False

    def paint(self, text: str, *styles: str) -> str:
        """Put text in colour, if there is any."""
        if not self.colour or not text:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"

    def plain(self, text: str) -> str:
        """Make text from a file safe to show."""
        safe = _CONTROL.sub("?", text)
        return safe.replace("µs", "us").encode("ascii", "replace").decode() if self.ascii else safe

    def cut(self, text: str, width: int) -> str:
        """Make text safe, and cut it to a width."""
        safe = self.plain(text)
        mark = "~" if self.ascii else "…"
        return safe if len(safe) <= width else safe[: max(width - 1, 0)] + mark[:width]

    def folded(self, line: str) -> list[str]:
        """Break a line that is too wide; the lines that it becomes have no colour."""
        if shown_width(line) <= self.width:
            return [line]
        text = _ESCAPE.sub("", line)
        deeper = min(len(text) - len(text.lstrip()) + 4, self.width // 2)
        return broken(text, self.width, indent=" " * deeper)

    def wrapped(self, text: str, *, indent: str = "", first: str | None = None) -> list[str]:
        """Break text into lines."""
        return broken(
            self.plain(text), min(self.width, READABLE), indent=indent, first=indent if first is None else first
        )


class _Lines(textwrap.TextWrapper):
    """Breaks what is too long for a line where code may be broken, if it can."""

    def _handle_long_word(self, reversed_chunks: list[str], cur_line: list[str], cur_len: int, width: int) -> None:
        chunk, room = reversed_chunks[-1], width - cur_len
        end = max(chunk.rfind(mark, 0, room) for mark in _BREAKABLE) + 1
        if not end:
            if cur_line:  # the next line has more room
                return
            end = max(room, 1)
        cur_line.append(chunk[:end])
        reversed_chunks[-1] = chunk[end:]


def broken(text: str, width: int, *, indent: str = "", first: str = "") -> list[str]:
    """Break text into lines: between words and, where one is too long for a line, after a mark in it.

    >>> broken("copy: loader.to(device,non_blocking=True)", 20)
    ['copy: loader.to(', 'device,non_blocking=', 'True)']
    """
    return _Lines(width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False).wrap(text)


def broken_code(code: str, width: int) -> list[str]:
    """Break a call into lines that can be pasted: between words, but not in a string. A long comment comes first.

    >>> broken_code('Pipeline(model, cuts=["b 2"], chunks=4)', 24)
    ['Pipeline(model,', '    cuts=["b 2"],', '    chunks=4)']
    """
    if len(code) <= width:
        return [code]
    call, _, comment = code.partition("  # ")
    lines = broken(comment, width, first="# ", indent="# ")
    row = ""
    for word in _WORDS_OF_CODE.findall(call):
        if row.strip() and len(row) + len(word) > width:
            lines.append(row.rstrip())
            row = "    "
        row += f"{word} "
    return [*lines, row.rstrip()]


def shown_width(text: str) -> int:
    """Return how many columns a text takes."""
    return len(_ESCAPE.sub("", text))


def bar(share: float, width: int, *, ascii: bool = False) -> str:
    """Draw a share as a bar, to an eighth of a character."""
    cells = max(0.0, min(share, 1.0)) * width
    if ascii:
        return "#" * round(cells)
    whole, rest = divmod(round(cells * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()


def spark(values: Sequence[float | None], width: int, *, top: float, ascii: bool = False) -> str:
    """Draw values as columns, each as high as its share of ``top``; of more than fit, the highest of each few.

    Where there is no value, there is a blank.

    >>> spark([1, 2, 8], 3, top=8)
    '▁▂█'
    """
    levels = ".:-=+*%#" if ascii else "▁▂▃▄▅▆▇█"
    count = min(len(values), width)
    edges = [k * len(values) // max(count, 1) for k in range(count + 1)]
    highest = [max((value for value in values[a:b] if value is not None), default=None) for a, b in pairwise(edges)]
    return "".join(
        " " if value is None else levels[min(max(math.ceil(value / max(top, 1e-9) * 8), 1), 8) - 1] for value in highest
    )


def columns(
    rows: Sequence[Sequence[str]], *, align: str, gap: int = 2, names: int | None = None, width: int | None = None
) -> list[str]:
    """Lay out cells, each column as wide as it must be; ``align`` has ``l`` or ``r`` for each.

    First cells that are longer than ``names`` have a line to themselves. What does not fit into ``width`` comes below,
    with the first column again.
    """
    long = [names is not None and shown_width(row[0]) > names for row in rows]
    first = max((shown_width(row[0]) for row, own in zip(rows, long, strict=True) if not own), default=0)
    widths = [first, *(max(shown_width(row[k]) for row in rows) for k in range(1, len(align)))]
    parts: list[list[int]] = [[0]]
    for k in range(1, len(align)):
        taken = sum(widths[column] + gap for column in parts[-1])
        if width is not None and len(parts[-1]) > 1 and taken + widths[k] > width:
            parts.append([0])
        parts[-1].append(k)
    return [line for part in parts for line in _part(rows, part, widths, align, gap, long)]


def _part(
    rows: Sequence[Sequence[str]],
    part: Sequence[int],
    widths: Sequence[int],
    align: str,
    gap: int,
    long: Sequence[bool],
) -> list[str]:
    """Lay out some columns."""
    lines = []
    for whole, alone in zip(rows, long, strict=True):
        row = [whole[k] for k in part]
        if alone:
            lines.append(row[0])
            row[0] = ""
        cells = []
        for cell, k in zip(row, part, strict=True):
            space = " " * (widths[k] - shown_width(cell))
            cells.append(space + cell if align[k] == "r" else cell + space)
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def beside(left: Sequence[str], right: Sequence[str], *, width: int, gap: int = 4) -> list[str]:
    """Put two blocks of lines beside each other, or below if they are too wide for that."""
    widest = max(map(shown_width, left), default=0)
    if widest + gap + max(map(shown_width, right), default=0) > width:
        return [*left, "", *right]
    lines = []
    for k in range(max(len(left), len(right))):
        one, other = (block[k] if k < len(block) else "" for block in (left, right))
        lines.append((one + " " * (widest + gap - shown_width(one)) + other).rstrip())
    return lines
