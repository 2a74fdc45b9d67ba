"""What to change, and what that would gain: simulated where it can be, at most what is lost where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesight.pipeline.partitioning import balance_cost
from pipesight.plan.schedules import Schedule, gpipe, one_f_one_b, recomputed
from pipesight.plan.simulation import simulate
from pipesight.report.analysis.facts import PipelineFacts
from pipesight.report.analysis.layers import Layer
from pipesight.report.analysis.links import Link, places_to_look_at
from pipesight.report.reading.tables import BACKWARD, FORWARD, RECOMPUTE

__all__ = ["Change", "Situation", "find_changes"]

WORTH = 0.01
"""Of the step, what a change must gain to be named."""
MOST = 3
DOUBT = 0.5
"""What a gain that is an upper limit counts for, against one that was simulated."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do, and the share of the step that it would save."""

    what: str
    why: str
    gain: float
    simulated: bool
    """If not, the gain is what there is to gain at most."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What changes are judged by. Times in microseconds."""

    facts: PipelineFacts
    schedule: Schedule | None
    """The order that was recorded."""
    durations: NDArray[np.float64]
    """The mean time of tasks, by phase, partition and micro-batch."""
    layers: Sequence[Layer]
    period: float
    """The mean of a step."""
    minibatches: float
    """In a step."""
    parts: Mapping[str, float]
    """Of the mean step, by name."""
    turnaround: float = 0.0
    """Of the host gaps, what lies between forward and backward."""
    links: Sequence[Link] = ()
    """Between ranks."""


def find_changes(situation: Situation) -> list[Change]:
    """Return at most three changes that gain more than 1% of the step each, the best first.

    Gains do not add up: each is that of one change alone.
    """
    found = [change for change in (*_simulated(situation), *_limits(situation)) if change.gain > WORTH]
    found.sort(key=lambda change: -change.gain * (1 if change.simulated else DOUBT))
    return found[:MOST]


# What can be simulated.


def _simulated(situation: Situation) -> Iterator[Change]:
    if situation.schedule is None:
        return
    pipe = _Pipe(situation)
    for change in (_balance(pipe), _chunks(pipe), _checkpoint(pipe)):
        if change is not None:
            yield change


class _Pipe:
    """A pipeline in which all tasks of a phase in one partition take the same time."""

    def __init__(self, situation: Situation) -> None:
        assert situation.schedule is not None
        self.situation, self.schedule = situation, situation.schedule
        self.n, self.m = self.schedule.stages, self.schedule.chunks
        counts = np.maximum((situation.durations > 0).sum(axis=2), 1)
        self.times = situation.durations.sum(axis=2) / counts
        self.make = _maker(self.schedule)
        self.homes = self.schedule.device_of_stage
        self.apart = len({*self.homes}) == self.n

    def span(self, schedule: Schedule, times: NDArray[np.float64]) -> float:
        """Return how long a mini-batch takes."""
        return float(simulate(schedule, times[:, :, None]).makespan)

    @property
    def recorded(self) -> float:
        """How long it takes as it is."""
        return self.span(self.schedule, self.times)

    def gain(self, saved: float) -> float:
        """Return the share of a step that is saved with some time in each mini-batch."""
        return saved * self.situation.minibatches / max(self.situation.period, 1e-9)


def _maker(schedule: Schedule) -> Callable[[int, Sequence[bool]], Schedule] | None:
    """Return what makes such a schedule for other micro-batches, if it is one that has a name."""
    again = np.zeros(schedule.chunks, bool)
    again[schedule.order[..., 2][schedule.order[..., 0] == RECOMPUTE]] = True

    def by_gpipe(chunks: int, recompute: Sequence[bool]) -> Schedule:
        homes = schedule.device_of_stage
        return gpipe(schedule.stages, chunks, recompute=recompute, device_of_stage=homes, joined=schedule.joined)

    def by_1f1b(chunks: int, recompute: Sequence[bool]) -> Schedule:
        return one_f_one_b(schedule.stages, chunks, recompute=recompute, device_of_stage=schedule.device_of_stage)

    for make in (by_gpipe, by_1f1b):
        if np.array_equal(make(schedule.chunks, again.tolist()).order, schedule.order):
            return make
    return None


def _balance(pipe: _Pipe) -> Change | None:
    """Move layers between partitions, so that the slowest is as fast as can be."""
    layers = pipe.situation.layers
    if pipe.n < 2 or not pipe.apart or len(layers) < pipe.n:
        return None
    now = np.bincount([layer.partition for layer in layers], minlength=pipe.n)
    if len(now) != pipe.n or not now.all() or any(not layer.runs[0] for layer in layers):
        return None
    costs = np.zeros((4, len(layers)))
    for k, layer in enumerate(layers):
        costs[[FORWARD, RECOMPUTE, BACKWARD], k] = layer.forward, layer.recompute, layer.backward
    best = balance_cost([layer.cost for layer in layers], pipe.n)
    if best == now.tolist():
        return None
    # What a task takes beside its layers stays with the partition.
    besides = np.maximum(pipe.times - _blocks(costs, now), 0)
    before = pipe.span(pipe.schedule, _blocks(costs, now) + besides)
    after = pipe.span(pipe.schedule, _blocks(costs, np.array(best)) + besides)
    worst = _blocks(costs, now).sum(axis=0)
    why = f"partition {int(worst.argmax())} takes {worst.max() / worst.mean():.2f} times the mean"
    what = f"balance={best} instead of {now.tolist()}"
    return Change(what, why, pipe.gain(before - after), simulated=True)


def _blocks(costs: NDArray[np.float64], balance: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.add.reduceat(costs, np.concatenate([[0], np.cumsum(balance)[:-1]]), axis=1)


def _chunks(pipe: _Pipe) -> Change | None:
    """Cut mini-batches into more micro-batches, or fewer: less to fill and drain against fewer gaps."""
    if pipe.make is None:
        return None
    mode = _mode(pipe)
    gaps = pipe.situation.parts.get("host_gaps", 0.0) - pipe.situation.turnaround
    gaps /= max(pipe.situation.minibatches, 1e-9)
    size = pipe.situation.facts.batch_size
    before = pipe.span(pipe.make(pipe.m, recomputed(mode, pipe.m)), pipe.times) + gaps
    found: Change | None = None
    for chunks in (pipe.m * 2, pipe.m * 4, pipe.m // 2):
        if chunks < 1 or (size is not None and chunks > size):
            continue
        times = pipe.times * pipe.m / chunks
        # The host has as much to do for each task, whatever its size.
        more = gaps * (chunks + pipe.n - 1) / (pipe.m + pipe.n - 1)
        after = pipe.span(pipe.make(chunks, recomputed(mode, chunks)), times) + more
        gain = pipe.gain(before - after)
        why = "fill and drain shrink, if tasks of fewer samples take less time in proportion"
        if chunks < pipe.m:
            why = "fewer, larger tasks leave fewer gaps" + ", and less is recomputed" * (mode == "except_last")
        # Every doubling costs more than it shows here, so the next one must be worth it.
        if gain > WORTH and (found is None or gain > found.gain + 0.05):
            found = Change(f"chunks={chunks} instead of {pipe.m}", why, gain, simulated=True)
    return found


def _checkpoint(pipe: _Pipe) -> Change | None:
    """Keep activations instead of recomputing them."""
    mode = _mode(pipe)
    if pipe.make is None or mode == "never":
        return None
    after = pipe.span(pipe.make(pipe.m, ()), pipe.times)
    why = "nothing is recomputed; activations of all micro-batches must fit into memory"
    return Change(f'checkpoint="never" instead of "{mode}"', why, pipe.gain(pipe.recorded - after), simulated=True)


def _mode(pipe: _Pipe) -> str:
    """Return the checkpoint mode that the recorded order is that of."""
    order = pipe.schedule.order
    again = {*order[..., 2][order[..., 0] == RECOMPUTE].tolist()}
    return "never" if not again else "always" if pipe.m - 1 in again else "except_last"


# What can only be limited.

_ADVICE = {
    "sharing": ("give each partition a device of its own", "partitions on one device take turns"),
    "transfers": ("move less between partitions, or faster", "partitions wait for tensors that are on their way"),
    "jitter": ("look for what disturbs some tasks", "tasks of one kind take different times"),
    "data_loading": (
        "load data in the background: DataLoader(num_workers=..., prefetch_factor=...)",
        "the pipeline waits for the next batch",
    ),
    "optimizer": ("a fused optimizer: fused=True, or foreach=True", "the pipeline waits for the optimizer"),
    "checkpoints": ("save checkpoints in the background, or less often", "the pipeline waits for the disk"),
    "communication": ("overlap communication with computing", "the main thread waits for other ranks"),
    "between_steps": (
        "look at what the program does between steps: .item(), printing, logging",
        "the pipeline waits for the program",
    ),
}


def _limits(situation: Situation) -> Iterator[Change]:
    places = list(places_to_look_at(situation.links))
    for place in places:
        what = f"look at {place.what}; larger micro-batches, fewer cuts there"
        yield Change(what, _why(place.slowest), place.share, simulated=False)
    for part, (what, why) in _ADVICE.items():
        share = situation.parts.get(part, 0.0) / max(situation.period, 1e-9)
        if part == "transfers":  # as far as it has not been said where
            share -= sum(place.share for place in places)
        yield Change(what, why, share, simulated=False)
    period = max(situation.period, 1e-9)
    gpu = any(name.startswith("cuda") for name in situation.facts.devices or ())
    what = "larger tasks, or torch.compile, so that launching keeps up" if gpu else "larger tasks: more samples each"
    gaps = situation.parts.get("host_gaps", 0.0) - situation.turnaround
    mean = situation.durations[situation.durations > 0].mean() if situation.durations.any() else 0.0
    why = f"workers wait for Python, or for a processor, between tasks of {mean / 1000:.3g} ms on average"
    yield Change(what, why, gaps / period, simulated=False)
    what = "shorten what happens between forward and backward, such as the loss"
    why = "all partitions wait for it; the last one can compute the loss as its last layer"
    yield Change(what, why, situation.turnaround / period, simulated=False)


def _why(link: Link) -> str:
    assert link.time is not None
    others = f", and {link.others / 1000:.3g} ms on other links" if link.others is not None else ""
    return f"a message from rank {link.source} to rank {link.target} takes {link.time / 1000:.3g} ms{others}"
