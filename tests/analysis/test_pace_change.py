"""A change of pace is named while the job runs: within 20 steps, by what takes longer; and noise is none."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pipesight.analysis.pace_change import pace_change, slower_since
from pipesight.analysis.recorded_operations import RecordedOperations
from pipesight.analysis.step_times import StepTimes
from support.made_jobs import MadeJob

BEFORE, AFTER = 30, 20
CHANGE = 10 * BEFORE + 3  # the number of the first step that is slower
MEANS = {"forward": 0.1, "backward": 0.2}


def usually(step, replica, task):
    return MEANS[task[0]] * (1 + 0.1 * random.Random(f"{step} {replica} {task}").random())


def slow_where(slow):
    """Return durations that are longer from a step on, where this holds for a replica and a task."""

    def compute(step, replica, task):
        return usually(step, replica, task) * (1.5 if step >= CHANGE and slow(replica, task) else 1)

    return compute


def sequences(step, replica, task):
    length = 0.7 + 2 * random.Random(f"{step} {replica} {task[2]}").random() ** 4
    return usually(step, replica, task) * (length if step >= CHANGE else 1)


def also_slow_before(step, replica, task):
    """Return durations of a job that has a slow rank all the time, and another one from a step on."""
    later = 2.4 if step >= CHANGE and (replica, task[1]) == (1, 1) else 1
    return usually(step, replica, task) * (1.5 if (replica, task[1]) == (0, 0) else 1) * later


def slow_links(step, replica, source, target, *, everywhere=False):
    slow = step >= CHANGE and (everywhere or (replica == 1 and {source, target} == {0, 1}))
    return 0.15 if slow else 0.001


def found_in(job, folder):
    """Return the change of pace that is found when so many steps of a job are there."""
    period = np.array(job.times()) * 1e6
    operations = job.operations(folder)
    names = np.unique(operations.step)
    none = StepTimes.none()
    zeros = {name: np.zeros(len(names)) for name in ("bubble", "bound", "turnaround")}
    whole = np.zeros(len(names), np.int64)
    counts = dict.fromkeys(("replica", "begin", "window", "minibatches", "microbatches", "samples"), whole)
    parts = np.zeros((len(none.parts), len(names)))
    times = StepTimes(
        step=names, period=period.astype(np.int64), follows=np.ones(len(names), bool), parts=parts, **zeros, **counts
    )

    def of_steps(steps):
        return RecordedOperations(operations.where(np.isin(operations.step, steps)), None, len(steps), 0.0, 0.0, 4)

    return pace_change(times, of_steps)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (MadeJob(2, 2, compute=slow_where(lambda d, task: (d, task[1]) == (1, 1))), "Rank 3 takes longer: "),
        (MadeJob(1, 2, compute=slow_where(lambda d, task: task[1] == 1)), "Rank 1 takes longer: "),
        (MadeJob(2, 2, compute=slow_where(lambda d, task: d == 1)), "Data-parallel rank 1 takes longer: "),
        (MadeJob(2, 2, compute=slow_where(lambda d, task: task[1] == 1)), "Stage 1 takes longer on all replicas: "),
        (MadeJob(2, 2, compute=slow_where(lambda d, task: True)), "Computing takes longer everywhere: "),
        (MadeJob(2, 2, compute=sequences), "Micro-batches differ: "),
        (MadeJob(2, 2, compute=also_slow_before), "Rank 3 takes longer: "),
        (MadeJob(2, 2, compute=usually, transfer=slow_links), "The link between rank 1 and rank 3 is slower: "),
        (
            MadeJob(2, 2, compute=usually, transfer=lambda *where: slow_links(*where, everywhere=True)),
            "Messages take longer on all links: ",
        ),
    ],
)
def test_named(tmp_path, job, words):
    """What takes longer is named within 20 steps, since the step in which it began, and nothing before that."""
    job = replace(job, microbatches=4)
    assert found_in(replace(job, steps=BEFORE), tmp_path) is None
    found = found_in(replace(job, steps=BEFORE + AFTER), tmp_path)
    assert found is not None
    assert abs(found.since - CHANGE) <= 20  # two steps; they are numbered by tens
    assert words in found.text
    assert found.text.startswith(f"Since step {found.since}, steps take {found.now / found.before:.2f} times as long: ")


def test_unknown_reason():
    """Steps may take longer for reasons that no task shows; a single long step, or a shorter one, is no change."""
    names = np.arange(50)
    none = StepTimes.none()
    zeros = {name: np.zeros(50) for name in ("bubble", "bound", "turnaround")}
    counts = dict.fromkeys(("replica", "begin", "window", "minibatches", "microbatches", "samples"), names * 0)
    period = np.where(names < 30, 100, 140) + names % 7
    times = StepTimes(
        step=names, period=period, follows=names >= 0, parts=np.zeros((len(none.parts), 50)), **zeros, **counts
    )
    found = pace_change(times, lambda _: None)
    assert found is not None
    assert found.since == 30
    assert found.text.endswith("The recording does not show why.")
    assert slower_since(period[::-1]) is None
    assert slower_since(np.where(names == 40, 900, 100)) is None


@pytest.mark.parametrize("noise", ["normal", "lognormal", "outliers", "two modes", "evaluations"])
def test_noise(noise):
    """Ten thousand steps of noise, seen in windows as `watch` sees them, are no change of pace."""
    made = {
        "normal": lambda dice, n: 1 + 0.1 * dice.normal(size=n),
        "lognormal": lambda dice, n: np.exp(0.3 * dice.normal(size=n)),
        "outliers": lambda dice, n: 1 + 0.3 * dice.pareto(1.5, size=n),
        "two modes": lambda dice, n: np.where(dice.random(n) < 0.5, 1.0, 1.3) + 0.01 * dice.normal(size=n),
        "evaluations": lambda dice, n: 1 + 0.03 * dice.normal(size=n) + 2 * (np.arange(n) % 10 == 9),
    }[noise]
    period = made(np.random.default_rng(17), 10_000)
    assert not [end for end in range(20, len(period), 12) if slower_since(period[max(end - 100, 0) : end]) is not None]


def wandering(steps, alike, seed):
    """Return times of steps whose noise, 5% of them, is the more like that of the step before."""
    noise = np.random.default_rng(seed).normal(size=steps) * np.sqrt(1 - alike**2)
    noise[0] /= np.sqrt(1 - alike**2)
    for k in range(1, steps):
        noise[k] += alike * noise[k - 1]
    return 1000 * np.exp(0.05 * noise)


def test_steps_that_wander_are_no_change():
    """Slow drifts of a noise that remembers are no change of pace; a real one in it is found within 20 steps."""
    assert sum(slower_since(wandering(80, 0.8, seed)) is not None for seed in range(100)) <= 2
    for seed in range(50):
        period = wandering(70, 0.5, seed)
        period[50:] *= 1.25
        found = slower_since(period)
        assert found is not None
        assert abs(found - 50) <= 10
