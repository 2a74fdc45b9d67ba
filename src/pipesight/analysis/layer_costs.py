"""The layers of a run, and the cost of each: as recorded or, without recorded layers, estimated from their tasks.

A recording has tasks of one size, so it does not tell how much of a layer's time every micro-batch takes, however
small. On a CPU, that part is at least what its operators take that have next to nothing to compute: they are counted,
and one is timed. On a GPU, where others hide launches, it is taken to be t c / (t + c) of a time t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipesight.analysis.described_pipelines import DescribedLayer, DescribedPipeline
from pipesight.analysis.memory import MemoryReport
from pipesight.runs.reading.event_tables import LayerTimes
from pipesight.schedule.costs import SPLIT_COST, WEIGHT_SHARE, Layer, Peak
from pipesight.schedule.simulation import Times
from pipesight.schedule.task_orders import B, F, R, W

if TYPE_CHECKING:
    from pipesight.runs.reading.run import Run

__all__ = ["LayerCosts", "layer_costs_of"]

MICROSECOND = 1e-6
ON_GPU = (50.0, 100.0)
"""The most that the fixed part of a layer takes on a GPU, forward and backward, in microseconds: a guess."""
_PHASES = (F, R, B)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Layers in the order of the model."""

    layers: tuple[Layer, ...]
    balance: tuple[int, ...]
    """How many of them each partition had."""
    besides: Times
    """Microseconds of a task that are in no layer, by kind."""
    weight_share: float
    """Of the gradients of weights in a backward: as recorded, if they had tasks of their own."""
    loss_peak: Peak
    """What the loss takes while it runs."""
    known: bool
    """Whether layers were recorded, and not only their tasks."""
    notes: tuple[str, ...]


def layer_costs_of(
    run: Run,
    facts: DescribedPipeline,
    times: LayerTimes,
    tasks: Times,
    usual: Times,
    chunks: int,
    memory: MemoryReport | None,
) -> LayerCosts:
    """Find the layers of a pipeline.

    Args:
        run: Where they were recorded.
        facts: What the description says.
        times: Those of layers, in the same mini-batches as ``tasks``.
        tasks: Microseconds of a task in the mean of all mini-batches, by kind and partition; backwards as a whole.
        usual: The same in the mean of the usual ones, which plans are about.
        chunks: How many micro-batches there were.
        memory: What layers keep, if it was counted.
    """
    n = tasks.shape[1]
    notes = []
    names = _names(run, facts, n)
    means = _mean_times(times, names)
    if not (known := means is not None):
        notes.append("layers were not recorded; each is assumed to take an equal share of its partition's time")
        means = [np.broadcast_to(tasks[:, j, None] / len(own), (4, len(own))) for j, own in enumerate(names)]
    scale = np.divide(usual, tasks, out=np.ones_like(tasks), where=tasks > 0)
    rest = np.array([tasks[:, j] - means[j].sum(axis=1) for j in range(n)]).T * scale
    besides = np.maximum(np.where(tasks > 0, rest, 0.0), 0.0).sum(axis=1) / np.maximum((tasks > 0).sum(axis=1), 1)
    on_gpu = any(name.startswith("cuda") for name in facts.devices or ())
    sizes = {(fact.partition, fact.name): fact for fact in facts.layers}
    if not any(fact.parameter_bytes for fact in facts.layers):
        notes.append("the run does not record layer sizes, so memory is unknown")
    elif memory is None or not memory.layers:
        notes.append("activations are estimated from layer outputs; --model counts everything that is kept")
    kept = _Kept(memory, facts, chunks)
    peaks = _Peaks(memory, chunks)
    layers = []
    for j, own in enumerate(names):
        for k, name in enumerate(own):
            forward, recompute, backward = (float(means[j][phase, k] * scale[phase, j]) for phase in _PHASES)
            again = recompute if tasks[R, j] > 0 else None
            fact = sizes.get((j, name))
            each = _on_gpu(forward, backward) if on_gpu else _of_operators(facts, fact, forward, backward)
            layers.append(_layer(name, (forward, again, backward), each, chunks, fact, kept.of(j, name, fact)))
            layers[-1] = replace(layers[-1], peak=peaks.of(j, name, layers[-1].parameter_bytes))
    besides_loss = besides, _weight_share(times), peaks.of(n - 1, None, 0.0)
    return LayerCosts(tuple(layers), tuple(map(len, names)), *besides_loss, known, tuple(notes))


def _on_gpu(forward: float, backward: float) -> tuple[float, float]:
    """Return the fixed parts of times: what any micro-batch takes, however small."""
    most = ON_GPU
    return forward * most[0] / (forward + most[0]), backward * most[1] / (backward + most[1])


def _of_operators(
    facts: DescribedPipeline, fact: DescribedLayer | None, forward: float, backward: float
) -> tuple[float, float]:
    """Return the same, on a CPU."""
    count = 0 if fact is None else fact.operators or 0
    there, back = (count * seconds / MICROSECOND for seconds in facts.operator_seconds)
    return min(there, forward), min(back, backward)


def _layer(
    name: str,
    times: tuple[float, float | None, float],
    each: tuple[float, float],
    chunks: int,
    fact: DescribedLayer | None,
    kept: tuple[float, float, float],
) -> Layer:
    """Make a layer from the microseconds that a micro-batch takes, and the bytes that `_Kept` gives."""
    forward, recompute, backward = times
    batch = chunks * MICROSECOND
    output = float(fact.output_bytes or 0) if fact is not None else 0.0
    return Layer(
        name,
        (forward - each[0]) * batch,
        (backward - each[1]) * batch,
        # What a recomputation takes beside the part that it has like any forward.
        None if recompute is None else max(recompute - each[0], 0.0) * batch,
        forward_each=each[0] * MICROSECOND,
        backward_each=each[1] * MICROSECOND,
        kept_bytes=kept[0],
        shared_bytes=kept[1],
        waiting_bytes=kept[2],
        output_bytes=output,
        parameter_bytes=float(fact.parameter_bytes or 0) if fact is not None else 0.0,
        checkpointed=fact is None or fact.checkpointed,
    )


class _Kept:
    """What layers keep: as counted, or else their outputs. Asked for in the order of the model."""

    def __init__(self, memory: MemoryReport | None, facts: DescribedPipeline, chunks: int) -> None:
        entries = memory.layers if memory is not None else ()
        self._entries = {(entry.partition, entry.name): entry for entry in entries}
        self._last = {fact.partition: fact.name for fact in facts.layers}
        self._chunks = chunks
        self._before = 0.0  # the output of the layer before, of a batch
        self._partition = 0
        self._output_kept: float | None = None

    def of(self, j: int, name: str, fact: DescribedLayer | None) -> tuple[float, float, float]:
        """Return what a layer keeps of a batch, what of it does not come on top of its input, and what it waits for."""
        output = float(fact.output_bytes or 0) if fact is not None else 0.0
        before, self._before = self._before, output
        begins, self._partition = j != self._partition, j
        entry = self._entries.get((j, name))
        if entry is None:
            # A layer that keeps nothing does not show; neither does any, where nothing was counted.
            return (0.0, before, 0.0) if self._entries else (output, 0.0, 0.0)
        kept, both, m = entry.kept, entry.both, self._chunks
        if begins:  # its input came from another partition, whose last layer may keep it itself
            both = max(entry.earlier - (self._output_kept or 0.0), 0.0)
            kept += both
        last = self._entries.get((j, self._last.get(j, "")))
        self._output_kept = last.output_kept if last is not None else None
        shared = both * m + before - entry.earlier * m if before else 0.0
        return kept * m, shared, entry.waiting * m


class _Peaks:
    """What layers take while they run, if that was measured."""

    def __init__(self, memory: MemoryReport | None, chunks: int) -> None:
        entries = memory.inside if memory is not None else ()
        self._entries = {(entry.partition, entry.name, entry.backward): entry for entry in entries}
        self._chunks = chunks

    def of(self, j: int, name: str | None, parameters: float) -> Peak:
        """Return that of a layer, without the gradients of its weights, or of the loss."""
        forward, backward = (self._entries.get((j, name, kind)) for kind in (False, True))
        m = self._chunks
        forwards = (forward.most * m, forward.left * m) if forward is not None else (0.0, 0.0)
        backwards = (backward.most, backward.left) if backward is not None else (parameters, parameters)
        return Peak(*forwards, *((number - parameters) * m for number in backwards))


def _names(run: Run, facts: DescribedPipeline, n: int) -> list[list[str]]:
    """Return the names of the layers of each partition, in the order in which they run."""
    names: list[list[str]] = [[] for _ in range(n)]
    if facts.layers:
        for fact in facts.layers:
            names[fact.partition].append(fact.name)
    elif steps := run.steps():
        runs = run.layer_runs(steps[len(steps) // 2])
        order = np.argsort(runs.begin, kind="stable")
        for row in order[(runs.phase[order] == F) & (runs.partition[order] < n)].tolist():
            if (name := str(runs.layer[row])) not in names[int(runs.partition[row])]:
                names[int(runs.partition[row])].append(name)
    for j, own in enumerate(names):
        if not own:
            count = facts.balance[j] if facts.balance is not None else 1
            own += [f"partition {j}" if count == 1 else f"partition {j}, layer {k}" for k in range(count)]
    return names


def _mean_times(times: LayerTimes, names: list[list[str]]) -> list[Times] | None:
    """Return the mean microseconds of layers, by kind and layer, for each partition; nothing if there are none."""
    places = {(j, name): k for j, own in enumerate(names) for k, name in enumerate(own)}
    totals = [np.zeros((4, len(own))) for own in names]
    counts = [np.zeros((4, len(own))) for own in names]
    columns = (times.partition, times.layer, times.phase, times.count, times.total)
    for j, name, phase, count, total in zip(*(column.tolist() for column in columns), strict=True):
        if (k := places.get((int(j), str(name)))) is not None and 0 <= phase < 4:
            totals[j][phase, k] += total
            counts[j][phase, k] += count
    if not any(count[F].all() for count in counts):
        return None
    for j, total in enumerate(totals):  # a backward is that of inputs and that of weights
        in_two = (total[[B, W]] > 0).all(axis=0) & (j > 0)
        total[B], total[W] = (total[B] + total[W]) / (1 + SPLIT_COST * in_two), 0.0
    for count in counts:  # a first partition has nothing but the latter
        count[B] = np.maximum(count[B], count[W])
    return [total / np.maximum(count, 1) for total, count in zip(totals, counts, strict=True)]


def _weight_share(times: LayerTimes) -> float:
    """Return the share of weights in backwards that have both parts; a first partition has no inputs to wait for."""
    inputs, weights = (times.where(times.phase == phase) for phase in (B, W))
    both = np.intersect1d(inputs.partition, weights.partition)
    of_inputs, of_weights = (float(part.total[np.isin(part.partition, both)].sum()) for part in (inputs, weights))
    return of_weights / (of_inputs + of_weights) if of_inputs + of_weights > 0 else WEIGHT_SHARE
