"""`pipesight stats check`: check a configuration of tensor statistics before a run."""

from __future__ import annotations

import argparse
import importlib
import sys

__all__ = ["add_to", "check"]

MISTAKES, UNUSABLE = 1, 2
"""Exit codes: the configuration has mistakes; it cannot be checked."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser("stats", help="check a configuration of tensor statistics")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    checker = actions.add_parser(
        "check",
        help="print what a configuration selects, and its mistakes",
        description="Check a configuration of tensor statistics, and print which layers, tensors, statistics and steps "
        "each section selects.",
        epilog="exit codes: 0 the configuration is valid; 1 it has mistakes; 2 it cannot be checked",
    )
    checker.add_argument("config", metavar="CONFIG", help="the YAML file")
    checker.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="list the layers that it selects in this model: a function without arguments, or an nn.Module, importable "
        "from the current directory, such as train:build_model",
    )
    checker.add_argument(
        "--feature-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="a folder of Python files that register features; can be repeated",
    )
    checker.set_defaults(run=check)


def check(options: argparse.Namespace) -> int:
    """Check the configuration, print what it selects, and return the exit code."""
    from pipesight.cli._model_option import ModelError
    from pipesight.cli._stats_selection_table import print_sections
    from pipesight.stats.config import ConfigError, load
    from pipesight.stats.registry import default_registry

    try:
        importlib.import_module("pipesight.stats.builtin_features")  # registers the built-in features
        registry = default_registry().copy()
        registry.load_entry_points()
        registry.load_feature_dirs(options.feature_dir)
        config = load(options.config, registry) if options.config else None
        if config is None:
            return _unusable("CONFIG must be the path of a file (CONFIG: '')")
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
    except (ModelError, ImportError) as error:
        return _unusable(str(error))
    return 0


def _unusable(text: str) -> int:
    print(f"pipesight stats check: error: {text}", file=sys.stderr)
    return UNUSABLE


def _layers(name: str) -> list[str]:
    """Return the names of the layers of ``module:factory``."""
    from pipesight.cli._model_option import find_model
    from pipesight.stats.layer_names import named_layers

    return [layer for layer, _ in named_layers(find_model(name))]
