"""`main`: what runs when someone types `pipesight`.

A subcommand is a module with ``add_to(subcommands)``, which adds its options and sets ``run`` to a function that takes
them and returns the exit code. What is slow to import is imported there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pipesight._version import __version__

__all__ = ["main", "make_parser"]

COMMANDS = ("demo", "run", "report", "view", "watch", "plan", "convert", "stats")

# What shells report of a program that SIGINT or SIGPIPE ended.
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
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else 2
    run: Callable[[argparse.Namespace], int] | None = getattr(options, "run", None)
    if run is None:
        parser.print_help()
        return 2
    try:
        if getattr(options, "other_path", None) is None:
            _say_if_later(getattr(options, "run_path", None))
        return run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # As in `pipesight demo | head`. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; the command reference of the documents is made of it, too."""
    parser = _Parser(prog="pipesight", description="Train PyTorch models with pipeline parallelism, and see inside.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"pipesight.cli.{name}").add_to(subcommands)
    return parser


def _say_if_later(run: Path | None) -> None:
    """Say that there is a later recording of the same name, with a number behind it."""
    if run is None:
        return
    run = run.absolute()
    name, _, number = run.name.rpartition("-")
    count = (
        int(number) if number.isascii() and number.isdecimal() and (run.with_name(name) / "run.json").is_file() else 1
    )
    first = run.name if count == 1 else name
    last = count
    while run.name and (run.with_name(f"{first}-{last + 1}") / "run.json").is_file():
        last += 1
    if last > count:
        print(f"pipesight: {first}-{last} was recorded after {run.name}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
