"""Hooks of MkDocs: the command line reference, and links from the site to files outside of `docs/`.

`reference/cli.md` does not exist as a file. It is made of the argument parser, so it cannot differ from it.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI_PAGE = "reference/cli.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the command line reference."""
    from mkdocs.structure.files import File

    from pipesight.cli.command import make_parser

    files.append(File.generated(config, CLI_PAGE, content=cli_page(make_parser())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside of `docs/` lead to the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    folder = posixpath.dirname(page.file.src_uri)

    def lead_out(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target.partition("#")[0]))
        if "://" in target or path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]
        return f"[{text}]({repository}/blob/main/{path})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", lead_out, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let an example of a docstring begin with one colon: the second is markup that Markdown does not know."""
    return html.replace("::</p>", ":</p>")


def cli_page(parser: argparse.ArgumentParser) -> str:
    """Describe a command and its subcommands as a Markdown page."""
    lines = [
        "# Command line",
        "",
        "This page is generated from the argument parser; `pipesight COMMAND --help` is the same.",
    ]
    for command in _subcommands(parser):
        lines += ["", *_section(command)]
    return "\n".join([*lines, ""])


def _subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the commands that do something, in the order of their names on the command line."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        return [parser]
    return [leaf for action in nested for child in action.choices.values() for leaf in _subcommands(child)]


def _section(parser: argparse.ArgumentParser) -> list[str]:
    lines = [f"## {parser.prog}", "", _escaped(parser.description or ""), ""]
    usage = textwrap.dedent(parser.format_usage().replace("usage: ", " " * 7)).rstrip()
    lines += ["```text", usage, "```", "", "| argument | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            lines.append(f"| {_signature(action)} | {_escaped(_help(parser, action))} |")
    if parser.epilog:
        lines += ["", _escaped(parser.epilog)]
    return lines


def _signature(action: argparse.Action) -> str:
    chosen = f"{{{','.join(map(str, action.choices))}}}" if action.choices else None
    value = action.metavar or chosen or (action.dest if not action.option_strings else action.dest.upper())
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    return f"{names} `[{value}]`" if action.nargs == "?" else f"{names} `{value}`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _escaped(text: str) -> str:
    """Escape what Markdown would take for markup."""
    return re.sub(r"([|*_<>\[\]`])", r"\\\1", " ".join(text.split()))
