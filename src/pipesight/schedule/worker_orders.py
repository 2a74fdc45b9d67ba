"""The order in which the workers of one process run their tasks: a schedule by name, or an order of one's own.

Each partition on the CPU has a worker, and each GPU. Where a schedule gives several partitions to one device, as an
interleaved one does, they share a worker. Neighbouring partitions on one GPU are run as one: a micro-batch goes through
all of them before another has its turn, since on one GPU nothing runs side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from pipesight.schedule.schedule_check import check_schedule
from pipesight.schedule.simulation import simulate
from pipesight.schedule.supported_schedules import BY_NAME, by_name
from pipesight.schedule.task_orders import (
    B,
    F,
    Order,
    R,
    Schedule,
    W,
    gpipe,
    one_f_one_b,
    recomputing,
)

__all__ = ["ScheduleChoice", "Task", "WorkerOrders", "gpipe_tasks", "in_flight", "worker_orders"]

ScheduleChoice: TypeAlias = str | Schedule
"""A name, or an order."""

Task: TypeAlias = tuple[int, int, int]
"""Kind, micro-batch and partition."""


_ALIASES = {"interleaved": "interleaved-1f1b"}


@dataclass(frozen=True, slots=True, eq=False)
class WorkerOrders:
    """What the workers of one process do."""

    name: str
    """That of the schedule."""
    homes: tuple[int, ...]
    """The worker of each partition."""
    tasks: tuple[tuple[Task, ...], ...]
    """Those of each worker, in their order."""
    alone: frozenset[int]
    """The micro-batches whose forwards follow each other on one worker, in which nothing else comes between."""
    flying: int
    """How many of the other micro-batches are in the middle of their forward at once: so many threads run the model."""
    split: frozenset[tuple[int, int]]
    """The backwards, micro-batch and partition, that leave the gradients of the weights to a task of their own."""


def worker_orders(
    choice: ScheduleChoice, chunks: int, gpus: Sequence[Hashable | None], *, recompute: Sequence[bool] = ()
) -> WorkerOrders:
    """Return what the workers do in a mini-batch.

    >>> worker_orders("1f1b", 2, [None, None]).tasks[1]
    ((0, 0, 1), (2, 0, 1), (0, 1, 1), (2, 1, 1))

    ``gpus`` has the GPU of each partition, and None on the CPU. ``recompute`` says which micro-batches are recomputed,
    if any; a schedule may say itself when.

    Raises:
        ValueError: The schedule does not fit the partitions, their devices or the micro-batches, is not complete, or
            cannot run.
    """
    key = choice if isinstance(choice, Schedule) else name_of(choice)
    return _worker_orders(key, chunks, tuple(gpus), tuple(map(bool, recompute)))


@functools.lru_cache
def gpipe_tasks(kind: int, chunks: int, partitions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the forwards or the backwards of a worker's partitions in the order of GPipe: micro-batch, partition.

    Workers follow no clock: each takes its next task as soon as the input is there. All keep to one order of all tasks,
    so none waits for another that waits for it.

    >>> gpipe_tasks(F, 2, (0, 1))
    ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    homes = [int(j not in partitions) for j in range(max(partitions) + 1)]  # 0 is this worker, 1 all others
    tasks = gpipe(len(homes), chunks, device_of_stage=homes).order[0]
    return tuple((i, s) for task, s, i in tasks.tolist() if task == kind)


def name_of(choice: ScheduleChoice) -> str:
    """Return the name of a schedule, as this process knows it.

    >>> name_of("Interleaved_1F1B")
    'interleaved-1f1b'
    """
    if isinstance(choice, Schedule):
        return choice.name
    plain = str(choice).lower().replace("_", "-")
    if (kind := by_name(_ALIASES.get(plain, plain))) is None:
        raise ValueError(
            f"schedule must be one of {', '.join(map(repr, BY_NAME))}, the path of a .csv file, or a "
            f"pipesight.plan.Schedule (schedule: {choice!r})"
        )
    return kind.name


@functools.lru_cache(maxsize=64)
def _worker_orders(
    choice: str | Schedule, chunks: int, gpus: tuple[Hashable | None, ...], recompute: tuple[bool, ...]
) -> WorkerOrders:
    schedule = _named(choice, chunks, gpus) if isinstance(choice, str) else _given(choice, chunks, gpus)
    schedule = recomputing(schedule, recompute)
    tasks = [[(kind, i, s) for kind, s, i in row.tolist() if kind >= 0] for row in schedule.order]
    stages = len(gpus)
    alone = frozenset(i for i in range(chunks) if any(_follow(row, i, stages) for row in tasks))
    return WorkerOrders(
        schedule.name,
        schedule.device_of_stage,
        tuple(map(tuple, tasks)),
        alone,
        in_flight(schedule, alone),
        frozenset((i, s) for row in tasks for kind, i, s in row if kind == W),
    )


def _named(name: str, chunks: int, gpus: tuple[Hashable | None, ...]) -> Schedule:
    """Build the schedule of a name for the places of partitions."""
    kind = BY_NAME[name]
    groups = _groups(gpus)
    if len(groups) == 1 and kind.placement != "one each":
        kind = BY_NAME["1f1b"]
    if kind.placement == "v" and len(groups) % 2 and len(bottom := groups[len(groups) // 2]) > 1:
        middle, half = len(groups) // 2, len(bottom) // 2  # neighbours on the GPU where the V turns are two stages
        groups[middle : middle + 1] = [bottom[:half], bottom[half:]]
    count = len(groups)
    places = [gpus[group[0]] for group in groups]
    workers = count
    if kind.placement != "one each":
        workers = count // 2 if kind.placement == "v" or None in places else len({*places})
        if count < 4 or ((kind.placement == "v" or None in places) and count % 2):
            raise ValueError(
                f"schedule {name!r} needs several partitions on each worker: two, if they are on the CPU or in a V "
                f"(partitions: {count}); use schedule='1f1b', or an even number of partitions, at least 4"
            )
    schedule = kind.build(count, chunks, workers)
    schedule = _expanded(replace(schedule, name=name), groups)
    return _at_home(schedule, gpus)


def _given(schedule: Schedule, chunks: int, gpus: tuple[Hashable | None, ...]) -> Schedule:
    """Check an order that the user made, and bring it to the devices of the partitions."""
    n, m = schedule.stages, schedule.chunks
    if n != len(gpus):
        raise ValueError(
            f"the schedule must have as many stages as the pipeline has partitions (stages: {n}, partitions: "
            f"{len(gpus)})"
        )
    check_schedule(schedule).raise_problems()
    if chunks != m:  # a last, smaller batch
        homes = schedule.device_of_stage
        schedule = one_f_one_b(n, chunks, device_of_stage=homes)
    return _at_home(schedule, gpus)


def _groups(gpus: Sequence[Hashable | None]) -> list[list[int]]:
    """Return the partitions in groups of neighbours on one GPU."""
    groups: list[list[int]] = []
    for s, gpu in enumerate(gpus):
        if groups and gpu is not None and gpus[groups[-1][-1]] == gpu:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _expanded(schedule: Schedule, groups: Sequence[Sequence[int]]) -> Schedule:
    """Replace each stage by several, which follow each other."""
    if len(groups) == sum(map(len, groups)):
        return schedule
    homes = [schedule.device_of_stage[g] for g, group in enumerate(groups) for _ in group]
    rows = []
    for row in schedule.order:
        tasks: list[tuple[int, int, int]] = []
        for kind, g, i in row.tolist():
            if kind >= 0:
                tasks += [(kind, s, i) for s in (groups[g] if kind in (F, R) else reversed(groups[g]))]
        rows.append(tasks)
    return Schedule(schedule.name, len(homes), schedule.chunks, tuple(homes), _padded(rows))


def _at_home(schedule: Schedule, gpus: Sequence[Hashable | None]) -> Schedule:
    """Let the devices of a schedule that are one GPU share a worker."""
    place: dict[int, Hashable | None] = {}
    for s, device in enumerate(schedule.device_of_stage):
        if place.setdefault(device, gpus[s]) != gpus[s]:
            others = [k for k, home in enumerate(schedule.device_of_stage) if home == device]
            raise ValueError(
                f"schedule {schedule.name!r} runs partitions {', '.join(map(str, others))} on one device, but they are "
                f"on {', '.join(_called(gpus[k]) for k in others)}; put them on one: Pipeline(..., devices=[...])"
            )
    numbers: dict[Hashable, int] = {}
    worker = {d: numbers.setdefault(("worker", d) if gpu is None else gpu, len(numbers)) for d, gpu in place.items()}
    if len(numbers) == len(place) and all(d == w for d, w in worker.items()):
        return schedule
    begins = simulate(schedule, np.ones((4, 1, 1))).begin
    merged: list[list[tuple[int, int, int]]] = [[] for _ in numbers]
    for device, row in enumerate(schedule.order):
        if device in worker:
            merged[worker[device]] += [(kind, s, i) for kind, s, i in row.tolist() if kind >= 0]
    for tasks in merged:
        tasks.sort(key=lambda task: (float(begins[task]), -task[1]))
    homes = tuple(worker[d] for d in schedule.device_of_stage)
    return Schedule(schedule.name, schedule.stages, schedule.chunks, homes, _padded(merged))


def _called(gpu: Hashable | None) -> str:
    return "the CPU" if gpu is None else str(gpu)


def _padded(rows: Sequence[Sequence[tuple[int, int, int]]]) -> Order:
    order = np.full((len(rows), max(map(len, rows)), 3), -1, np.int32)
    for device, tasks in enumerate(rows):
        order[device, : len(tasks)] = tasks
    return order


def _follow(tasks: Sequence[Task], i: int, stages: int) -> bool:
    """Whether all forwards of a micro-batch follow each other here."""
    wanted = [(F, i, s) for s in range(stages)]
    if wanted[0] not in tasks:
        return False
    at = tasks.index(wanted[0])
    return list(tasks[at : at + stages]) == wanted


def in_flight(schedule: Schedule, alone: frozenset[int] = frozenset()) -> int:
    """Return how many micro-batches are between their first forward and their last at once, if none waits to begin.

    >>> in_flight(one_f_one_b(3, 8))
    3

    With fewer threads than that, a worker would be idle though there is a forward that it could begin. A backward takes
    twice as long as a forward here. Those ``alone`` are not counted.
    """
    times = np.ones((4, schedule.stages, schedule.chunks))
    times[B] = np.where(schedule.split, 1.0, 2.0)
    found = simulate(schedule, times)
    begin, end = (np.delete(column, [*alone]) for column in (found.begin[F, 0], found.end[F, -1]))
    at_once = (begin[:, None] <= begin) & (begin < end[:, None])
    return int(at_once.sum(axis=0).max(initial=0))
