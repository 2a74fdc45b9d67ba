"""A model as it is, cut by `Pipeline`, against the same layers in `GPipe(nn.Sequential)`: 2 partitions on 2 cores.

Which models can be cut at all is in docs/any-model-table.md, which `python -m benchmarks.model_table` writes.
"""

import os

from benchmarks.harness import Options, measure
from benchmarks.job import Job
from benchmarks.tables import Goal, show, show_goals

__all__ = ["run"]

PLAIN = "plain, micro-batches"
CHUNKS = 8


def run(options: Options) -> bool:
    """Measure both ways, without checkpointing and with it; return whether no contender crashed."""
    if (os.cpu_count() or 1) < 2:
        print("skipped: needs 2 cores")
        return True
    jobs = {PLAIN: Job(engine="accumulated", workload="gpt", chunks=CHUNKS)}
    for checkpoint in ("never", "except_last"):
        for name, engine in (("Pipeline", "any_model"), ("GPipe", "pipesight")):
            jobs[f"{name} {checkpoint}"] = Job(
                engine=engine, workload="gpt", partitions=2, chunks=CHUNKS, checkpoint=checkpoint, threads=2
            )
    jobs["step 1f1b never"] = Job(
        engine="step 1f1b", workload="gpt", partitions=2, chunks=CHUNKS, checkpoint="never", threads=2
    )
    contenders = [options.contender(name, job) for name, job in jobs.items()]
    outcomes = measure(contenders, rounds=options.rounds(15), turn_seconds=options.turn_seconds(0.5))
    title = "GPT: 8 blocks, dim 256, 4 heads, sequence 64, batch 32"
    sound = show(title, outcomes, reference=PLAIN, kind="speed")
    show_goals(
        outcomes, [Goal(f"Pipeline {mode}", f"GPipe {mode}", "speed", 0.97) for mode in ("never", "except_last")]
    )
    return sound
