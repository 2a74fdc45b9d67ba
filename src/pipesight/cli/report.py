"""`pipesight report`: how large the bubble is, why, and what to change."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesight.cli._colour import in_colour
from pipesight.cli._failures import fail, failing_in_one_line

if TYPE_CHECKING:
    from pipesight.analysis.report import Report

__all__ = ["add_to", "run"]

OVER = 3
"""Exit code: the bubble is larger than allowed."""
MOST_OTHERS = 25
"""How many runs are compared with the first; each has a letter."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "report",
        help="show how large the bubble of a run is, why, and what to change",
        description="Show how large the bubble of a run is, why, and what to change; or compare runs. The bubble "
        "is the share of the time from the first forward to the last backward of a mini-batch in which partitions are "
        "idle.",
        epilog="exit codes: 0 success; 1 reading or writing failed; 2 no such run, attempt, step, partition or layer; "
        "3 the bubble is larger than --fail-over allows",
    )
    add = parser.add_argument
    add("run_path", type=Path, metavar="RUN", help="a run directory, a folder of traces, one trace, or a training log")
    add(
        "other_paths", type=Path, metavar="RUN_B", nargs="*", default=[], help="further runs, to compare with the first"
    )
    add("--json", action="store_true", help="print JSON, described by report.schema.json")
    add("--steps", type=_steps, metavar="A:B", help="only steps A to B, both included; also 10:, :20 or 15")
    add("--partition", type=int, metavar="J", help="only partition J and its layers")
    add("--layer", metavar="NAME", help="only layers of this name; * matches any part of it")
    add("--attempt", type=int, metavar="N", help="attempt N of a restarted run, counted from 0 (default: the last)")
    add("--step", type=int, metavar="N", help="draw step N, and open the page at it (default: a typical step)")
    add(
        "--width",
        type=_width,
        metavar="W",
        help="columns of the output, at least 40 (default: the width of the terminal)",
    )
    add(
        "--html",
        nargs="?",
        type=Path,
        const=True,
        metavar="FILE",
        help="also write an HTML page to FILE (default: report.html in RUN, or next to it if RUN is a file; of "
        "several runs, comparison.html in RUN_B)",
    )
    add(
        "--fail-over",
        type=_share,
        metavar="SHARE",
        help="exit with code 3 if the bubble is larger than 0.3 or 30%%, for example",
    )
    parser.set_defaults(run=run)


@failing_in_one_line("report")
def run(options: argparse.Namespace) -> int:
    """Report, and return the exit code."""
    first = latest = _analyse(options.run_path, options)
    if len(options.other_paths) > MOST_OTHERS:
        raise ValueError(f"at most {MOST_OTHERS + 1} runs can be compared (runs: {len(options.other_paths) + 1})")
    if options.other_paths:
        from pipesight.analysis.comparison import compare
        from pipesight.view.comparison_json import comparison_as_json
        from pipesight.view.comparison_text import render_comparison
        from pipesight.view.page import write_comparison

        comparisons = []
        for path in options.other_paths:
            latest = _analyse(path, options)
            comparisons.append(compare(first, latest))
        _print(comparison_as_json(*comparisons) if options.json else render_comparison(*comparisons, **_look(options)))
    elif options.json:
        from pipesight.view.report_json import as_json

        _print(as_json(first))
    else:
        from pipesight.view.text_report import render

        _print(render(first, step=options.step, **_look(options)))
    if options.html is not None:
        output = None if options.html is True else options.html
        page = write_comparison(*comparisons, output=output) if options.other_paths else _write_page(options, output)
        print(f"the page is {page}", file=sys.stderr if options.json else sys.stdout)
    if options.fail_over is not None and latest.overall is None:
        raise ValueError("--fail-over: the bubble cannot be computed, since no step of a pipeline is complete")
    if options.fail_over is not None and latest.overall is not None and latest.overall.bubble > options.fail_over:
        return fail("report", f"the bubble is {latest.overall.bubble:.1%}, over {options.fail_over:.1%}", OVER)
    return 0


def _analyse(path: Path, options: argparse.Namespace) -> Report:
    from pipesight.runs.reading.run import open_run

    with open_run(path, attempt=options.attempt) as opened:
        from pipesight.analysis.analyse import analyse  # most of what it needs has been imported by now

        return analyse(opened, steps=options.steps, partition=options.partition, layer=options.layer)


def _write_page(options: argparse.Namespace, output: Path | None) -> Path:
    from pipesight.view.page import write_page

    chosen = {name: getattr(options, name) for name in ("attempt", "steps", "partition", "layer")}
    return write_page(options.run_path, output=output, first=options.step, **chosen)


def _look(options: argparse.Namespace) -> dict[str, Any]:
    """Return the width, and whether the output takes colours and more than ASCII."""
    width = options.width or min(shutil.get_terminal_size((80, 24)).columns, 200)
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return {"width": width, "colour": in_colour(), "ascii": not encoding.startswith("utf")}


def _print(what: str | dict[str, Any]) -> None:
    text = what if isinstance(what, str) else json.dumps(what, indent=2, allow_nan=False) + "\n"
    sys.stdout.write(text)
    sys.stdout.flush()


# Options.


def _steps(text: str) -> range:
    """Read ``A:B``, ``A:``, ``:B`` or ``A``."""
    parts: Sequence[str] = text.split(":")
    try:
        first = int(parts[0]) if parts[0] else 0
        last = first if len(parts) == 1 else int(parts[1]) if parts[1] else 2**62
        if len(parts) <= 2 and text != "" and 0 <= first <= last:
            return range(first, last + 1)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"steps must be A:B with A <= B, such as 10:20 (steps: {text!r})")


def _width(text: str) -> int:
    if text.isascii() and text.isdecimal() and 40 <= int(text) <= 10_000:
        return int(text)
    raise argparse.ArgumentTypeError(f"the width must be an integer from 40 to 10000 (width: {text!r})")


def _share(text: str) -> float:
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if 0 <= share <= 1:
        return share
    raise argparse.ArgumentTypeError(f"a share must be between 0 and 1, such as 0.3 or 30% (share: {text!r})")
