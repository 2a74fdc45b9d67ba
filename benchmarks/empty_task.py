"""The cost of an empty task: 4 partitions of nn.Identity and 32 micro-batches are 128 tasks of nothing.

A task's cost bounds how finely a mini-batch can be cut before cutting it costs more than the bubble it saves.
"""

from benchmarks.harness import Contender, Options, measure
from benchmarks.job import Job
from benchmarks.tables import Goal, Quantity, show, show_goals

__all__ = ["run"]

PARTITIONS = 4
CHUNKS = 32
TASKS = PARTITIONS * CHUNKS

MICROSECONDS = Quantity("µs per task", lambda turn: turn.seconds * 1e6 / TASKS)

MODES = ("never", "always")
GOALS = [Goal(f"pipesight {mode}", f"torchgpipe {mode}", "cost", 0.50) for mode in MODES]


def run(options: Options) -> bool:
    """Measure with and without gradients; return whether no contender crashed."""
    sound = True
    for title, backward in {"forward and backward": True, "forward under no_grad": False}.items():
        outcomes = measure(
            contenders(options, backward), rounds=options.rounds(15), turn_seconds=options.turn_seconds(0.2)
        )
        sound &= show(
            f"Empty task, {title}: {PARTITIONS} x nn.Identity, {CHUNKS} micro-batches",
            outcomes,
            reference="torchgpipe never",
            kind="cost",
            quantity=MICROSECONDS,
        )
        show_goals(outcomes, GOALS, MICROSECONDS)
    return sound


def contenders(options: Options, backward: bool) -> list[Contender]:
    """Both packages in both modes, and a plain loop as the floor."""

    def job(engine: str, checkpoint: str) -> Job:
        return Job(
            engine=engine,
            workload="identity",
            sizes={"layers": PARTITIONS, "batch": CHUNKS},
            partitions=PARTITIONS,
            chunks=CHUNKS,
            checkpoint=checkpoint,
            threads=2,
            backward=backward,
        )

    jobs = {f"{engine} {mode}": job(engine, mode) for mode in MODES for engine in ("pipesight", "torchgpipe")}
    jobs["a plain loop"] = job("accumulated", "never")
    return [options.contender(name, job) for name, job in jobs.items()]
