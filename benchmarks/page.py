"""The page of results, docs/benchmarks.md, made of docs/benchmarks.json.

python -m benchmarks page                       write it again
python -m benchmarks page --merge GPU.json      with results of another machine
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.results import Section, load, merge, save
from benchmarks.tables import Cell, Table, text

__all__ = ["JSON", "MARKDOWN", "main", "render"]

JSON, MARKDOWN = ROOT / "docs/benchmarks.json", ROOT / "docs/benchmarks.md"

INTRODUCTION = """\
<!-- Written by `make bench` from benchmarks.json. Do not edit: `python -m benchmarks page` writes it again. -->

# Benchmarks

All figures come from `make bench`, which writes [benchmarks.json](benchmarks.json), and this page from that file. Each
section says when, where and on which code it was measured.

Contenders take turns, in another order each round, so that noise hits all of them alike. A figure is the median over
the rounds, with the lower and the upper quartile in brackets. A ratio is taken within each round, then its median. A
goal is a limit that the project has set itself.
"""

EMPTY = """
Nothing is measured yet: run `make bench`.
"""


def main(arguments: Sequence[str], order: Sequence[str]) -> int:
    """Merge files of results into that of the project, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks page", description="Write docs/benchmarks.md.")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE", help="the results (docs/benchmarks.json)")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="results of other machines")
    parser.add_argument("--out", type=Path, default=MARKDOWN, metavar="FILE", help="the page (docs/benchmarks.md)")
    chosen = parser.parse_args(arguments)
    sections = load(chosen.json)
    if chosen.merge:
        sections = merge(sections, [section for file in chosen.merge for section in load(file)], order)
        save(chosen.json, sections)
    chosen.out.write_text(render(sections), encoding="utf-8")
    print(f"wrote {chosen.out}")
    return 0


def render(sections: Sequence[Section]) -> str:
    """Return the page."""
    return INTRODUCTION + ("".join(f"\n{_section(section)}" for section in sections) or EMPTY)


def _section(section: Section) -> str:
    gpu = section.machine["gpu"]
    machine = section.machine
    where = [machine["processor"], f"{machine['cores']} cores", gpu, machine["system"], f"load {machine['load']}"]
    facts = [
        f"`{section.command}` on {section.date} UTC, commit {section.commit or 'unknown'}, in {section.seconds:.0f} s",
        ", ".join(filter(None, where)),
        ", ".join(f"{package} {version}" for package, version in section.versions.items()),
    ]
    heading = section.title.partition(":")[0].rstrip(".") + (f", on {gpu}" if gpu else "")
    lines = [f"## {heading}", "", section.title, "", *(f"- {fact}" for fact in facts)]
    if section.size == "quick":
        lines += ["", "**A quick run: it shows that the benchmark works, not how fast anything is.**"]
    return "\n".join([*lines, *(line for table in section.tables for line in _table(table)), ""])


def _table(table: Table) -> list[str]:
    lines = ["", f"### {table.title}", "", *([table.note, ""] if table.note else [])]
    lines += _grid(table.columns, table.rows)
    if table.goals:
        lines += ["", *_grid(["compared", "measured", "goal", "result"], table.goals)]
    return lines


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """A Markdown table; a row with fewer cells than columns has empty ones behind them."""
    padded = [[text(cell) for cell in row] + [""] * (len(columns) - len(row)) for row in rows]
    return [
        f"| {' | '.join(one.replace('|', '/').replace(chr(10), ' ') for one in row)} |"
        for row in (columns, ["---", *["---:"] * (len(columns) - 1)], *padded)
    ]
