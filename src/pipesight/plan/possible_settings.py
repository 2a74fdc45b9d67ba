"""The settings that a search tries: those that are possible and that an engine can run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipesight.schedule.argument_checks import CHECKPOINT_MODES, SCHEDULES
from pipesight.schedule.balancing import check_partitions
from pipesight.schedule.costs import Costs
from pipesight.schedule.setting import LOOPS, Setting

__all__ = ["settings", "settings_for_each"]


def settings(
    costs: Costs,
    *,
    partitions: int,
    schedules: Sequence[str] = SCHEDULES,
    checkpoints: Sequence[str] = CHECKPOINT_MODES,
    chunks: Sequence[int] = (),
    recorded: int | None = None,
    rounds: int = 2,
) -> Iterator[Setting]:
    """Yield the requested settings that are possible and that an engine can run.

    Args:
        costs: The costs of the model.
        partitions: The number of devices.
        schedules: Names from `SCHEDULES`.
        checkpoints: Checkpoint modes.
        chunks: Numbers of micro-batches; by default powers of two, up to eight per partition and to the samples.
        recorded: The number of micro-batches of a run; numbers around it are tried, too, unless ``chunks`` is given.
        rounds: Stages per device in interleaved schedules.

    Raises:
        ValueError: There are more partitions than layers, or more chunks than samples.
    """
    check_partitions(len(costs.layers), partitions)
    most = math.inf if costs.samples is None else costs.samples
    for count in chunks:
        if not 1 <= count <= most:
            raise ValueError(f"chunks must be between 1 and the number of samples (chunks: {count}, samples: {most})")
    counts = chunks or [count for count in (2**k for k in range(11)) if count <= min(8 * partitions, most)]
    if not chunks and recorded is not None:
        counts = sorted({*counts, *(count for count in _near(recorded) if count <= most)})
    for schedule in schedules:
        for checkpoint in checkpoints:
            for count in counts:
                if count == 1 and checkpoint == "except_last" and "never" in checkpoints:
                    continue  # the only micro-batch is the last one
                for turns in _rounds(schedule, rounds):
                    setting = Setting(schedule, partitions, count, checkpoint, turns)
                    if setting.runs and setting.stages <= len(costs.layers):
                        yield setting


def settings_for_each(
    costs: Costs,
    partitions: Sequence[int],
    *,
    schedules: Sequence[str] = SCHEDULES,
    checkpoints: Sequence[str] = CHECKPOINT_MODES,
    chunks: Sequence[int] = (),
    recorded: int | None = None,
    rounds: int = 2,
) -> list[Setting]:
    """Return the possible settings for several numbers of partitions; see `settings`.

    Raises:
        ValueError: There are none.
    """
    found = [
        setting
        for n in partitions
        for setting in settings(
            costs,
            partitions=n,
            schedules=schedules,
            checkpoints=checkpoints,
            chunks=chunks,
            recorded=recorded,
            rounds=rounds,
        )
    ]
    if not found:
        raise ValueError(
            f"no schedule is possible (schedule: {','.join(schedules)}, partitions: {[*partitions]}, "
            f"chunks: {[*chunks]}, layers: {len(costs.layers)}); each stage needs a layer; interleaved "
            "schedules run chunks in equal groups of as many as there are partitions, or more; dualpipev needs at "
            "least as many chunks as stages"
        )
    return found


def _rounds(schedule: str, rounds: int) -> list[int]:
    """Return how many stages per device to try; zero-bubble is tried with one, too.

    >>> _rounds("zero-bubble", 2), _rounds("interleaved", 2), _rounds("gpipe", 2)
    ([1, 2], [2], [1])
    """
    if schedule == "zero-bubble":
        return sorted({1, rounds})
    return [rounds if schedule in LOOPS else 1]


def _near(chunks: int) -> list[int]:
    """Return the numbers of micro-batches to try around one: a quarter, half, twice and four times as many.

    >>> _near(3)
    [1, 3, 6, 12]
    """
    return [count for count in (chunks // 4, chunks // 2, chunks, 2 * chunks, 4 * chunks) if count]
