"""`pipesight demo`: train a small GPT over a few partitions, and watch them work."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipesight.demo.live import LiveDisplay
    from pipesight.demo.plain import PlainDisplay
    from pipesight.demo.progress import Meter
    from pipesight.demo.training import Training

__all__ = ["add_to", "run"]

CHARACTERS = 200
NEXT = "Next: pipesight demo --help, and README.md to train a model of your own"


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "demo",
        help="train a small GPT over four partitions, and watch them work",
        description="Train a character-level GPT on Shakespeare's sonnets, as a pipeline on the GPUs of this machine "
        "or else on its CPU, and show what each partition is doing. Ctrl-C ends it.",
    )
    add = parser.add_argument
    add("--partitions", type=int, default=4, metavar="N", help="cut the model into N partitions (4)")
    add("--chunks", type=int, default=4, metavar="N", help="cut each batch into N micro-batches (4)")
    add(
        "--checkpoint",
        choices=["always", "except_last", "never"],
        default="except_last",
        help="which micro-batches are run again before their backward instead of keeping activations (except_last)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=20.0, metavar="S", help="train for S seconds (20)")
    length.add_argument("--steps", type=int, metavar="N", help="train for N steps instead, however long they take")
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same losses (0)")
    add("--plain", action="store_true", help="print lines, as when the output is no terminal")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, show how it goes, and return the exit code."""
    from pipesight.demo.progress import Limit, Meter
    from pipesight.demo.training import Training, one_thread

    with one_thread():
        try:
            limit = Limit(seconds=options.seconds, steps=options.steps)
            training = Training(
                partitions=options.partitions, chunks=options.chunks, checkpoint=options.checkpoint, seed=options.seed
            )
        except ValueError as error:
            print(f"pipesight demo: error: {error}", file=sys.stderr)
            return 2
        print(training.description, end="\n\n", flush=True)
        meter = Meter(limit, batch=training.batch)
        try:
            with _display(training, plain=options.plain) as display:
                while not meter.done:
                    display.show(meter.record(training.step()))
        except KeyboardInterrupt:
            print(_summary("interrupted after", meter))
            raise
        print(_summary("trained for", meter), end="\n\n", flush=True)
        print(f"what it writes now:\n\n{_indented(training.write(CHARACTERS))}\n\n{NEXT}")
    return 0


def _display(training: Training, *, plain: bool) -> LiveDisplay | PlainDisplay:
    from rich.console import Console

    from pipesight.demo.live import LiveDisplay
    from pipesight.demo.plain import PlainDisplay

    console = Console()
    if plain or not sys.stdout.isatty() or console.is_dumb_terminal:
        return PlainDisplay()
    return LiveDisplay(training.pipe, console)


def _summary(begin: str, meter: Meter) -> str:
    done = meter.latest
    if done is None:
        return f"{begin} 0 steps"
    steps = "1 step" if done.step == 1 else f"{done.step} steps"
    return (
        f"{begin} {steps} in {done.elapsed:.1f} s, {done.samples_per_second:.0f} samples/s\n"
        f"loss {done.first_loss:.3f} at first, {done.loss:.3f} at last"
    )


def _indented(text: str) -> str:
    """Indent lines, and break those that are longer than any verse."""
    lines = [piece for line in text.strip().splitlines() for piece in textwrap.wrap(line, 70) or [""]]
    return textwrap.indent("\n".join(lines), "    ")
