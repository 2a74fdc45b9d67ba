"""How commands that read or write files fail: with one line on stderr, and an exit code."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

__all__ = ["FAILED", "WRONG", "fail", "failing_in_one_line"]

FAILED, WRONG = 1, 2
"""Exit codes: reading or writing failed; no such run, or wrong usage."""

Run = Callable[[argparse.Namespace], int]


def fail(command: str, message: str, code: int) -> int:
    """Print why a command failed; return the exit code."""
    print(f"pipesight {command}: error: {message}", file=sys.stderr)
    return code


def failing_in_one_line(command: str, *, subject: str = "run_path") -> Callable[[Run], Run]:
    """Let the function that runs a command raise what it cannot do: as ``ValueError``, or ``OSError`` of a file.

    ``subject`` is the option with the path to name where an ``OSError`` does not.
    """

    def decorate(run: Run) -> Run:
        @functools.wraps(run)
        def told(options: argparse.Namespace) -> int:
            try:
                return run(options)
            except BrokenPipeError:
                raise
            except OSError as error:
                if error.errno is None and isinstance(error, (FileNotFoundError, FileExistsError)):  # one of ours
                    return fail(command, str(error), WRONG)
                where = error.filename or getattr(options, subject)
                return fail(command, f"{where}: {error.strerror or error}", FAILED)
            except ValueError as error:
                return fail(command, str(error), WRONG)

        return told

    return decorate
