"""A distributed step: DistributedPipeline, observed and not, against torch.distributed.pipelining; two gloo processes.

Both engines live in the same two processes and take turns at the same batch, so that noise hits both alike:

    round 0   |  warm  |  pipelining  |  |  warm  |  pipesight  |  |  warm  |  pipesight, observed  |
    round 1   in another order                    ratios are taken within a round, then their median
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, Contender, Options, Outcome, Turn
from benchmarks.job import SCHEDULES, Job
from benchmarks.tables import Goal, show, show_goals
from benchmarks.turns import ANY_MODEL, BARE, BARE_OBSERVED, OBSERVED, OURS, Plan

__all__ = ["run"]

CHUNKS = 8
GOALS = [Goal(OURS, BARE, "cost", 1.02), Goal(OBSERVED, BARE, "cost", 1.05), Goal(BARE_OBSERVED, BARE, "cost", 1.03)]
GOALS_OF_ANY_MODEL = [Goal(ANY_MODEL, BARE, "cost", 1.03)]

WORKLOADS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "mlp": ("8 x (Linear(512), ReLU), batch 2048", {}, {"width": 64, "batch": 64}),
    "transformer": (
        "8 transformer blocks, dim 256, 4 heads, sequence 64, batch 32",
        {},
        {"dim": 64, "sequence": 16, "batch": 16},
    ),
    "gpt": (
        "GPT, 8 blocks, dim 256, 4 heads, sequence 64, batch 32",
        {},
        {"dim": 64, "sequence": 16, "batch": 16},
    ),
}
"""What it is, and sizes other than the usual ones: to measure, and to see that it runs."""


def run(options: Options) -> bool:
    """Measure all models under both schedules; return whether nothing went wrong."""
    if (os.cpu_count() or 1) < 2:
        print("skipped: needs 2 cores")
        return True
    sound = True
    for workload, schedule in options.part_of([*itertools.product(WORKLOADS, SCHEDULES)]):
        title, full, quick = WORKLOADS[workload]
        name = f"{schedule}, {CHUNKS} chunks: {title}" + (", made smaller" if options.quick else "")
        sound &= compare(name, schedule, workload, quick if options.quick else full, options)
    return sound


def compare(title: str, schedule: str, workload: str, sizes: dict[str, int], options: Options) -> bool:
    """Have two ranks measure one model under one schedule, and print what they found."""
    outcomes = [
        Outcome(Contender(name, Job(engine=schedule, workload=workload), Path(sys.executable)))
        for name in ((BARE, ANY_MODEL) if workload == "gpt" else (BARE, BARE_OBSERVED, OURS, OBSERVED))
    ]
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            schedule=schedule,
            workload=workload,
            sizes=sizes,
            chunks=CHUNKS,
            rounds=options.rounds(21),
            turn_seconds=options.turn_seconds(1.5),
            warm_seconds=options.turn_seconds(0.6),
            folder=folder,
        )
        job = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *("-m", "benchmarks.turns", plan.dumps()),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=sys.stderr,  # whatever a library prints
        )
        answer = Path(folder, "answer.json")
        if job.returncode == 0:
            found = json.loads(answer.read_text(encoding="utf-8"))
            title += f", {found['steps']} steps a turn"
            for outcome in outcomes:
                outcome.turns = [Turn(**turn) for turn in found["turns"][outcome.contender.name]]
        else:
            for outcome in outcomes:
                outcome.crashed = f"exit status {job.returncode} of the ranks: see their stderr above"
    sound = show(title, outcomes, reference=BARE, kind="cost")
    show_goals(outcomes, GOALS_OF_ANY_MODEL if workload == "gpt" else GOALS)
    return sound
