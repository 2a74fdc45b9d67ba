"""The verdict: the bubble, its causes and the largest other losses, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesight._formatting import rough_percent
from pipesight._plurals import count_of
from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.overall import Overall
from pipesight.analysis.pipeline_report import PipelineReport
from pipesight.analysis.planned_changes import Change
from pipesight.analysis.step_times import OUTSIDE

__all__ = ["TITLES", "Verdict", "verdict_on"]

TITLES = {
    "computing": "computing",
    "fill_and_drain": "fill and drain",
    "sharing": "sharing a device",
    "imbalance": "imbalance",
    "jitter": "jitter",
    "transfers": "transfers",
    "host_gaps": "host gaps",
    "evaluation": "evaluation",
    "data_loading": "data loading",
    "optimizer": "optimizer",
    "checkpoints": "checkpoints",
    "communication": "communication",
    "between_steps": "between steps",
}
"""The parts of a step in words."""

WINDOW = "from the first forward of a mini-batch to its last backward"

MUCH = 0.05
"""The share of the step from which a loss gets a sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A few sentences, and what to change."""

    text: str
    """What the steps took, the bubble, and where most time is lost."""
    changes: tuple[Change, ...]
    """At most three, the largest gain first."""


def verdict_on(
    overall: Overall | None, pipelines: Sequence[PipelineReport], changes: Sequence[Change], *, slowed: bool = False
) -> Verdict:
    """Say how large the bubble is, why, and what else takes the time of a step.

    ``slowed`` says that replays name something that slows the steps.
    """
    if overall is None or not pipelines:
        return Verdict("No step is complete, so the bubble cannot be computed.", ())
    pipeline = pipelines[0]
    workers, processors = pipeline.workers, pipeline.facts.processors
    who = "partitions" if workers == pipeline.partitions else f"{pipeline.worker_noun}s"
    period = max(sum(overall.parts.values()), 1e-9)
    shares = {name: time / period for name, time in overall.parts.items()}
    sentences = [_first(overall, pipeline)]
    if workers > 1:
        sentences.append(f"It is the time that {who} are idle in the window, {WINDOW}.")
    if pipeline.devices < workers:
        where = "one device, which computes" if pipeline.devices == 1 else f"{pipeline.devices} devices, which compute"
        sentences.append(f"The partitions share {where} {rough_percent(1 - pipeline.device_idle)} of the window.")
    if processors is not None and pipeline.on_processors > processors:
        few = count_of(processors, "processor")
        sentences.append(f"{pipeline.on_processors} {who} share {few} and slow each other down.")
    inside = max((name for name in LOSSES if name != "fill_and_drain"), key=lambda name: shares.get(name, 0))
    if shares.get(inside, 0) >= MUCH:
        sentences.append(
            f"The largest other loss is {_noun(inside)}, {rough_percent(shares[inside])} of the mean step."
        )
    outside = sum(shares.get(name, 0) for name in OUTSIDE)
    if outside >= MUCH:
        worst = max(OUTSIDE, key=lambda name: shares.get(name, 0))
        most = f", {rough_percent(shares[worst])} on {_noun(worst)}" if worst != "between_steps" else ""
        sentences.append(f"{rough_percent(outside)} of the mean step is spent outside the pipeline{most}.")
    if not changes:
        what = "setting" if slowed else "change"
        sentences.append(f"The trace shows no {what} that would save more than 1%.")
    return Verdict(" ".join(sentences), tuple(changes))


def _first(overall: Overall, pipeline: PipelineReport) -> str:
    bubble, bound, partitions, workers = overall.bubble, overall.bound, pipeline.partitions, pipeline.workers
    if workers == 1:
        one = "partition" if partitions == 1 else pipeline.worker_noun
        return f"There is one {one}, so there is no bubble; it is idle {rough_percent(bubble)} of the time."
    where = f" on {workers} {pipeline.worker_noun}s" if workers < partitions else ""
    shape = f"{partitions} partitions{where} and {count_of(pipeline.chunks, 'micro-batch', 'micro-batches')}"
    measured, alone = rough_percent(bubble), rough_percent(bound)
    if bubble - bound <= 0.02:
        return f"The bubble is {measured}, about what the schedule itself has with {shape} ({alone})."
    return f"The bubble is {measured}; the schedule alone would have {alone} with {shape}."


def _noun(part: str) -> str:
    return f"the {TITLES[part]}" if part == "optimizer" else TITLES[part]
