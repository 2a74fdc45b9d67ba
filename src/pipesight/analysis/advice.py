"""What to change, and what it would gain: plans where they can be simulated, else a limit: the time that is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipesight._formatting import time
from pipesight.analysis.cause_advice import changes_by_causes
from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.measured_costs import SMALL_MESSAGE, Measured
from pipesight.analysis.planned_changes import (
    AT_LEAST,
    AT_MOST,
    Change,
    fewer_partitions,
    gain_of,
    mean_task,
    planned_changes,
)
from pipesight.analysis.rank_links import LinkReport, slow_connections
from pipesight.analysis.step_times import StepTimes
from pipesight.analysis.what_if import WhatIf
from pipesight.plan.plans import WORTH, predict
from pipesight.schedule.costs import Costs

__all__ = ["Situation", "find_changes"]

MOST = 3
"""How many changes a report lists."""
MUCH = 0.05
"""The share of transfers in the step above which plans are less certain."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What changes are judged by. Times in microseconds."""

    facts: DescribedPipeline
    measured: Measured | None
    """What plans are made of."""
    period: float
    """The mean of steps that were recorded to the next."""
    parts: Mapping[str, float]
    """Where the time of this mean step goes."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """The shares of the parts in the mean of all steps, which the report shows."""
    turnaround: float = 0.0
    """The part of the host gaps between forward and backward."""
    links: Sequence[LinkReport] = ()
    """Between ranks."""
    replays: WhatIf | None = None
    """What slows the steps, if they could be replayed."""

    @classmethod
    def of(
        cls,
        times: StepTimes,
        *,
        facts: DescribedPipeline,
        measured: Measured | None,
        links: Sequence[LinkReport],
        replays: WhatIf | None,
    ) -> Situation:
        """Take the steps that count, without the last if possible: what comes between it and a next one is missing."""
        whole = times.where(times.follows.astype(bool)) if times.follows.any() else times
        period, turnaround = float(whole.period.mean()), float(whole.turnaround.mean())
        mean = max(float(times.period.mean()), 1e-9)
        shown = {part: time / mean for part, time in times.mean_parts().items()}
        return cls(facts, measured, period, whole.mean_parts(), shown, turnaround, links, replays)

    def share(self, part: str) -> float:
        """Return the share of a part in the step."""
        return self.share_of(self.parts.get(part, 0.0))

    def share_of(self, time: float) -> float:
        """Return the share of the step that some time is."""
        return time / max(self.period, 1e-9)


def find_changes(situation: Situation) -> list[Change]:
    """Return at most three changes that gain more than 1% of the step each, the best first.

    Gains do not add up: each is that of one change alone.
    """
    measured = situation.measured
    planned = [] if measured is None else planned_changes(measured)
    if situation.share("transfers") > MUCH and _small_messages(situation.links) is None:
        # Messages may delay each other, which is not simulated.
        planned = [replace(change, promise=AT_MOST) for change in planned]
    limits = [change for change in _limits(situation) if change.gain > WORTH]
    if not any(change.promise == AT_LEAST for change in planned):  # else there is a plan for larger tasks
        limits += [change for change in (_larger_tasks(situation),) if change.gain > WORTH]
    fewer = None if measured is None else fewer_partitions(measured, lost=situation.share("sharing"))
    if fewer is not None and fewer.gain > WORTH:
        limits.append(fewer)
    return sorted([*planned, *limits], key=lambda change: change.weight, reverse=True)[:MOST]


_ADVICE = {
    "sharing": ("give each partition its own device", "partitions on one device take turns"),
    "transfers": ("send less data between partitions, or use faster links", "partitions wait for tensors in transit"),
    "jitter": ("find what slows some tasks", "tasks of the same kind vary in time"),
    "data_loading": (
        "load data in the background: DataLoader(num_workers=..., prefetch_factor=...)",
        "the pipeline waits for the next batch",
    ),
    "optimizer": ("a fused optimizer: fused=True, or foreach=True", "the pipeline waits for the optimizer"),
    "checkpoints": ("save checkpoints in the background, or less often", "the pipeline waits for the disk"),
    "communication": ("overlap communication with computing", "the main thread waits for other ranks"),
    "between_steps": (
        "check what the program does between steps: .item(), printing, logging",
        "the pipeline waits for the program's own code",
    ),
}


def _limits(situation: Situation) -> Iterator[Change]:
    for place in slow_connections(situation.links):
        check = place.gpu_check if _on_gpus(situation) else place.cpu_check
        what = f"check {check}; use larger micro-batches or fewer cuts there"
        # Between hosts, collectives go the same way.
        apart = place.slowest.source_host != place.slowest.target_host
        also = situation.share("communication") if apart else 0.0
        yield Change(what, _why(place.slowest), min(place.share + also, 1.0), AT_MOST)
    crowded = situation.measured is not None and situation.measured.crowded
    for part, (what, why) in _ADVICE.items():
        if part == "sharing" and crowded:  # there is a plan for that
            continue
        if part == "transfers":  # unless a slow link was already named
            if _small_messages(situation.links) is None:
                yield Change(what, why, _moved(situation), AT_MOST)
        else:
            share = situation.share(part)
            share = min(share, situation.shown.get(part, share))
            if part == "jitter" and situation.replays is not None:
                known, share = changes_by_causes(situation.replays, jitter=share)
                yield from known
            yield Change(what, why, share, AT_MOST)
    yield _loss_inside(situation)


def _moved(situation: Situation) -> float:
    """Return the share of transfers in the step, without those of links that are named."""
    named = sum(place.share for place in slow_connections(situation.links))
    return max(situation.share("transfers") - named, 0.0)


def _on_gpus(situation: Situation) -> bool:
    return any(name.startswith("cuda") for name in situation.facts.devices or ())


def _larger_tasks(situation: Situation) -> Change:
    """Give each task more to do: its fixed cost stays the same, and so do small messages."""
    moved, small = _moved(situation), _small_messages(situation.links)
    gaps = situation.share("host_gaps") - situation.share_of(situation.turnaround)
    if small is not None and moved > gaps:
        what = "larger micro-batches: more samples each"
        why = f"messages of {small:,.0f} bytes take as long as larger ones, and tasks wait for them"
        return Change(what, why, gaps + moved, AT_MOST)
    what = (
        "larger tasks or torch.compile, so that kernel launches keep up"
        if _on_gpus(situation)
        else "larger tasks: more samples each"
    )
    measured = situation.measured
    long = f" of {time(mean_task(measured) * 1e6)} on average" if measured is not None else ""
    why = f"workers wait for Python, or for a processor, between tasks{long}"
    return Change(what, why, gaps + (moved if small is not None else 0.0), AT_MOST)


def _loss_inside(situation: Situation) -> Change:
    """Let the last partition compute the loss of each micro-batch, while others compute as well."""
    gain = situation.share_of(situation.turnaround)
    what = "shorten the work between forward and backward, such as the loss"
    why = "all partitions wait for it; the last one can compute the loss as its last layer"
    measured = situation.measured
    if measured is not None and measured.setting is not None:
        plan = predict(_with_loss(measured.costs), measured.setting, measured.balance)
        gain = min(gain, max(gain_of(plan, measured), 0.0))
    return Change(what, why, gain, AT_MOST)


def _with_loss(costs: Costs) -> Costs:
    """Return the same with the loss as part of the last layer, half of it forward and half of it backward."""
    *others, last = costs.layers
    half = costs.loss / 2
    last = replace(last, forward=last.forward + half, backward=last.backward + half)
    return replace(costs, layers=(*others, last), loss=0.0)


def _small_messages(links: Sequence[LinkReport]) -> float | None:
    """Return the bytes of the mean message between ranks, if it is so small that its size does not matter."""
    messages = sum(link.messages for link in links)
    mean = sum(link.bytes for link in links) / messages if messages else SMALL_MESSAGE
    return mean if mean < SMALL_MESSAGE else None


def _why(link: LinkReport) -> str:
    assert link.time is not None
    others = f", and {time(link.others)} on other links" if link.others is not None else ""
    return f"a message from rank {link.source} to rank {link.target} takes {time(link.time)}{others}"
