"""The cost of observing the demo's training: everything recorded, tasks and layers alone, and no step.

All in one process: blocks of steps, observed and not, take turns. Each is timed once what it records is being written:

    round 0   |  off  |  | warm | on   |  | warm | none |          ratios are taken within a round, then their median
"""

import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness import Contender, Options, Outcome, Turn, progress
from benchmarks.job import Job
from benchmarks.tables import Goal, show, show_goals
from pipesight.demo import training
from pipesight.recording import observe

__all__ = ["run"]

OFF, TRACED, DEFAULT, LEFT_OUT = "not observed", "tasks and layers", "and log lines", "no step recorded"
NEVER = (10**9, None)
LAUNCHES = replace(training.ON_CPU, batch=512)
"""For a GPU: it waits for the host all the time, so all that the host does shows. No goal, but good to know."""
WARM = 0.6  # seconds: longer than a trace's interval, so that the writer is at work


def run(options: Options) -> bool:
    """Measure; return whether nothing went wrong."""
    sound = [on("cpu", training.ON_CPU, options)]
    if torch.cuda.is_available():
        sound.append(on("cuda:0", training.ON_GPU, options))
        sound.append(on("cuda:0", LAUNCHES, options))
    return all(sound)


def on(device: str, size: training.Size, options: Options) -> bool:
    with placed(device, size), training.one_thread(), tempfile.TemporaryDirectory() as folder:
        demo = training.Training(partitions=4, chunks=4, checkpoint="except_last", seed=0)
        numbers = itertools.count()
        variants: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
            OFF: contextlib.nullcontext,
            TRACED: lambda: observe(Path(folder) / str(next(numbers)), logs=None),
            DEFAULT: lambda: observe(Path(folder) / str(next(numbers))),
            LEFT_OUT: lambda: observe(Path(folder) / str(next(numbers)), steps=NEVER),
        }
        outcomes = {
            name: Outcome(Contender(name, Job(engine="whole", workload="demo"), Path(sys.executable)))
            for name in variants
        }
        for _ in range(10):
            demo.step()
        steps = max(4, int(options.turn_seconds(1.5) / timed(demo, 4).seconds))
        order = random.Random(0)
        rounds = options.rounds(21)
        for number in range(rounds):
            for name in order.sample(list(variants), len(variants)):
                with variants[name]():
                    warm(demo, options)
                    outcomes[name].turns.append(timed(demo, steps))
            progress(f"round {number + 1} of {rounds}")
        progress("")
    results = list(outcomes.values())
    what = "a model so small that launching kernels takes all the time" if size is LAUNCHES else "the demo's model"
    sound = show(f"Training {what} on {device}, {steps} steps a turn", results, reference=OFF, kind="cost")
    if size is not LAUNCHES:
        show_goals(results, [Goal(TRACED, OFF, "cost", 1.03), Goal(LEFT_OUT, OFF, "cost", 1.01)])
    return sound


def warm(demo: training.Training, options: Options) -> None:
    end = time.perf_counter() + options.turn_seconds(WARM)
    while time.perf_counter() < end:
        demo.step()


def timed(demo: training.Training, steps: int) -> Turn:
    wait()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        demo.step()
    wait()
    return Turn((time.perf_counter() - begin) / steps, 0, (time.process_time() - cpu) / steps)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def placed(device: str, size: training.Size) -> Iterator[None]:
    """Have the demo trained on a device, whatever there is, and in a size."""
    with (
        mock.patch.object(training, "pick_devices", lambda count: [torch.device(device)] * count),
        mock.patch.multiple(training, ON_CPU=size, ON_GPU=size),
    ):
        yield
