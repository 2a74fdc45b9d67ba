"""Run benchmarks, print their tables, and keep them for the page of results.

For example, the last where pipesight is not installed and torchgpipe cannot be:

    python -m benchmarks --peers .venv-peers/bin/python --json docs/benchmarks.json
    python -m benchmarks cpu_step soak --peers .venv-peers/bin/python --quick
    python -m benchmarks page
    PYTHONPATH=src python3 -m benchmarks gpu --torchgpipe-path DIR_THAT_HOLDS_TORCHGPIPE --json gpu.json
"""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    any_model,
    cpu_step,
    distributed,
    empty_task,
    frames,
    gpu,
    memory,
    observing,
    page,
    planning,
    predictions,
    reading,
    scale,
    soak,
    spans,
    statistics,
    stragglers,
    uneven,
    watching_memory,
)
from benchmarks.harness import Options
from benchmarks.results import Section, describe_machine, describe_versions, load, merge, now, revision, save
from benchmarks.tables import take_tables

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS: dict[str, tuple[Callable[[Options], bool], str]] = {
    module.__name__.rpartition(".")[2]: (module.run, str(module.__doc__).partition("\n")[0])
    for module in (
        cpu_step,
        empty_task,
        any_model,
        distributed,
        scale,
        gpu,
        spans,
        statistics,
        watching_memory,
        observing,
        reading,
        planning,
        predictions,
        memory,
        frames,
        stragglers,
        uneven,
        soak,
    )
}

PARTS = " --part K/N"
"""In the command of a section whose rows were measured part by part."""


def main(arguments: list[str]) -> int:
    """Run the named benchmarks; 0 unless a contender crashes or the soak is not flat."""
    if arguments[:1] == ["page"]:
        return page.main(arguments[1:], list(BENCHMARKS))
    chosen = _parse(arguments)
    options = Options(
        # Made absolute, not resolved: the target of the link is an interpreter without the peer's packages.
        peers=None if chosen.peers is None else chosen.peers.absolute(),
        torchgpipe_path=None if chosen.torchgpipe_path is None else chosen.torchgpipe_path.absolute(),
        size=chosen.size,
        part=chosen.part,
    )
    machine, versions = describe_machine(), describe_versions(options.peers)
    print(f"$ {shlex.join(['python', '-m', 'benchmarks', *arguments])}")
    print(", ".join(f"{name} {value}" for name, value in {**machine, **versions}.items()))
    sound = True
    for name in chosen.names or BENCHMARKS:
        benchmark, line = BENCHMARKS[name]
        print(f"\n== {name}: {line}", flush=True)
        date, commit, begin = now(), revision(), time.perf_counter()
        machine = describe_machine()
        size = ("" if options.size == "full" else f" --{options.size}") + ("" if options.part[1] == 1 else PARTS)
        command = f"python -m benchmarks {name}{size}"
        before = [] if chosen.json is None or options.part[1] == 1 else load(chosen.json)
        known = next((one for one in before if (one.benchmark, one.command) == (name, command)), None)
        sound &= benchmark(options if known is None else dataclasses.replace(options, known=known.tables))
        seconds = round(time.perf_counter() - begin + (0.0 if known is None else known.seconds), 1)
        tables = take_tables()
        if chosen.json is not None and tables:
            section = Section(name, line, command, date, commit, options.size, seconds, machine, versions, tables)
            save(chosen.json, merge(load(chosen.json), [section], list(BENCHMARKS)))
    return 0 if sound else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run benchmarks and print their tables.",
        epilog="benchmarks:\n"
        + "\n".join(f"  {name:16}{line}" for name, (_, line) in BENCHMARKS.items())
        + "\n\npython -m benchmarks page [--merge FILE ...] writes docs/benchmarks.md without measuring",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="PYTHON",
        help="an interpreter that has the peers; make bench makes it",
    )
    parser.add_argument(
        "--torchgpipe-path",
        type=Path,
        metavar="DIR",
        help="a folder that holds torchgpipe, for this interpreter; goes before --peers",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.set_defaults(size="full")
    sizes.add_argument(
        "--brief",
        dest="size",
        action="store_const",
        const="brief",
        help="a third of the rounds, and shorter: minutes instead of half an hour",
    )
    sizes.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="3 short rounds: it runs, not how fast"
    )
    parser.add_argument(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="of distributed, predictions or stragglers, the K-th of N parts; with --json, its rows join those of the "
        "other parts",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="replace the sections of these benchmarks in a file of results"
    )
    chosen = parser.parse_args(arguments)
    for name in chosen.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark is named {name} (benchmarks: {', '.join(BENCHMARKS)})")
    if chosen.peers is not None and not chosen.peers.exists():
        parser.error(f"--peers must name an interpreter ({chosen.peers} is missing); run: make bench")
    return chosen


def _part(text: str) -> tuple[int, int]:
    k, _, parts = text.partition("/")
    if not (k.isdecimal() and parts.isdecimal() and 1 <= int(k) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part, such as 2/10")
    return int(k), int(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
