"""The `pipesight` command; each subcommand has a file of its own."""

from pipesight.cli.command import main

__all__ = ["main"]
