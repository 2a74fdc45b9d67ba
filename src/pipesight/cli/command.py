"""`main`: the entry point of the `pipesight` command.

A subcommand is a module of this package, named in `COMMANDS`. Its ``add_to(subcommands)`` adds the options, and sets
``run`` to a function that takes them and returns the exit code. It imports what is slow to import inside that function.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipesight._version import __version__
from pipesight.runs.directory import later_recording

__all__ = ["main", "make_parser"]

COMMANDS = ("demo", "run", "report", "view", "watch", "plan", "convert", "stats", "completion")

# The exit codes that shells report for SIGINT and SIGPIPE.
INTERRUPTED = 128 + 2
READER_GONE = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, by default that of the process, and return the exit code.

    Example::

        >>> main(["demo", "--plain", "--steps", "20"])
    """
    parser = make_parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed why
        return stop.code if isinstance(stop.code, int) else 2
    run: Callable[[argparse.Namespace], int] | None = getattr(options, "run", None)
    if run is None:
        parser.print_help()
        return 2
    try:
        if not getattr(options, "other_paths", None):
            _mention_later(getattr(options, "run_path", None))
        return run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # As in `pipesight demo | head`. Without this, Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; the command reference in the documentation is made from it."""
    parser = _Parser(
        prog="pipesight", description="Train PyTorch models with pipeline parallelism, and see inside the pipe."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"pipesight.cli.{name}").add_to(subcommands)
    return parser


def _mention_later(run: Path | None) -> None:
    """Mention a later recording of the same name: ``RUN-2`` after ``RUN``."""
    if run is not None and (later := later_recording(run)) is not None:
        print(f"pipesight: {later} was recorded after {run.absolute().name}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong word in one line, with the nearest right one and without the usage; knows no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the known ones are; argparse would leave them to the outer parser."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = (_near(word.partition("=")[0], self._option_string_actions) for word in unknown)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, near), '')}")
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, error.message + _near(value, action.choices or ())) from None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _near(word: str, known: Iterable[str]) -> str:
    """Return the end of a message that asks which known word was meant, if one is near."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""
