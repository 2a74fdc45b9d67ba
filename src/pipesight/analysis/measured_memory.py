"""What a run tells plans of memory, beside what its layers keep: the batch, gradients, optimizer state, the rest."""

from __future__ import annotations

from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.memory import PARTS, MemoryReport, PartitionMemory
from pipesight.schedule.costs import Layer

__all__ = ["gradients_of", "input_bytes", "other_bytes", "outside_peak", "parameter_scale"]

GRADIENTS, INPUTS = PARTS.index("gradients"), PARTS.index("inputs")


def input_bytes(memory: MemoryReport | None, facts: DescribedPipeline) -> float:
    """Return the bytes of a batch: what the first layer keeps of it or, if that is nothing, what the program does."""
    if memory is None:
        return 0.0
    first = next((layer for layer in memory.layers if layer.partition == 0), None)
    if first is not None and first.earlier and (not facts.layers or first.name == facts.layers[0].name):
        return first.earlier
    found = 0
    for curve in (curve for curve in memory.curves if curve.partition == 0):
        ends = {step: k for k, step in enumerate(curve.steps)}  # after the optimizer's step, no task holds any
        found = max(found, *(curve.values[INPUTS][k] for k in ends.values()))
    return float(found)


def outside_peak(memory: MemoryReport | None, last: Layer) -> tuple[float, float]:
    """Return what a loss outside takes above what layers keep; the outputs that wait for it are no layer's."""
    if memory is None or memory.outside is None:
        return 0.0, 0.0
    waiting = max(last.peak.forward_left - (last.kept_bytes - last.shared_bytes), 0.0)
    most, left = memory.outside
    return most + waiting, left + waiting


def other_bytes(memory: MemoryReport | None, facts: DescribedPipeline) -> float:
    """Return what each GPU holds whatever the setting."""
    gpus = [entry for entry in memory.devices if entry.device != "cpu"] if memory is not None else []
    least = min((entry.outside for entry in gpus if entry.outside is not None), default=0)
    return max(least - input_bytes(memory, facts), 0.0)


def gradients_of(memory: MemoryReport | None, facts: DescribedPipeline, minibatches: int) -> tuple[float, float]:
    """Return the gradients, by parameters, that are there before the first backward, and those that come with it.

    They stay where a step has several mini-batches, and where a program does not set them to ``None`` before its
    forwards. A pipeline in one process then has new sums beside them, until these are added; a program that drops them
    between forwards and backwards has as many as before.
    """
    parameters = _parameters(facts)
    if memory is None or len(memory.steps) < 2 or not parameters:
        stay = float(minibatches > 1)
        return stay, 1.0 - stay
    ranks = {(entry.partition, entry.rank) for entry in _one_replica(memory)}
    first = once = most = 0
    for curve in (curve for curve in memory.curves if (curve.partition, curve.rank) in ranks):
        gradients = curve.values[GRADIENTS]
        top = max(gradients)
        there = next(k for k, size in enumerate(gradients) if size >= top / 2)
        first += min(gradients[there:])  # next to none at the first forward of the next step, unless they stay
        once += min(size for size in gradients if size >= top / 2)
        most += top
    stay = once if minibatches > 1 else first
    return stay / parameters, (most - stay) / parameters


def parameter_scale(
    memory: MemoryReport | None, facts: DescribedPipeline, gradients: tuple[float, float]
) -> float | None:
    """Return how many bytes are held for each byte of parameters, where an optimizer was seen to have state or none."""
    parameters = _parameters(facts)
    if memory is None or len(memory.steps) < 2 or not parameters:
        return None
    fixed = sum(entry.parts["weights"] + entry.parts["optimizer_state"] for entry in _one_replica(memory))
    return fixed / parameters + sum(gradients)


def _parameters(facts: DescribedPipeline) -> int:
    return sum(layer.parameter_bytes or 0 for layer in facts.layers)


def _one_replica(memory: MemoryReport) -> list[PartitionMemory]:
    return [*{entry.partition: entry for entry in reversed(memory.partitions)}.values()]
