"""How many samples mini-batches have: what the trace says of each, not what `run.json` says of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.step_grouping import INCOMPLETE, TRAINING, MiniBatchTable

__all__ = ["of_usual_size", "sizes_in", "with_common_samples"]

SOME = 0.1
"""The share of mini-batches of other sizes from which it is said; fewer are the ends of epochs."""


def of_usual_size(described: Sequence[DescribedPipeline], minibatches: MiniBatchTable) -> list[DescribedPipeline]:
    """Describe each pipeline by its most common training mini-batch; the sizes of outputs are scaled to it.

    Mini-batches are matched to pipelines by the number of partitions. Where that is ambiguous, or the trace has no
    samples, the description stays.
    """
    counts = [pipeline.partitions for pipeline in described]
    return [
        _scaled(pipeline, _usual_size(minibatches.where(minibatches.partitions == pipeline.partitions)))
        if counts.count(pipeline.partitions) == 1
        else pipeline
        for pipeline in described
    ]


def sizes_in(minibatches: MiniBatchTable, usual: int | None) -> str | None:
    """Say which sizes training mini-batches have, unless nearly all have the usual one."""
    samples = minibatches.samples[(minibatches.kind == TRAINING) & (minibatches.samples > 0)]
    if usual is None or not len(samples) or (samples != usual).mean() <= SOME:
        return None
    return f"mini-batches have {samples.min():,} to {samples.max():,} samples, {usual:,} most often"


def with_common_samples(described: Sequence[DescribedPipeline], minibatches: MiniBatchTable) -> MiniBatchTable:
    """Return the mini-batches, without samples if pipelines have different batches: those do not add up."""
    if len({pipeline.batch_size for pipeline in described}) <= 1:
        return minibatches
    return replace(minibatches, samples=np.full(len(minibatches), -1))


def _usual_size(minibatches: MiniBatchTable) -> int | None:
    """Return the most common size; the largest of several."""
    training = minibatches.kind == TRAINING
    chosen = training if training.any() else minibatches.kind != INCOMPLETE
    known = minibatches.samples[chosen & (minibatches.samples > 0)]
    if not len(known):
        return None
    sizes, often = np.unique(known, return_counts=True)
    return int(sizes[often == often.max()].max())


def _scaled(pipeline: DescribedPipeline, size: int | None) -> DescribedPipeline:
    described = pipeline.batch_size
    if size is None or size == described:
        return pipeline
    layers = [
        replace(layer, output_bytes=round(layer.output_bytes * size / described))
        if layer.output_bytes is not None and described
        else layer
        for layer in pipeline.layers
    ]
    return replace(pipeline, batch_size=size, layers=tuple(layers))
