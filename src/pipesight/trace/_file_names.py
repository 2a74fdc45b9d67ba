"""The name of a trace file: with the rank, the restart and the process ID where several processes share a folder."""

from __future__ import annotations

import os
from pathlib import Path

from pipesight._launcher import launched_rank, restarts, with_attempt

__all__ = ["is_device", "part_path", "trace_path"]


def trace_path(given: Path, *, child: bool, compress: bool) -> Path:
    """Return the file of this process.

    >>> trace_path(Path("run.pfw"), child=False, compress=True)
    PosixPath('run.pfw.gz')
    """
    if is_device(given):
        return given
    name = given.name.removesuffix(".gz").removesuffix(".pfw")
    rank = launched_rank()
    if rank is not None and os.environ.get("WORLD_SIZE", "1") != "1" and not _names_rank(name, rank):
        name += f"-rank-{rank:05}"
    name = with_attempt(name, restarts())
    if child:
        name += f"-{os.getpid()}"
    return given.with_name(f"{name}{_suffixes(compress)}")


def part_path(path: Path, part: int, *, compress: bool) -> Path:
    """Return the file of a part; the first has no number.

    >>> part_path(Path("run.pfw.gz"), 2, compress=True)
    PosixPath('run.part2.pfw.gz')
    """
    if part == 1:
        return path
    suffixes = _suffixes(compress)
    return path.with_name(f"{path.name.removesuffix(suffixes)}.part{part}{suffixes}")


def is_device(path: Path) -> bool:
    """Tell whether a path is neither a file nor a folder, as ``/dev/null``."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _suffixes(compress: bool) -> str:
    return ".pfw.gz" if compress else ".pfw"


def _names_rank(name: str, rank: int) -> bool:
    return name == f"rank-{rank:05}" or name.startswith(f"rank-{rank:05}-restart-")
