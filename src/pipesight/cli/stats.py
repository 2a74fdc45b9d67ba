"""`pipesight stats check`: what a configuration of tensor statistics selects, before a run is paid for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback

__all__ = ["add_to", "check"]

MISTAKES, UNUSABLE = 1, 2
"""Exit codes: the configuration is wrong, and what is needed to check it is missing."""


class _UnusableError(Exception):
    """The model or the features cannot be had."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser("stats", help="check a configuration of tensor statistics")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    checker = actions.add_parser(
        "check",
        help="print what a configuration selects",
        description="Check a configuration of tensor statistics, and print which layers, tensors, statistics and steps "
        "each of its sections selects. Exit code 0: it is right; 1: it has mistakes; 2: it cannot be checked.",
    )
    checker.add_argument("config", metavar="CONFIG", help="the YAML file")
    checker.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="list the layers that it selects of this model: a function without arguments, or a module object, found "
        "from the current directory, such as train:build_model",
    )
    checker.add_argument(
        "--feature-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="a folder of Python files that register features; may be given several times",
    )
    checker.set_defaults(run=check)


def check(options: argparse.Namespace) -> int:
    """Check the configuration, print what it selects, and return the exit code."""
    from pipesight.cli._stats_tables import print_sections
    from pipesight.stats.config import ConfigError, load
    from pipesight.stats.registry import default_registry

    try:
        importlib.import_module("pipesight.stats.features")  # registers those there are from the start
        registry = default_registry().copy()
        registry.load_entry_points()
        registry.load_feature_dirs(options.feature_dir)
        config = load(options.config, registry) if options.config else None
        if config is None:
            raise _UnusableError("CONFIG must be the path of a file (CONFIG: '')")
        layers = None if options.model is None else _layers(options.model)
        print_sections(config, layers, config.select(layers or ()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return MISTAKES
    except BrokenPipeError:  # as in `pipesight stats check config.yaml | head`
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _unusable(f"{error.strerror or error}{where}")
    except (_UnusableError, ImportError) as error:
        return _unusable(str(error))
    return 0


def _unusable(text: str) -> int:
    print(f"pipesight stats check: error: {text}", file=sys.stderr)
    return UNUSABLE


def _layers(name: str) -> list[str]:
    """Return the names of the layers of ``module:factory``."""
    from torch import nn

    from pipesight.stats.layers import named_layers

    found = _find(name)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise _UnusableError(f"--model must name a function or a module (--model {name}: {type(found).__name__})")
        try:
            model = found()
        except (Exception, SystemExit) as error:
            raise _UnusableError(f"--model {name} failed: {_told(error)}") from error
        if not isinstance(model, nn.Module):
            raise _UnusableError(f"--model must make an nn.Module (--model {name} made: {type(model).__name__})")
        found = model
    return [layer for layer, _ in named_layers(found)]


def _find(name: str) -> object:
    module_name, colon, attribute = name.partition(":")
    if not module_name or not colon or not attribute:
        raise _UnusableError(f"--model must be module:factory, such as train:build_model (--model {name})")
    sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _UnusableError(f"--model {name}: cannot import {module_name!r}: {_told(error)}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            from pipesight.stats._mistakes import nearest

            close = nearest(part, [word for word in dir(found) if not word.startswith("_")])
            raise _UnusableError(f"--model {name}: there is no {part!r}{close}") from None
    return found


def _told(error: BaseException) -> str:
    """Return what went wrong and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
