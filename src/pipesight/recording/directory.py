"""The run directory: which files are whose, and whether they may be written.

    RUN/run.json                    of rank 0, as are all files of the whole run
    RUN/ranks/rank-00001.json       the same facts of other ranks
    RUN/trace/rank-00000.pfw.gz
    RUN/stats/rank-00000.jsonl
    RUN/logs/rank-00000.log

The ranks of a run begin at any time, so each looks after its own files only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["RunDirectory"]

_RANK = re.compile(r"rank-(\d{5,})|globalrank-(\d+)")
_FOLDERS = ("trace", "stats", "logs", "ranks", "nvdlfw_inspect_logs")
_OF_THE_RUN = ("run.json", "report.html")


class RunDirectory:
    """The files of one rank in a run directory.

    Attributes:
        path: The directory.
        rank: Of this process.
        ranks: How many there are.
        restart: How often a launcher has started the run anew, without a new directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise ValueError("the path of a run directory must not be empty; name one: observe('RUN')")
        self.path = Path(path).absolute()
        self.rank, self.ranks = _number("RANK", 0), max(1, _number("WORLD_SIZE", 1))
        self.restart = _number("TORCHELASTIC_RESTART_COUNT", 0)

    @property
    def name(self) -> str:
        """What the files of this rank are called."""
        return f"rank-{self.rank:05}"

    @property
    def description(self) -> Path:
        """The file that describes the run, as this rank sees it."""
        return self.path / "run.json" if self.rank == 0 else self.path / "ranks" / f"{self.name}.json"

    @property
    def trace(self) -> Path:
        """What the trace of this rank is called, but for its suffix."""
        return self.path / "trace" / self.name

    @property
    def log(self) -> Path:
        """The file of log lines."""
        again = f"-restart-{self.restart}" if self.restart else ""
        return self.path / "logs" / f"{self.name}{again}.log"

    def traces(self) -> list[Path]:
        """Return the files that this process and those that it started have written so far."""
        with contextlib.suppress(OSError):
            return [file for file in (self.path / "trace").iterdir() if file.name.startswith(self.name)]
        return []

    def claim(self, *, overwrite: bool = False) -> None:
        """Make the directory, or see that it is free for this rank.

        Raises:
            FileExistsError: It is not, or its name is that of a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"a run directory must be a folder, but {str(self.path)!r} is a file; name another")
        if self.restart:
            self._put_aside()
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
        self.path.mkdir(parents=True, exist_ok=True)

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

    def _put_aside(self) -> None:
        """Give the statistics of the attempt before another name; the other files have the attempt in theirs."""
        last = self.path / "stats" / f"{self.name}.jsonl"
        with contextlib.suppress(OSError):
            last.rename(last.with_name(f"{self.name}-attempt-{self.restart - 1}.jsonl"))


def _rank_of(file: Path) -> int:
    found = _RANK.search(file.name)
    return int(found[1] or found[2]) if found else 0


def _number(variable: str, default: int) -> int:
    given = os.environ.get(variable, "")
    return int(given) if given.isdecimal() and given.isascii() else default
