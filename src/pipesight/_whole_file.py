"""Files that appear only when they are complete: what was there before stays until then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside ``path`` that gets this name at the end of the block, unless something is raised in it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with partial.open("xb") as file:  # follows no link that somebody put there
            yield file
        partial.replace(path)
    except OSError as error:
        if str(error.filename) == str(partial):  # which nobody has heard of
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
