"""One CUDA device: the cost of the pipeline's own work, large and tiny layers, and peak memory.

Partitions that share a device win no time, so what shows is what the pipeline adds.
"""

import importlib.util

import torch

from benchmarks.harness import Contender, Options, measure
from benchmarks.job import PIPELINES, Job
from benchmarks.tables import MEBIBYTES, Goal, show, show_goals

__all__ = ["run"]

CHUNKS = 8
CHECKPOINTS = ("never", "except_last", "always")
ACCUMULATED = "plain, micro-batches"
WHOLE = "plain, whole batch"

# A few GB each when nothing is checkpointed.
MEMORY_SIZES = {
    "unet": {"depth": 4, "width": 64, "image": 128, "batch": 64},
    "transformer": {"layers": 8, "dim": 1024, "heads": 16, "sequence": 256, "batch": 32},
}


def run(options: Options) -> bool:
    """Measure time, then memory; return whether no contender crashed."""
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return True
    parts = [large(options), tiny(options), steps(options)]
    return all([*parts, *(memory(options, workload) for workload in MEMORY_SIZES)])


def large(options: Options) -> bool:
    """Layers that fill the device: the pipeline should cost nothing over feeding micro-batches by hand."""
    outcomes = measure(
        contenders(options, "mlp", {"width": 4096, "batch": 16384}),
        rounds=options.rounds(7),
        turn_seconds=options.turn_seconds(0.5),
    )
    goals = [Goal(row("pipesight", n, "never"), ACCUMULATED, "cost", 1.03) for n in (1, 4)]
    sound = show("GPU step: 8 x (Linear(4096), ReLU), batch 16384", outcomes, reference=ACCUMULATED, kind="cost")
    show_goals(outcomes, goals)
    return sound


def tiny(options: Options) -> bool:
    """Layers that leave the device idle: the pipeline's own cost is all there is."""
    outcomes = measure(
        contenders(options, "tiny", {}), rounds=options.rounds(11), turn_seconds=options.turn_seconds(0.2)
    )
    reference = row("torchgpipe", 4, "never")
    sound = show("GPU step: 8 x Linear(64), batch 512", outcomes, reference=reference, kind="cost")
    show_goals(outcomes, [Goal(row("pipesight", 4, "never"), reference, "cost", 0.60)])
    return sound


def steps(options: Options) -> bool:
    """GPT-2 of transformers: with the loss inside steps, no more is alive than in the plain model's loop."""
    if importlib.util.find_spec("transformers") is None:
        print("skipped: needs transformers")
        return True
    jobs = {ACCUMULATED: pipeline_job("accumulated", "gpt2", {})}
    jobs |= {backward_row(n): pipeline_job("any_model", "gpt2", {}, n) for n in (1, 4)}
    jobs |= {
        step_row(schedule, n): pipeline_job(f"step {schedule}", "gpt2", {}, n)
        for schedule, n in (("1f1b", 1), ("1f1b", 4), ("zero-bubble", 4))
    }
    found = [options.contender(name, job) for name, job in jobs.items()]
    outcomes = measure(found, rounds=options.rounds(9), turn_seconds=options.turn_seconds(2.0))
    title = "GPT-2, 124 million parameters, bfloat16, batch 64 x 512"
    sound = show(f"GPU step: {title}", outcomes, reference=ACCUMULATED, kind="cost")
    rows = [backward_row(4), *(step_row("1f1b", n) for n in (1, 4))]
    show_goals(outcomes, [Goal(row, ACCUMULATED, "cost", 1.03) for row in rows])
    sound &= show(f"GPU memory: {title}", outcomes, reference=ACCUMULATED, kind="cost", quantity=MEBIBYTES)
    show_goals(outcomes, [Goal(step_row("1f1b", 1), ACCUMULATED, "cost", 1.15)], MEBIBYTES)
    return sound


def backward_row(partitions: int) -> str:
    return f"Pipeline and backward(), {partitions} partition{'s' * (partitions > 1)}"


def step_row(schedule: str, partitions: int) -> str:
    return f"Pipeline.step {schedule}, {partitions} partition{'s' * (partitions > 1)}"


def contenders(options: Options, workload: str, sizes: dict[str, int]) -> list[Contender]:
    """Both packages with 1 and 4 partitions, with and without checkpoints, and the plain model."""
    jobs = {
        ACCUMULATED: pipeline_job("accumulated", workload, sizes),
        WHOLE: pipeline_job("whole", workload, sizes),
    }
    jobs |= {
        row(engine, n, mode): pipeline_job(engine, workload, sizes, n, mode)
        for mode in ("never", "always")
        for n in (1, 4)
        for engine in PIPELINES
    }
    return [options.contender(name, job) for name, job in jobs.items()]


def memory(options: Options, workload: str) -> bool:
    """Peak memory of a step in each checkpoint mode; it varies a little where worker threads race."""
    sizes = MEMORY_SIZES[workload]
    sound = True
    for n in (1, 4):
        jobs = {
            row(engine, n, mode): pipeline_job(engine, workload, sizes, n, mode)
            for mode in CHECKPOINTS
            for engine in PIPELINES
        }
        outcomes = measure([options.contender(name, job) for name, job in jobs.items()], rounds=5, turn_seconds=0.0)
        shape = ", ".join(f"{key} {size}" for key, size in sizes.items())
        sound &= show(
            f"GPU memory: {workload}, {shape}; partitions {n}",
            outcomes,
            reference=row("torchgpipe", n, "never"),
            kind="cost",
            quantity=MEBIBYTES,
        )
        goals = [Goal(row("pipesight", n, mode), row("torchgpipe", n, mode), "cost", 1.00) for mode in CHECKPOINTS]
        show_goals(outcomes, goals, MEBIBYTES)
    return sound


def row(engine: str, partitions: int, checkpoint: str) -> str:
    return f"{engine} {partitions} partition{'s' * (partitions > 1)}, {checkpoint}"


def pipeline_job(
    engine: str, workload: str, sizes: dict[str, int], partitions: int = 1, checkpoint: str = "never"
) -> Job:
    return Job(
        engine=engine,
        workload=workload,
        sizes=sizes,
        partitions=partitions,
        chunks=CHUNKS,
        checkpoint=checkpoint,
        device="cuda:0",
    )
