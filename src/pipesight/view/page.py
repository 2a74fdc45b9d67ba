"""The page of a run, or of two: one file that works offline, drawn from a payload."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesight._whole_file import whole_file
from pipesight.view.page_assets import fill_page
from pipesight.view.payload import LIMITS, Limits, page_payload

if TYPE_CHECKING:
    from pipesight.analysis.comparison import Comparison

__all__ = [
    "LIMITS",
    "MOST_BYTES",
    "Limits",
    "Served",
    "page_html",
    "page_payload",
    "write_comparison",
    "write_page",
]

MOST_BYTES = 2_000_000
"""The size limit of a page on disk: long runs show fewer steps."""

_COMMANDS = {"run_page": "pipesight report RUN --html", "comparison_page": "pipesight report RUN_A RUN_B --html"}
_INCOMPLETE = (  # the script removes it, if it was loaded
    '<p id="incomplete">This page is incomplete: the end of the file is missing. '
    "Write it again with <code>{command}</code>, or copy it again.</p>\n"
)

LEVEL = 9  # of gzip: a page is written once and sent around


@dataclass(frozen=True, slots=True)
class Served:
    """Where a page that comes from a server finds more; addresses are relative to its own."""

    events: str | None = "events"
    """Server-sent events: ``changed`` and ``ended``."""
    payload: str | None = "payload.json"
    trace: str | None = "trace"
    """The trace as one file, for Perfetto."""


def write_page(
    run_path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    attempt: int | None = None,
    steps: range | None = None,
    partition: int | None = None,
    layer: str | None = None,
    first: int | None = None,
    plans: str = "",
) -> Path:
    """Write the page of a run to ``RUN/report.html``, or to ``output``; return where it is.

    Example::

        >>> write_page("RUN")
        PosixPath('RUN/report.html')

    Args:
        run_path: The run.
        output: Where to write it.
        attempt: Which one of a run that was restarted; without, it is the last.
        steps: Only these; so are ``partition`` and ``layer``, as in `analyse`.
        partition: Only this one's losses and layers.
        layer: Only layers of this name.
        first: The step that the page opens at.
        plans: What `plan_sections` makes of plans, to be a part of it.

    Raises:
        NotARunError: There is nothing to show.
        ValueError: There is no such attempt, step, partition or layer.
    """
    from pipesight.analysis.analyse import analyse
    from pipesight.runs.reading.run import open_run

    run_path = Path(run_path)
    with open_run(run_path, attempt=attempt) as run:
        report = analyse(run, steps=steps, partition=partition, layer=layer)
        if first is not None and first not in run.steps():
            raise ValueError(
                f"step {first} was not recorded, so the page cannot open at it (steps: {_ends(run.steps())})"
            )
        limits, page = LIMITS, page_html(page_payload(run, report, steps=steps, first=first), plans=plans)
        while len(page.encode()) > MOST_BYTES and limits.blocks > 1_000:
            limits = limits.halved()
            page = page_html(page_payload(run, report, limits=limits, steps=steps, first=first), plans=plans)
    return _write(page, _beside(run_path, "report.html") if output is None else Path(output))


def write_comparison(comparison: Comparison, *more: Comparison, output: str | os.PathLike[str] | None = None) -> Path:
    """Write a page that compares runs to ``comparison.html`` in the second, or to ``output``; return where it is.

    Example::

        >>> write_comparison(compare(first, second))
        PosixPath('RUN_B/comparison.html')
    """
    from pipesight.view.payload.comparison_payload import comparison_payload

    page = page_html(comparison_payload(comparison, *more), name="comparison_page")
    return _write(page, _beside(Path(comparison.second.path), "comparison.html") if output is None else Path(output))


def _ends(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"


def _beside(run_path: Path, name: str) -> Path:
    return (run_path if run_path.is_dir() else run_path.parent) / name


def _write(page: str, path: Path) -> Path:
    with whole_file(path) as file:
        file.write(page.encode())
    return path


def page_html(
    payload: Mapping[str, Any] | None = None,
    *,
    served: Served | None = None,
    name: str = "run_page",
    plans: str = "",
) -> str:
    """Return the page with a payload in it, or, if a server has it, with nothing.

    ``served`` says where a server has more; by default, the page is a file that requests nothing. ``plans`` is a part
    of the page of a run, from `plan_sections`.
    """
    title = "" if payload is None else str(payload["title"])
    values = {
        "addresses": "\n".join(_addresses(served)),
        "incomplete": _INCOMPLETE.format(command=_COMMANDS[name]),
        "payload": "" if payload is None else _packed(payload),
        "plans": plans,
    }
    return fill_page(name, title=title or "pipesight", values=values, script=f"{name}.js", served=served is not None)


def _packed(payload: Mapping[str, Any]) -> str:
    text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), LEVEL, mtime=0)).decode()


def _addresses(served: Served | None) -> list[str]:
    if served is None:
        return []
    known = {"events": served.events, "payload": served.payload, "trace": served.trace}
    return [
        f'<meta name="pipesight-{name}" content="{html.escape(address)}">' for name, address in known.items() if address
    ]
