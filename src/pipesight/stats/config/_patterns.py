r"""Regular expressions of a configuration, matched in bounded time.

Python's ``re`` tries all ways to match, which may be exponentially many, and cannot be interrupted. So a pattern is
looked at first::

    .*\.(fc1|fc2)      repeats one after the other: at most len(name) ** (repeats + 1) steps, matched here
    (a+)+              a group that repeats: matched in a process of its own, which ends when its time is over
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipesight.stats.config_errors import ConfigError, placed, shown

__all__ = ["Pattern", "compiled"]

STEPS = 10_000_000  # that take a tenth of a second or less
LIMIT = 1.0  # seconds of processor time for one name
PATIENCE = 60.0  # seconds for a process on a machine that is busy

_HARD = re.compile(r"\)[*+{]|\\[1-9]|\(\?(?!:|i\)|P<)")
"""A group that repeats, a reference to one, and anything rarer, such as flags that allow spaces between these."""

_CHILD = """
import json, re, sys
try:
    from signal import ITIMER_PROF, setitimer
except ImportError:
    setitimer = None
pattern, limit, names = json.load(sys.stdin)
pattern = re.compile(pattern)
for name in names:
    if setitimer:
        setitimer(ITIMER_PROF, limit)
    found = pattern.search(name) is not None
    print(int(found), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression, and where it stands.

    Attributes:
        pattern: As it is written.
        repeats: How many repeats and choices by ``|`` it has at most; ``None`` if one may be inside of a repeat.
        place: The key that it is the value of.
        source: The file, or nothing.
        line: The line there.
    """

    pattern: str
    repeats: int | None
    place: str = ""
    source: str = ""
    line: int | None = None
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", _compile(self.pattern))

    def match(self, names: Iterable[str]) -> dict[str, bool]:
        """Return of each name whether the pattern is found in it; `ConfigError` if that takes too long."""
        found: dict[str, bool] = {}
        hard = []
        for name in dict.fromkeys(names):
            if self.repeats is not None and (len(name) + 1) ** (self.repeats + 1) <= STEPS:  # from each character on
                found[name] = self._compiled.search(name) is not None
            else:
                hard.append(name)
        return {**found, **self._match_apart(hard)} if hard else found

    def _match_apart(self, names: list[str]) -> dict[str, bool]:
        """Match in another process, which can be ended."""
        command = [sys.executable, "-I", "-S", "-c", _CHILD]
        try:
            task = json.dumps([self.pattern, LIMIT, names])
            child = subprocess.run(command, input=task, capture_output=True, text=True, timeout=PATIENCE)
            answers, failure = child.stdout.split(), child.stderr.strip().rpartition("\n")[2]
        except subprocess.TimeoutExpired as error:
            done: Any = error.stdout or b""
            answers, failure = (done if isinstance(done, str) else done.decode()).split(), ""
        except OSError as error:
            answers, failure = [], str(error)
        if len(answers) < len(names):
            why = f"could not be tried on the layer {shown(names[len(answers)])}: {failure}"
            if not failure:
                why = f"takes more than {LIMIT:g} s to match the layer {shown(names[len(answers)])}"
            rule = f"{self.place}: {why} (layer_name_regex_pattern: {shown(self.pattern)})"
            fix = "write it without a repeat or | inside of a repeat, such as a+ in place of (a+)+"
            raise ConfigError(self.source, [placed(self.source, self.line, f"{rule}; {fix}")])
        return {name: answer == "1" for name, answer in zip(names, answers, strict=True)}


def compiled(pattern: str, place: str = "", source: str = "", line: int | None = None) -> Pattern:
    """Return a pattern to match with.

    Raises:
        re.error: It is no regular expression; ``OverflowError`` and ``RecursionError`` mean that, too.
    """
    _compile(pattern)
    return Pattern(pattern, _repeats(pattern), place, source, line)


def _compile(pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what may change in a later Python
        return re.compile(pattern)


def _repeats(pattern: str) -> int | None:
    """Return how many repeats and choices follow each other at most, or ``None`` if one may be inside of a repeat."""
    if _HARD.search(pattern):
        return None
    choices = min(pattern.count("|"), pattern.count("(") + 1)
    return choices + len(re.findall(r"[*+{]|(?<![*+?}(])\?", pattern))
