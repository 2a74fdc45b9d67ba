"""`pipesight convert`: a trace for other viewers, or a run as a Parquet dataset."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gzip
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from pipesight._plurals import count_of, plural
from pipesight._whole_file import whole_file
from pipesight.cli._failures import failing_in_one_line
from pipesight.runs.chrome_trace import chrome_trace
from pipesight.runs.reading.descriptions import folder_of_runs, runs_inside
from pipesight.runs.reading.profiler_trace import ProfilerTrace, profiler_traces
from pipesight.runs.reading.trace_reader import NotATraceError, TraceReader, find_traces

__all__ = ["add_to", "run"]

LEVEL = 4  # of gzip: a seventh smaller than 3, and faster than 6
STDOUT = Path("-")


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "convert",
        help="convert traces for Perfetto, or a run into a Parquet dataset",
        description="Convert a trace with all its parts, or all traces in a folder, into one file that Perfetto "
        "opens; or convert a run into a Parquet dataset. Files of PyTorch's profiler are put into one in the same way, "
        "by the clock that they share. Traces that are incomplete, or still being written, are "
        "converted as far as they go.",
    )
    add = parser.add_argument
    add(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a .pfw.gz or .pfw file, one of PyTorch's profiler, or a folder with such files",
    )
    add(
        "--to",
        choices=["chrome", "parquet"],
        default="chrome",
        help='chrome: a JSON object {"traceEvents": [...]}, for Perfetto and chrome://tracing; parquet: a folder of '
        "Parquet files with every event, for `pipesight report`, pandas, polars, DuckDB, Dask and Spark (default: "
        "chrome)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the output, compressed if it ends in .gz; - is the standard output (default: TRACE with .json instead of "
        ".pfw.gz; for a folder, trace.json in it; for Parquet, TRACE with .parquet)",
    )
    add("--force", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=run)


@failing_in_one_line("convert", subject="trace")
def run(options: argparse.Namespace) -> int:
    """Convert, print what was converted, and return the exit code."""
    if options.to == "parquet":
        _to_parquet(options)
    else:
        _to_chrome(options)
    return 0


# A dataset.


def _to_parquet(options: argparse.Namespace) -> None:
    from pipesight.runs.reading.run import open_run

    output = options.output or _stem(options.trace.absolute(), ".parquet")
    _check_folder(output, options.trace, force=options.force)
    with _written_to(output), open_run(options.trace, whole=True) as run:
        others = run.write_dataset(output) - run.events
        for note in run.notes:
            _note(str(note))
        what = f"{count_of(run.events, 'span')} and {count_of(others, 'other event')}"
        print(f"{what} of {count_of(len(run.ranks()), 'rank')}, in {output}")


def _check_folder(output: Path, trace: Path, *, force: bool) -> None:
    from pipesight.runs.reading.run import is_dataset

    if output == STDOUT:
        raise FileNotFoundError("a dataset is a folder, so it cannot go to the standard output; name a folder with -o")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"no such folder: {str(output.parent)!r}")
    if not output.exists():
        return
    if trace.exists() and output.samefile(trace):
        raise FileExistsError(f"the output is the run itself: {str(output)!r}; name another folder with -o")
    if not is_dataset(output):
        raise FileExistsError(f"the output exists, and is not a dataset: {str(output)!r}; name another folder with -o")
    if not force:
        raise FileExistsError(f"the output exists: {str(output)!r}; replace it with --force, or name another with -o")


# One file.


def _to_chrome(options: argparse.Namespace) -> None:
    readers = _readers(options.trace)
    output = options.output or _output_for(options.trace)
    _check(output, [reader.path for reader in readers], force=options.force)
    with _written_to(output), _opened(output) as file:
        for text in chrome_trace(readers, options.trace):
            file.write(text)
    _report(readers, output)


def _readers(trace: Path) -> list[TraceReader] | list[ProfilerTrace]:
    """Return the traces to read; skip files in a folder that are no traces, with a note."""
    if inside := runs_inside(trace):
        raise NotATraceError(folder_of_runs(trace, inside))
    if profiles := profiler_traces(trace):
        return profiles
    readers = []
    refusal: NotATraceError | None = None
    for path in find_traces(trace, refuse=lambda path, why: _note(f"{path}: {why}")):
        try:
            next(iter(TraceReader(path)), None)
        except NotATraceError as error:
            if path == trace:
                raise
            refusal = error
            _note(f"skipped: {error}")
        else:
            readers.append(TraceReader(path))
    if not readers and refusal is not None:
        raise refusal
    return readers


def _output_for(trace: Path) -> Path:
    return trace / "trace.json" if trace.is_dir() else _stem(trace, ".json")


def _stem(trace: Path, suffix: str) -> Path:
    return trace.with_name(trace.name.removesuffix(".gz").removesuffix(".pfw") + suffix)


def _check(output: Path, traces: Sequence[Path], *, force: bool) -> None:
    if output == STDOUT or not output.exists():
        if not output.absolute().parent.is_dir():
            raise FileNotFoundError(f"no such folder: {str(output.parent)!r}")
        return
    if output.is_dir():
        raise FileExistsError(f"the output is a folder: {str(output)!r}; name a file in it: -o {output / 'trace.json'}")
    if any(output.samefile(trace) for trace in traces):
        raise FileExistsError(f"the output is the trace itself: {str(output)!r}; name another file with -o")
    if output.is_file() and not force:
        raise FileExistsError(f"the output exists: {str(output)!r}; replace it with --force, or name another with -o")


@contextlib.contextmanager
def _opened(output: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open the output; it gets its name once it is complete."""
    if output == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif output.exists() and not output.is_file():  # a pipe, or a device
        with output.open("wb") as file:
            yield file
    else:
        with whole_file(output.resolve()) as raw:
            if output.suffix != ".gz":
                yield raw
            else:
                with gzip.GzipFile(output.stem, "wb", LEVEL, raw) as packed:
                    yield packed


# Output.


@contextlib.contextmanager
def _written_to(output: Path) -> Iterator[None]:
    """Let errors of a full disk name the output."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(output)) from None


def _report(readers: Sequence[TraceReader | ProfilerTrace], output: Path) -> None:
    if skipped := sum(reader.skipped for reader in readers):
        are = plural(skipped, "is no event", "are no events")
        _note(f"skipped: {count_of(skipped, 'line')} that {are}, in {_files([r for r in readers if r.skipped])}")
    if cut := [reader for reader in readers if not reader.whole]:
        _note(f"incomplete: {_files(cut)}; a process was killed, or is still writing")
    events = count_of(sum(reader.events for reader in readers), "event")
    if output == STDOUT:
        _note(f"{events} of {_files(readers)}")
    else:
        print(f"{events} of {_files(readers)}, in {output}")


def _files(readers: Sequence[TraceReader | ProfilerTrace]) -> str:
    return str(readers[0].path) if len(readers) == 1 else f"{len(readers)} files"


def _note(message: str) -> None:
    print(f"pipesight convert: {message}", file=sys.stderr)
