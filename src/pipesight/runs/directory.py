"""A rank's place in a run directory: which files are its own, and whether it may write them.

`pipesight.runs.format` lists the files. The ranks of a run start at any time, so each handles its own files only.

If torchrun restarts the ranks, they write more files into the same directory, with the number of the attempt in their
names. The torchruns of several nodes may count restarts differently, so a rank takes the number after the one in the
description that it left behind::

    node of rank 0   count 0 ─────── count 0, since it was rank 1 that crashed
                     attempt 0       attempt 1: run.json is of attempt 0 and of this torchrun
    node of rank 1   count 0 ─ crash count 1
                     attempt 0       attempt 1

An earlier recording is kept: the next one of the same name goes into ``RUN-2``, ``RUN-3`` and so on. Ranks on one
machine find the same number, since each description says which start of torchrun it belongs to; ranks on several
machines cannot, and get an error that asks for another name.
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
from pipesight._path_argument import checked_path
from pipesight.runs.format import LOGS, RANKS, RUN_FILE, STATS, TRACE, rank_name

__all__ = ["RunDirectory", "later_recording"]

_RANK = re.compile(r"rank-(\d{5,})|globalrank-(\d+)")
_FOLDERS = (TRACE, STATS, LOGS, RANKS, "nvdlfw_inspect_logs")
_OF_THE_RUN = (RUN_FILE, "report.html", "comparison.html")


class RunDirectory:
    """The files of one rank in a run directory.

    Attributes:
        path: The directory.
        rank: The rank of this process.
        ranks: The number of ranks.
        restart: How often a launcher has restarted the run in this directory; settled by `claim`.
        launch: Identifies the start of torchrun, if there is one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(checked_path(path, "a run directory", "give one: observe('RUN')")).absolute()
        self.rank, self.ranks = launched_rank() or 0, max(1, environment_number("WORLD_SIZE") or 1)
        self.restart, self.launch = restarts(), launch()
        self._made = False

    @property
    def name(self) -> str:
        """The name of this rank's files, without suffix."""
        return rank_name(self.rank)

    @property
    def description(self) -> Path:
        """The file in which this rank describes the run."""
        return self.path / RUN_FILE if self.rank == 0 else self.path / RANKS / f"{self.name}.json"

    @property
    def trace(self) -> Path:
        """The trace of this rank, without suffix."""
        return self.path / TRACE / with_attempt(self.name, self.restart)

    @property
    def log(self) -> Path:
        """The file of log lines."""
        return self.path / LOGS / f"{with_attempt(self.name, self.restart)}.log"

    def traces(self) -> list[Path]:
        """Return the traces of this process and of those that it started."""
        with contextlib.suppress(OSError):
            return [file for file in (self.path / TRACE).iterdir() if file.name.startswith(self.name)]
        return []

    def claim(self, *, overwrite: bool = False) -> None:
        """Make the directory if it is free for this rank, or else the next one of its name that is.

        Raises:
            FileExistsError: It holds something other than a recording, or it is a file.
        """
        asked, number = self.path, 1
        while not overwrite and self._is_of_another():
            number += 1
            self.path = asked.with_name(f"{asked.name}-{number}")
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"a run directory must be a folder, but {str(self.path)!r} is a file; give another")
        left = _read(self.description)
        goes_on = self._goes_on(left)
        if goes_on:
            self.restart = max(self.restart, left["restart"] + 1)
        if goes_on or (self.restart and not left):  # it may have ended before it wrote anything
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
        """Remove the directory if it was made for nothing."""
        if self._made:
            with contextlib.suppress(OSError):  # another rank has written to it
                self.path.rmdir()

    def _files(self) -> Iterator[Path]:
        """Yield the files that a recording may have written."""
        for name in _OF_THE_RUN:
            if (self.path / name).is_file():
                yield self.path / name
        for folder in _FOLDERS:
            for file in sorted((self.path / folder).rglob("*")):
                if file.is_file() and _RANK.search(file.name):
                    yield file

    def _own(self) -> Iterator[Path]:
        """Yield the files of this rank; rank 0 also has those of ranks that no longer exist."""
        for file in self._files():
            rank = _rank_of(file)
            if rank == self.rank or (self.rank == 0 and not 0 < rank < self.ranks):
                yield file

    def _foreign(self) -> Iterator[Path]:
        """Yield the files that no other rank of this run can have written."""
        for file in sorted(self.path.rglob("*")) if self.path.exists() else ():
            recorded = file.relative_to(self.path).parts[0] in _FOLDERS and _RANK.search(file.name)
            if not file.is_dir() and not (recorded and 0 < _rank_of(file) < self.ranks):
                yield file

    def _is_of_another(self) -> bool:
        """Return whether there is a recording of another run; all ranks get the same answer."""
        if not (self.path / RUN_FILE).is_file():
            return False
        if self.ranks > 1:
            if self.launch is None or not self._on_one_machine:
                return False
            others = [_read(file) for file in (self.path / RUN_FILE, *(self.path / RANKS).glob("*.json"))]
            if any(facts.get("launch") != self.launch for facts in others):
                return True
        left = _read(self.description)
        return bool(left) and not self._goes_on(left)

    def _goes_on(self, left: dict[str, Any]) -> bool:
        """Return whether a rank's description is of an earlier attempt, of this torchrun or that of another node."""
        if type(left.get("restart")) is not int or left.get("pid") == os.getpid():
            return False
        if self.launch is None:
            return bool(self.restart > left["restart"])  # whatever set the count
        # A rank that moves to another machine finds that one's torchrun only in what others have left.
        others = [] if self._on_one_machine else sorted((self.path / RANKS).glob("*.json"))
        return any(_read(file).get("launch") == self.launch for file in (self.description, *others))

    @property
    def _on_one_machine(self) -> bool:
        return environment_number("LOCAL_WORLD_SIZE") == self.ranks

    def _put_aside(self, before: int) -> None:
        """Rename the statistics of the last attempt; other files have the attempt in their names."""
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
