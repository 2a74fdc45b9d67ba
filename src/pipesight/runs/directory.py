"""The run directory: which files are whose, and whether they may be written.

    RUN/run.json                    of rank 0, as are all files of the whole run
    RUN/ranks/rank-00001.json       the same facts of other ranks
    RUN/trace/rank-00000.pfw.gz
    RUN/stats/rank-00000.jsonl
    RUN/logs/rank-00000.log

The ranks of a run begin at any time, so each looks after its own files only. If torchrun starts them anew, they write
more files in the same directory, with the number of the attempt in their names. The torchruns of several nodes may
count differently, so the number is the next one after that of the description which the rank has left::

    node of rank 0   told 0 ──────── told 0, as it was rank 1 that crashed
                     attempt 0       attempt 1: run.json is of attempt 0, and of this torchrun
    node of rank 1   told 0 ─ crash  told 1
                     attempt 0       attempt 1

What was recorded before is left alone: the next recording of the same name goes beside it, into ``RUN-2``, ``RUN-3``
and so on. The ranks of one machine come to the same number, as the descriptions say which start of torchrun they are
of; those of several machines cannot, and are told to choose.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipesight._launcher import environment_number, launch, launched_rank, restarts, with_attempt
from pipesight.runs.format import LOGS, RANKS, RUN_FILE, STATS, TRACE, rank_name

__all__ = ["RunDirectory", "later_recording"]

_RANK = re.compile(r"rank-(\d{5,})|globalrank-(\d+)")
_FOLDERS = (TRACE, STATS, LOGS, RANKS, "nvdlfw_inspect_logs")
_OF_THE_RUN = (RUN_FILE, "report.html", "comparison.html")


class RunDirectory:
    """The files of one rank in a run directory.

    Attributes:
        path: The directory.
        rank: Of this process.
        ranks: How many there are.
        restart: How often a launcher has started the run anew, without a new directory; settled by `claim`.
        launch: Which start of torchrun this is of, if it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise ValueError("the path of a run directory must not be empty; name one: observe('RUN')")
        self.path = Path(path).absolute()
        self.rank, self.ranks = launched_rank() or 0, max(1, environment_number("WORLD_SIZE") or 1)
        self.restart, self.launch = restarts(), launch()
        self._made = False

    @property
    def name(self) -> str:
        """What the files of this rank are called."""
        return rank_name(self.rank)

    @property
    def description(self) -> Path:
        """The file that describes the run, as this rank sees it."""
        return self.path / RUN_FILE if self.rank == 0 else self.path / RANKS / f"{self.name}.json"

    @property
    def trace(self) -> Path:
        """What the trace of this rank is called, but for its suffix."""
        return self.path / TRACE / with_attempt(self.name, self.restart)

    @property
    def log(self) -> Path:
        """The file of log lines."""
        return self.path / LOGS / f"{with_attempt(self.name, self.restart)}.log"

    def traces(self) -> list[Path]:
        """Return the files that this process and those that it started have written so far."""
        with contextlib.suppress(OSError):
            return [file for file in (self.path / TRACE).iterdir() if file.name.startswith(self.name)]
        return []

    def claim(self, *, overwrite: bool = False) -> None:
        """Make the directory, or see that it is free for this rank, or take the next of its name that is.

        Raises:
            FileExistsError: It holds something else than a recording, or its name is that of a file.
        """
        asked, number = self.path, 1
        while not overwrite and self._is_of_another():
            number += 1
            self.path = asked.with_name(f"{asked.name}-{number}")
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"a run directory must be a folder, but {str(self.path)!r} is a file; name another")
        left = _read(self.description)
        goes_on = self._goes_on(left)
        if goes_on:
            self.restart = max(self.restart, left["restart"] + 1)
        if goes_on or (self.restart and not left):  # it may have ended before it left anything
            self._put_aside(left.get("restart", self.restart - 1))
        elif overwrite:
            for file in list(self._own()):
                file.unlink(missing_ok=True)
        else:
            found = next(self._foreign() if self.rank == 0 else self._own(), None)
            if found is not None:
                raise FileExistsError(
                    f"a run directory must be empty, but {str(self.path)!r} holds {str(found.relative_to(self.path))!r}"
                    "; record into another one, or replace it: overwrite=True"
                )
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)

    def leave(self) -> None:
        """Take away the directory that was made for nothing."""
        if self._made:
            with contextlib.suppress(OSError):  # another rank has written to it
                self.path.rmdir()

    def _files(self) -> Iterator[Path]:
        """Yield the files that some observation may have written."""
        for name in _OF_THE_RUN:
            if (self.path / name).is_file():
                yield self.path / name
        for folder in _FOLDERS:
            for file in sorted((self.path / folder).rglob("*")):
                if file.is_file() and _RANK.search(file.name):
                    yield file

    def _own(self) -> Iterator[Path]:
        """Yield the files of this rank; rank 0 has those of ranks that are no more."""
        for file in self._files():
            rank = _rank_of(file)
            if rank == self.rank or (self.rank == 0 and not 0 < rank < self.ranks):
                yield file

    def _foreign(self) -> Iterator[Path]:
        """Yield all that the other ranks of this run cannot have written, or be writing at this moment."""
        for file in sorted(self.path.rglob("*")) if self.path.exists() else ():
            recorded = file.relative_to(self.path).parts[0] in _FOLDERS and _RANK.search(file.name)
            if not file.is_dir() and not (recorded and 0 < _rank_of(file) < self.ranks):
                yield file

    def _is_of_another(self) -> bool:
        """Tell whether there is a recording, and not of this run; asked where all ranks get the same answer."""
        if not (self.path / RUN_FILE).is_file():
            return False
        if self.ranks > 1:
            if (
                self.launch is None or environment_number("LOCAL_WORLD_SIZE") != self.ranks
            ):  # some are on other machines
                return False
            others = [_read(file) for file in (self.path / RUN_FILE, *(self.path / RANKS).glob("*.json"))]
            if any(facts.get("launch") != self.launch for facts in others):
                return True
        left = _read(self.description)
        return bool(left) and not self._goes_on(left)

    def _goes_on(self, left: dict[str, Any]) -> bool:
        """Tell whether what a rank has left is of an attempt before: of this torchrun, or that of another node."""
        if type(left.get("restart")) is not int or left.get("pid") == os.getpid():
            return False
        if self.launch is None:
            return bool(self.restart > left["restart"])  # whoever says so
        others = sorted((self.path / RANKS).glob("*.json"))
        return any(_read(file).get("launch") == self.launch for file in (self.description, *others))

    def _put_aside(self, before: int) -> None:
        """Give the statistics of the attempt before another name; the other files have the attempt in theirs."""
        last = self.path / STATS / f"{self.name}.jsonl"
        with contextlib.suppress(OSError):
            last.rename(last.with_name(f"{self.name}-attempt-{before}.jsonl"))


def later_recording(run: Path) -> str | None:
    """Return the name of the last recording after this one: ``RUN-3``, say, for ``RUN`` or ``RUN-2``."""
    run = run.absolute()
    name, _, number = run.name.rpartition("-")
    is_numbered = number.isascii() and number.isdecimal() and (run.with_name(name) / RUN_FILE).is_file()
    own, first = (int(number), name) if is_numbered else (1, run.name)
    last = own
    while first and (run.with_name(f"{first}-{last + 1}") / RUN_FILE).is_file():
        last += 1
    return f"{first}-{last}" if last > own else None


def _read(description: Path) -> dict[str, Any]:
    facts: Any = None
    with contextlib.suppress(OSError, ValueError):
        if not description.is_file():  # a pipe would make us wait
            return {}
        facts = json.loads(description.read_bytes())
    return facts if isinstance(facts, dict) else {}


def _rank_of(file: Path) -> int:
    found = _RANK.search(file.name)
    return int(found[1] or found[2]) if found else 0
