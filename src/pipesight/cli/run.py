"""`pipesight run`: run an unchanged program, and record it into a run directory."""

from __future__ import annotations

import argparse
import atexit
import importlib.machinery
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

from pipesight._launcher import launched_rank
from pipesight.cli._quantities import quota

__all__ = ["add_to", "run"]

WRONG, FAILED, INTERRUPTED = 2, 1, 128 + 2
"""Exit codes: wrong usage; the program raised an error; it was interrupted. Else it is the program's own."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "run",
        usage="%(prog)s --out RUN [options] [-m] PROGRAM [ARGS ...]",
        help="run a program, and record it into a run directory",
        description="Run a Python program as `python PROGRAM ARGS` would, and record into a run directory: tasks and "
        "layers of pipelines, data loading, optimizers, communication, checkpoints, statistics and log lines. The "
        "program needs no change. With torchrun: torchrun --nproc-per-node 2 -m pipesight run --out RUN PROGRAM.",
    )
    add = parser.add_argument
    # Also required, but argparse would say so before it names an unknown option, such as --ot.
    add("--out", type=Path, metavar="RUN", help="the run directory; if it already holds a recording, RUN-2 is used")
    add("--overwrite", action="store_true", help="replace the recording in RUN instead")
    add("--stats", type=Path, metavar="FILE", help="log the tensor statistics that this YAML file selects")
    add("--steps", metavar="A:B", help="record only steps A to B, both included; also 10:, :20, 15 or 0:2,100:102")
    add("--every", type=int, default=1, metavar="N", help="record only every Nth step (default: 1)")
    add(
        "--logs",
        default="info",
        metavar="LEVEL",
        help="keep log lines from this level on; none keeps no lines (default: info)",
    )
    add("--no-trace", action="store_true", help="record no trace, only statistics and log lines")
    add(
        "--max-bytes",
        default="1G",
        metavar="SIZE",
        help="disk quota for trace and log lines of each rank, such as 500M or 2GiB; the oldest go first; 0 for no "
        "limit (default: 1G)",
    )
    add("-m", action="store_true", dest="module", help="PROGRAM is the name of a module, as in `python -m`")
    add("program", metavar="PROGRAM", help="a Python file, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the program, and return the exit code that it would have without pipesight."""
    try:
        start = _prepare_module(options.program) if options.module else _prepare_script(options.program)
    except OSError as error:
        return _refuse(f"can't open {options.program!r}: {error.strerror or error}")
    except ImportError as error:
        return _refuse(str(error))
    if options.out is None:
        missing = "the following arguments are required: --out"
        if any(word == "--out" or word.startswith("--out=") for word in options.arguments):
            missing += f"; options go before PROGRAM, and what follows {options.program} is its own"
        return _refuse(missing)
    from pipesight.recording import observe
    from pipesight.recording.step_sampling import StepSampling

    try:
        observation = observe(
            options.out,
            trace=not options.no_trace,
            stats=options.stats,
            logs=None if options.logs.lower() == "none" else options.logs,
            steps=StepSampling.parse(options.steps).ranges,
            every=options.every,
            max_bytes=quota(options.max_bytes),
            overwrite=options.overwrite,
        )
        observation.of_command = True
        observation.__enter__()
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            return _refuse(f"{error.filename}: {error.strerror or error}")
        return _refuse(str(error).replace("overwrite=True", "--overwrite"))
    # Python does this itself, but only after all exit handlers: registered first, this one runs last.
    atexit.register(_die_of_interrupt)
    sys.argv = [options.program, *options.arguments]
    ended_by: BaseException | None = None
    try:
        start()
        _wait_for_threads()
    except BaseException as raised:
        ended_by = raised
    try:
        observation.__exit__(None if ended_by is None else type(ended_by), ended_by, None)
    except BaseException as late:  # such as a rank that is missing at the end
        ended_by = ended_by or late
    try:
        return _end(ended_by)
    finally:  # after the traceback, if there is one
        _print_path(options.out if observation.path == options.out.absolute() else observation.path)


# The program.


def _prepare_script(program: str) -> Callable[[], None]:
    """Return a function that runs a file as ``python FILE`` does."""
    path = os.path.abspath(program)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise ImportError(f"can't find '__main__' module in {program!r}")
        folder, path = path, os.path.join(path, "__main__.py")
    else:
        folder = os.path.dirname(os.path.realpath(path))
    with io.open_code(path) as file:
        source = file.read()

    def start() -> None:
        main = _new_main(path)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
        _set_first_path(folder)
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    return start


def _prepare_module(name: str) -> Callable[[], None]:
    """Return a function that runs a module as ``python -m NAME`` does."""
    _set_first_path(os.getcwd())
    spec = _spec(name)
    if spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        raise ImportError(f"no code object available for {name}")

    def start() -> None:
        main = _new_main(spec.origin or name)
        main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
        main.__dict__["__cached__"] = spec.cached
        sys.argv[0] = spec.origin or sys.argv[0]
        exec(code, main.__dict__)

    return start


def _spec(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ImportError(f"error while finding module {name!r} ({type(error).__name__}: {error})") from error
    if spec is None:
        raise ImportError(f"no module named {name}")
    return spec


def _new_main(path: str) -> types.ModuleType:
    """Replace our ``__main__`` by a fresh one, for good: threads, exit handlers and pickle look there."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _wait_for_threads() -> None:
    """Wait for threads as Python does before it exits, so that they are recorded to their end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


# Its end.


def _end(error: BaseException | None) -> int:
    """Handle what the program raised as Python does; return the exit code."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        raise error
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if isinstance(error, KeyboardInterrupt):
        global _interrupted
        _interrupted = True
        return INTERRUPTED
    return FAILED


_interrupted = False


def _die_of_interrupt() -> None:
    """Let the parent process see that Ctrl-C ended this one, as Python does: shells then end their loops."""
    if _interrupted:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


# Messages.


def _refuse(message: str) -> int:
    print(f"pipesight run: error: {message}", file=sys.stderr)
    return WRONG


def _print_path(out: Path) -> None:
    if not launched_rank():
        print(f"pipesight: recorded in {out}; see it with: pipesight report {out}", file=sys.stderr)
