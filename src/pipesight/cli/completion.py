"""`pipesight completion`: what makes a shell complete commands and options, made from the parser."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["add_to", "run", "script"]

SHELLS = ("bash", "zsh", "fish")
HOW = {
    "bash": 'eval "$(pipesight completion bash)"  in ~/.bashrc',
    "zsh": 'eval "$(pipesight completion zsh)"  in ~/.zshrc, after compinit',
    "fish": "pipesight completion fish | source  in ~/.config/fish/config.fish",
}


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "completion",
        help="make a shell complete commands and options",
        description="Print a script that makes a shell complete commands and options. To have it in every shell: "
        + "; ".join(HOW.values()),
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script, and return the exit code."""
    from pipesight.cli.command import make_parser

    sys.stdout.write(script(make_parser(), options.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell."""
    return _fish(parser) if shell == "fish" else _bash(parser, zsh=shell == "zsh")


def _levels(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the parser of every command, with the words that lead to it."""
    yield path, parser
    for name, inner in _commands(parser).items():
        yield from _levels(inner, (*path, name))


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return the words that a positional argument can be, if they are known."""
    named = [action for action in parser._actions if not action.option_strings and action.choices]
    return [str(choice) for action in named for choice in action.choices or ()]


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def _is_path(action: argparse.Action) -> bool:
    return action.type is Path or str(action.metavar) in ("FILE", "DIR", "FOLDER")


# bash, which zsh understands too.

_BASH = """\
{zsh}_pipesight_files() {{
    local IFS=$'\\n'
    COMPREPLY=($(compgen -f -- "$1"))
}}
_pipesight() {{
    local word path="" current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" place=1
    local options="" words=""
    COMPREPLY=()
    while [ "$place" -lt "$COMP_CWORD" ]; do
        word="${{COMP_WORDS[place]}}"
        case "$path/$word" in
            {paths}) path="$path/$word" ;;
        esac
        place=$((place + 1))
    done
    case "$path $before" in
{values}
    esac
    case "$path" in
{levels}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$current")) ;;
        *) if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$current"))
           else _pipesight_files "$current"; fi ;;
    esac
}}
complete {how}-F _pipesight pipesight
"""


def _bash(parser: argparse.ArgumentParser, *, zsh: bool) -> str:
    paths, values, levels = [], [], []
    for path, inner in _levels(parser):
        at = "".join(f"/{name}" for name in path)
        if path:
            paths.append(at)
        flags = [flag for action in _options(inner) for flag in action.option_strings]
        levels.append(f'        "{at}") options={shlex.quote(" ".join(flags))} words="{" ".join(_words(inner))}" ;;')
        for action in filter(_takes_value, _options(inner)):
            where = "|".join(f'"{at} {flag}"' for flag in action.option_strings)
            if action.choices:
                found = f'COMPREPLY=($(compgen -W "{" ".join(map(str, action.choices))}" -- "$current"))'
            elif _is_path(action):
                found = '_pipesight_files "$current"'
            else:
                found = ":"
            # An option whose value may be left out can be followed by another one.
            kept = 'case "$current" in -*) ;; *) ' + found + "; return ;; esac"
            values.append(f"        {where}) {kept} ;;")
    return _BASH.format(
        how="" if zsh else "-o filenames ",  # zsh quotes names itself, and would put no space after words
        zsh="autoload -U +X bashcompinit && bashcompinit\n" if zsh else "",
        paths="|".join(f'"{path}"' for path in paths),
        values="\n".join(values),
        levels="\n".join(levels),
    )


# fish.


def _fish(parser: argparse.ArgumentParser) -> str:
    lines = []
    for path, inner in _levels(parser):
        commands = _commands(inner)
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path)
        here = " ".join(commands)
        none_yet = f"not __fish_seen_subcommand_from {here}" if commands else ""
        condition = "; and ".join(part for part in (seen, none_yet) if part) or "true"
        start = f"complete -c pipesight -n {shlex.quote(condition)}"
        help_of = {choice.dest: choice.help or "" for action in inner._actions for choice in _pseudo(action)}
        lines += [f"{start} -f -a {name} -d {_described(help_of.get(name))}" for name in commands]
        if not commands and (words := _words(inner)):
            lines.append(f"{start} -f -a {shlex.quote(' '.join(words))}")
        for action in _options(inner):
            flags = "".join(
                f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in action.option_strings
            )
            lines.append(f"{start}{flags}{_value(action)} -d {_described(action.help)}")
    return "\n".join(lines) + "\n"


def _pseudo(action: argparse.Action) -> list[argparse.Action]:
    return action._choices_actions if isinstance(action, argparse._SubParsersAction) else []


def _value(action: argparse.Action) -> str:
    if action.choices:
        return f" -x -a {shlex.quote(' '.join(map(str, action.choices)))}"
    if not _takes_value(action) or action.nargs == "?":
        return ""
    return " -r -F" if _is_path(action) else " -x"


def _described(text: str | None) -> str:
    """Return the first words of the help of an option."""
    first = (text or "").replace("%%", "%").partition("; ")[0].partition(" (")[0]
    return shlex.quote(first[:80])
