"""`pipesight demo`: train a small GPT as a pipeline, and watch its partitions work."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from pipesight._plurals import count_of
from pipesight.schedule.argument_checks import CHECKPOINT_MODES

if TYPE_CHECKING:
    from rich.console import Console

    from pipesight.demo.live_display import LiveDisplay
    from pipesight.demo.partition_activity import ActivityMonitor
    from pipesight.demo.plain_display import PlainDisplay
    from pipesight.demo.progress import Meter
    from pipesight.demo.training import Training

__all__ = ["add_to", "run", "typed_command"]

CHARACTERS = 200
INDENT = "    "
NARROWEST, WIDTH = 20, 79
"""The least and the most columns that lines are wrapped at."""
NEXT = "Next: train your own model, as README.md shows, or try other demo settings:"
RECORDED = {
    "every layer": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "LogTensorStats": {
            "enabled": True,
            "tensors": ["activation", "gradient"],
            "stats": ["mean", "std", "max"],
            "freq": 10,
        },
    }
}
"""The statistics on the page of the demo."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "demo",
        help="train a small GPT as a pipeline, and watch its partitions work",
        description="Train a character-level GPT on Shakespeare's sonnets, as a pipeline on the GPUs of this machine "
        "or else on its CPU. Show what each partition is doing, and report where the time went. Press Ctrl-C to stop.",
    )
    add = parser.add_argument
    add(
        "--partitions",
        type=int,
        metavar="N",
        help="cut the 8 layers into 1 to 8 partitions (default: the number of GPUs, or else processors, from 2 to 4)",
    )
    add(
        "--chunks",
        type=int,
        default=4,
        metavar="N",
        help="cut each batch into N micro-batches: 1 to 32 on the CPU, 1 to 512 on a GPU (default: 4)",
    )
    add(
        "--checkpoint",
        choices=CHECKPOINT_MODES,
        default="except_last",
        help="which micro-batches to recompute instead of keeping their activations (default: except_last)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=20.0, metavar="S", help="train for S seconds (default: 20)")
    length.add_argument("--steps", type=int, metavar="N", help="train for N steps instead")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed; equal seeds, partitions and chunks give equal losses (default: 0)",
    )
    add(
        "--out",
        type=Path,
        default=Path("demo-run"),
        metavar="RUN",
        help="record into this folder, replacing an earlier recording (default: demo-run)",
    )
    add(
        "--plain",
        action="store_true",
        help="print lines instead of a live display, as when the output is not a terminal",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, show the progress, and return the exit code."""
    from rich.console import Console

    from pipesight.demo.partition_activity import ActivityMonitor
    from pipesight.demo.progress import Limit, Meter
    from pipesight.demo.training import Training, one_thread, pick_partitions
    from pipesight.recording import observe

    console = Console()
    with one_thread():
        try:
            limit = Limit(seconds=options.seconds, steps=options.steps)
            training = Training(
                partitions=pick_partitions() if options.partitions is None else options.partitions,
                chunks=options.chunks,
                checkpoint=options.checkpoint,
                seed=options.seed,
            )
            recording = observe(options.out, stats=RECORDED, overwrite=True)
        except (OSError, ValueError) as error:
            print(f"pipesight demo: error: {error}", file=sys.stderr)
            return 2
        columns = max(NARROWEST, min(console.width, WIDTH))
        print(_fit(training.description, columns), end="\n\n", flush=True)
        meter, watch = Meter(limit, batch=training.batch), ActivityMonitor(len(training.pipe.partitions))
        try:
            with watch, recording, _display(training, watch, console, plain=options.plain) as display:
                while not meter.done:
                    display.show(meter.record(training.step()))
        except KeyboardInterrupt:
            print(_fit(_summary("interrupted after", meter, training, watch), columns))
            raise
        print(_fit(_summary("trained for", meter, training, watch), columns), end="\n\n", flush=True)
        verse = textwrap.indent(_fit(training.write(CHARACTERS).strip(), columns - len(INDENT)), INDENT)
        print(f"what it writes now:\n\n{verse}\n\nwhere the time went:\n", flush=True)
    code = _report(options.out)
    print(f"\n{_fit(NEXT, columns)}\n{INDENT}{typed_command()} demo --help")
    return code


def _report(recorded: Path) -> int:
    """Print the report of the recording, and write its page."""
    from pipesight.cli.command import main

    return main(["report", os.fspath(recorded), "--html"])


def _display(
    training: Training, watch: ActivityMonitor, console: Console, *, plain: bool
) -> LiveDisplay | PlainDisplay:
    from pipesight.demo.live_display import LiveDisplay
    from pipesight.demo.plain_display import PlainDisplay

    if plain or not sys.stdout.isatty() or console.is_dumb_terminal:
        return PlainDisplay()
    display = LiveDisplay(training.pipe, watch, console)
    return display if display.fits else PlainDisplay()


def _summary(begin: str, meter: Meter, training: Training, watch: ActivityMonitor) -> str:
    done = meter.latest
    if done is None:
        return f"{begin} 0 steps"
    steps = count_of(done.step, "step")
    lines = [
        f"{begin} {steps} in {done.elapsed:.1f} s, {done.samples_per_second:.0f} samples/s",
        f"loss {done.first_loss:.3f} at first, {done.loss:.3f} at last",
    ]
    if all(device.type == "cpu" for device in training.pipe.devices):  # a GPU may be busy when its worker no longer is
        shares = [min(1.0, seconds / done.elapsed) for seconds in watch.seconds]
        lines.append(f"partitions busy {', '.join(f'{share:.0%}' for share in shares)} of the time")
    return "\n".join(lines)


def _fit(text: str, columns: int) -> str:
    """Break lines that are too long at words."""
    return "\n".join(piece for line in text.splitlines() for piece in textwrap.wrap(line, columns) or [""])


def typed_command() -> str:
    """Return how to call `pipesight` again: as it was called this time."""
    typed = Path(sys.argv[0])
    if typed.name == "__main__.py" and typed.parent.name == "pipesight":
        return f"{shlex.quote(sys.orig_argv[0])} -m pipesight"
    found = shutil.which("pipesight")
    if typed.stem != "pipesight" or (found is not None and typed.is_file() and os.path.samefile(found, typed)):
        return "pipesight"
    return shlex.quote(sys.argv[0])
