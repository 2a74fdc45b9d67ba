"""Plans against the clock: one setting is recorded, others are simulated from that, then all of them are timed.

Settings take turns, so that noise hits all alike. Two models: layers that sleep, whose times nothing disturbs, so that
what is off is the simulator; and transformer blocks, whose times depend on how they are run.

    record 1F1B   |  round 0   setting 7 | setting 2 | ...    then each is recorded, 1F1B again: how long its tasks took
                  |  round 1   setting 4 | setting 7 | ...    says whether it was them that the plan did not know
"""

import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Options
from benchmarks.predicted_steps import Case, Timed
from benchmarks.tables import Cell, Spread, Table, publish, show_limit
from pipesight.plan import Measured, Plan, Setting, measure, predict
from pipesight.runs.reading.run import open_run

__all__ = ["run"]

LIMIT = 0.05
SETTINGS = 15
"""Of each model in each place: 30 in one process, and 30 over ranks."""
CHUNKS = (4, 6, 8, 12, 16)
RECORDED_CHUNKS = 8
ORDERS = [
    *(("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1)),
    *(("interleaved", 2), ("looped-bfs", 2), ("zero-bubble", 2)),
    *((name, 2) for name in ("zbv-zero-bubble", "dualpipev", "v-half", "v-min")),
]
"""Schedules, and how many stages a device has in them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What is trained, and on how many devices."""

    workload: str
    title: str
    layers: int
    partitions: int
    sizes: dict[str, int]
    quick: dict[str, int]


MODELS = (
    Model("sleepers", "12 layers that sleep, batch 48", 12, 4, {}, {"microseconds": 100}),
    Model(
        "transformer",
        "8 transformer blocks, dim 256, 4 heads, sequence 64, batch 48",
        8,
        2,
        {"batch": 48},
        {"batch": 48, "dim": 32, "sequence": 8},
    ),
)


def run(options: Options) -> bool:
    """Measure both models in one process and over ranks; return whether nothing went wrong."""
    if (os.cpu_count() or 1) < 2:
        print("skipped: needs 2 cores")
        return True
    count = 4 if options.quick else SETTINGS
    places = [*itertools.product(("in one process", "over ranks"), MODELS)]
    wanted = [(place, case) for place in places for case in itertools.islice(unseen(place[1]), count)]
    sound = True
    for (place, model), group in itertools.groupby(options.part_of(wanted), key=lambda one: one[0]):
        sound &= compare(model, place, [even(model), *(case for _, case in group)], options)
    return sound


def compare(model: Model, place: str, cases: list[Case], options: Options) -> bool:
    """Time settings in one place, and show what was simulated beside it; return whether they ran."""
    title = f"{model.title}, {model.partitions} devices, {place}" + (", made smaller" if options.quick else "")
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "workload": model.workload,
            "sizes": model.quick if options.quick else model.sizes,
            "cases": [dataclasses.asdict(case) for case in cases],
            "rounds": options.rounds(11),
            "turn_seconds": options.turn_seconds(1.0),
            "recorded_steps": {"full": 30, "brief": 16, "quick": 4}[options.size],
            "folder": folder,
        }
        program = ["-m", "benchmarks.predicted_steps", json.dumps(asked)]
        if place == "over ranks":
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(model.partitions)]
            program = [*launch, *program]
        job = subprocess.run(
            [sys.executable, *program],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=sys.stderr,  # whatever a library prints
        )
        if job.returncode:
            row: list[Cell] = [title, f"CRASHED: exit status {job.returncode}: see its stderr above"]
            publish(Table(title, COLUMNS, [row]))
            return False
        answer: dict[str, Any] = json.loads(Path(folder, "answer.json").read_text(encoding="utf-8"))
        rows = compared(Path(folder), cases, [Timed(**one) for one in answer["timed"]])
    before = [row for table in options.known if table.title == title for row in table.rows]
    names = {row[0] for row in rows}
    show(title, [*rows, *(row for row in before if row[0] not in names)], options)
    return True


COLUMNS = ["setting", "ms per step", "simulated", "difference", "tasks took"]
RECORDED = " (recorded)"


def compared(folder: Path, cases: list[Case], timed: list[Timed]) -> list[list[Cell]]:
    """Return a row per setting, the recorded one first: before the rounds and after them, so that drift cancels out."""
    known = [recorded(folder / name).costs for name in ("run", "case-0")]
    rows: list[list[Cell]] = []
    for number, (case, one) in enumerate(zip(cases, timed, strict=True)):
        plans = [predict(costs, case.setting, case.balance) for costs in known]
        simulated = statistics.fmean(plan.step_seconds for plan in plans) * 1e3
        spread_of = Spread.over([seconds * 1e3 for seconds in one.seconds])
        difference = simulated / spread_of.median - 1
        took = busy(recorded(folder / f"case-{number}")) / statistics.fmean(planned(plan) for plan in plans)
        name = f"{case.name}{RECORDED if not number else ''}"
        rows.append([name, spread_of, simulated, f"{difference:+.1%}", took])
    return rows


def show(title: str, rows: list[list[Cell]], options: Options) -> None:
    """Publish the rows, and how many of the settings are within the limit."""
    differences = []
    for name, measured, simulated, *_ in rows:
        if isinstance(measured, Spread) and isinstance(simulated, float) and not str(name).endswith(RECORDED):
            differences.append(abs(simulated / measured.median - 1))
    within = sum(difference <= LIMIT for difference in differences)
    note = (
        f"Rounds: {options.rounds(11)}. {within} of {len(differences)} unseen settings are within {LIMIT:.0%}. "
        "Tasks took: how long all devices computed in a recording of that setting, divided by what the plan assumes."
    )
    publish(Table(title, COLUMNS, rows, note))
    off = len(differences) - within
    show_limit(f"settings of {len(differences)} that are off by more than {LIMIT:.0%}", off, 0, met=not off)


def recorded(folder: Path) -> Measured:
    with open_run(folder) as opened:
        return measure(opened)


def busy(found: Measured) -> float:
    """Return how long devices computed in a mini-batch."""
    return found.window_seconds * (1 - found.bubble) * found.schedule.devices


def planned(plan: Plan) -> float:
    return plan.window_seconds * (1 - plan.bubble) * plan.setting.partitions


def even(model: Model) -> Case:
    """Return the setting that is recorded."""
    setting = Setting("1f1b", model.partitions, RECORDED_CHUNKS, "except_last")
    return Case(setting, spread(model.layers, model.partitions))


def unseen(model: Model) -> Iterator[Case]:
    """Yield settings with balances, all schedules in turns; always the same ones."""
    choose, seen = random.Random(model.workload), {even(model)}
    for schedule, rounds in itertools.cycle(ORDERS):
        checkpoint = choose.choice(("always", "except_last", "never"))
        setting = Setting(schedule, model.partitions, choose.choice(CHUNKS), checkpoint, rounds)
        if setting.runs and setting.stages <= model.layers:
            case = Case(setting, shifted(spread(model.layers, setting.stages), choose))
            if case not in seen:
                seen.add(case)
                yield case


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Spread layers evenly, the larger shares first."""
    return tuple(layers // stages + (s < layers % stages) for s in range(stages))


def shifted(balance: tuple[int, ...], choose: random.Random) -> tuple[int, ...]:
    """Move up to two layers to other stages."""
    found = list(balance)
    for _ in range(choose.randint(0, 2)):
        source = choose.choice([s for s, count in enumerate(found) if count > 1] or [0])
        if found[source] > 1:
            found[source] -= 1
            found[choose.randrange(len(found))] += 1
    return tuple(found)
