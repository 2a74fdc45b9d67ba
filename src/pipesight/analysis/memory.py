"""What was in memory, in the steps where it was counted: peaks by partition and device, and what layers keep."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesight.analysis.curves import StepEdges, steps_of
from pipesight.runs.reading.event_tables import Points

__all__ = [
    "PARTS",
    "DeviceMemory",
    "LayerMemory",
    "LayerPeak",
    "MemoryCurve",
    "MemoryReport",
    "PartitionMemory",
    "memory_of",
    "why_not_counted",
]

PARTS = ("weights", "gradients", "optimizer_state", "inputs", "activations")
"""What memory is for, as the recording names it."""
CATEGORY = "memory"
_PARTITION, _DEVICE, _PEAK, _LAYERS = "memory of partition ", "memory of ", "peak of ", "kept by layers"
_NOT_COUNTED = "not counted"
_INSIDE, _OPTIMIZER, _OUTSIDE = "most in layers", "most in the optimizer", "most outside"
FEW = 1 << 20
"""Bytes on the CPU, such as Adam's numbers of steps, that are not worth a row beside those of GPUs."""


@dataclass(frozen=True, slots=True)
class PartitionMemory:
    """The peak of a partition, in bytes. Memory that two partitions of a device share counts in both."""

    rank: int
    """The rank that it is on."""
    partition: int
    """The partition."""
    peak: int
    """The sum of all parts at the end of the task, or of the optimizer's step, where it was largest."""
    step: int
    """The step of that."""
    parts: Mapping[str, int]
    """What it was made of: each of `PARTS`."""
    activations: int
    """The most bytes of activations at any time, without inputs."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The peak of a device, in bytes, as far as its use is known."""

    rank: int
    """The rank that uses it."""
    device: str
    """Such as `cuda:0`; `cpu` is the process."""
    peak: int
    """The largest sum of all parts."""
    step: int
    """The step of that."""
    parts: Mapping[str, int]
    """What it was made of: each of `PARTS`."""
    allocated: int | None
    """The most that was allocated at the same moments: on a CPU, by the whole process, Python included."""
    allocator_peak: int | None
    """The most that was ever allocated on a GPU, in the middle of tasks too."""
    capacity: int | None
    """The memory of a GPU, or of the machine; less, if its control groups allow less."""
    resident: int | None
    """The most that a process had of the machine's memory at the same moments, with what its C library keeps."""
    outside: int | None
    """The least that was allocated beside the model: the batch, tensors of the program, and buffers of libraries."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What a layer keeps for its backward in a micro-batch, in bytes: the mean over micro-batches."""

    partition: int | None
    """Where it ran; ``None`` without a pipeline."""
    name: str
    """Its name in the model; ``loss_fn`` is the loss."""
    kept: float
    """Of what earlier layers do not keep; without the partition's input."""
    earlier: float
    """What it keeps of what earlier layers, or partitions, have made."""
    both: float
    """What of that is in `kept`."""
    waiting: float
    """The gradients that its weights wait for, where their part of the backward comes later."""
    output_kept: float | None
    """Of the last layer of a partition: how much of its output it keeps itself."""


@dataclass(frozen=True, slots=True)
class LayerPeak:
    """What a layer takes on a GPU while it runs on a micro-batch, in bytes: the median over micro-batches."""

    partition: int
    """Where it ran."""
    name: str | None
    """Its name; ``None`` is the loss."""
    backward: bool
    """Whether in its backward; else in its forward, or recomputed."""
    most: float
    """The most above what was in use when it began."""
    left: float
    """What more, or less, was in use when it ended."""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """What a partition, or a device, held over a run, in bytes."""

    rank: int
    """The rank that it is on."""
    partition: int | None
    """``None``: that of a device."""
    device: str | None
    """``None``: that of a partition."""
    times: tuple[int, ...]
    """Microseconds of the trace's clock."""
    steps: tuple[int, ...]
    """The step of each time."""
    values: tuple[tuple[int, ...], ...]
    """A row for each of `PARTS`."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All that was counted."""

    steps: tuple[int, ...]
    """Those in which it was."""
    partitions: tuple[PartitionMemory, ...]
    """By partition and rank."""
    devices: tuple[DeviceMemory, ...]
    """By rank and device."""
    layers: tuple[LayerMemory, ...]
    """In the order in which they ran."""
    curves: tuple[MemoryCurve, ...]
    """Of the partitions; of the devices, where there are none."""
    inside: tuple[LayerPeak, ...] = ()
    """In the middle of tasks, on GPUs."""
    outside: tuple[float, float] | None = None
    """What a loss outside of the pipeline takes: at most above what is in use after the last forward, and what is left
    at the first backward."""
    optimizer: float | None = None
    """Bytes that the optimizer's step takes for each byte of weights while it runs, where known."""


def memory_of(points: Points, edges: StepEdges) -> MemoryReport | None:
    """Return what was counted; ``None`` if nothing was."""
    own = points.where(points.category == CATEGORY)
    if not len(own):
        return None
    rows = list(_rows(own, edges))
    partitions = _grouped(row for row in rows if row[0].startswith(_PARTITION))
    devices = _grouped(row for row in rows if row[0].startswith(_DEVICE) and not row[0].startswith(_PARTITION))
    most = {(row[1], row[0].removeprefix(_PEAK)): row for row in rows if row[0].startswith(_PEAK)}
    if not partitions and not devices:
        return None
    curves = [
        _curve(rank, found, partition=int(name.removeprefix(_PARTITION))) for (name, rank), found in partitions.items()
    ] or [_curve(rank, found, device=name.removeprefix(_DEVICE)) for (name, rank), found in devices.items()]
    measured = [_device(name, rank, found, most) for (name, rank), found in sorted(devices.items())]
    with_gpus = {entry.rank for entry in measured if entry.device != "cpu"}
    measured = [
        entry for entry in measured if entry.device != "cpu" or entry.rank not in with_gpus or entry.peak >= FEW
    ]
    return MemoryReport(
        steps=tuple(sorted({row[2] for row in rows if not row[0].startswith(_PEAK)})),
        partitions=tuple(
            sorted(
                (_partition(name, rank, found) for (name, rank), found in partitions.items()),
                key=lambda entry: (entry.partition, entry.rank),
            )
        ),
        devices=tuple(measured),
        layers=tuple(_layers(rows)),
        curves=tuple(sorted(curves, key=lambda curve: (curve.partition or 0, curve.rank))),
        inside=tuple(_inside(rows)),
        outside=_outside(rows),
        optimizer=_optimizer(rows, measured),
    )


def why_not_counted(points: Points) -> str | None:
    """Say why memory was not counted, if the recording says so."""
    for text in points.where((points.category == CATEGORY) & (points.name == _NOT_COUNTED)).values.tolist():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if isinstance(values := json.loads(text), dict):
                version = values.get("torch")
                return f"memory was not counted: PyTorch {version} does not tell what autograd keeps; newer ones do"
    return None


_Row = tuple[str, int, int, int, dict[str, Any]]
"""Name, rank, step, time and values of a point."""


def _rows(points: Points, edges: StepEdges) -> Iterator[_Row]:
    steps = steps_of(points, edges)
    columns = (points.name, points.rank, points.begin, points.values)
    for step, name, rank, begin, text in zip(steps.tolist(), *(column.tolist() for column in columns), strict=True):
        try:
            values = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            continue
        if isinstance(values, dict) and step is not None:
            yield str(name), int(rank), int(step), int(begin), values


def _grouped(rows: Iterator[_Row]) -> dict[tuple[str, int], list[_Row]]:
    found: dict[tuple[str, int], list[_Row]] = {}
    for row in rows:
        if all(isinstance(row[4].get(part), int) for part in PARTS):
            found.setdefault((row[0], row[1]), []).append(row)
    return found


def _parts(row: _Row) -> dict[str, int]:
    return {part: row[4][part] for part in PARTS}


def _total(row: _Row) -> int:
    return sum(row[4][part] for part in PARTS)


def _partition(name: str, rank: int, rows: list[_Row]) -> PartitionMemory:
    top = max(rows, key=_total)
    most = max(row[4]["activations"] for row in rows)
    return PartitionMemory(rank, int(name.removeprefix(_PARTITION)), _total(top), top[2], _parts(top), most)


def _device(name: str, rank: int, rows: list[_Row], most: Mapping[tuple[int, str], _Row]) -> DeviceMemory:
    top, device = max(rows, key=_total), name.removeprefix(_DEVICE)
    allocated = [_total(row) + row[4]["other"] for row in rows if isinstance(row[4].get("other"), int)]
    peak, first = most.get((rank, device)), min(row[2] for row in rows)
    known = [row[4] for row in rows if isinstance(row[4].get("other"), int) and row[2] > first]
    besides = [values["other"] + values["inputs"] for values in known]
    return DeviceMemory(
        rank,
        device,
        _total(top),
        top[2],
        _parts(top),
        max(allocated, default=None),
        None if peak is None else peak[4].get("allocated"),
        None if peak is None else peak[4].get("capacity"),
        None if peak is None else peak[4].get("resident"),
        min(besides, default=None),
    )


def _curve(rank: int, rows: list[_Row], *, partition: int | None = None, device: str | None = None) -> MemoryCurve:
    rows = sorted(rows, key=lambda row: row[3])
    return MemoryCurve(
        rank,
        partition,
        device,
        tuple(row[3] for row in rows),
        tuple(row[2] for row in rows),
        tuple(tuple(row[4][part] for row in rows) for part in PARTS),
    )


def _layers(rows: list[_Row]) -> Iterator[LayerMemory]:
    """Yield the layers: what they keep of a micro-batch, in its forward and where it is recomputed, on average."""
    found: dict[tuple[int | None, str], dict[tuple[object, ...], dict[object, list[list[float]]]]] = {}
    last: dict[int | None, tuple[str, list[float]]] = {}
    waiting: dict[tuple[int | None, str], list[float]] = {}
    for _, _, _, _, values in (row for row in rows if row[0] == _LAYERS):
        partition, layers = values.get("partition"), values.get("layers")
        if not isinstance(partition, int | None) or not isinstance(layers, dict):
            continue
        microbatch = values.get("step"), values.get("microbatch")
        for name, numbers in layers.items():
            if isinstance(numbers, list) and len(numbers) == 3:
                phases = found.setdefault((partition, name), {}).setdefault(microbatch, {})
                phases.setdefault(values.get("phase"), []).append(numbers)
        waits = values.get("waiting")
        for name, size in waits.items() if isinstance(waits, dict) else ():
            if isinstance(size, int):
                waiting.setdefault((partition, name), []).append(size)
        if layers:
            name, kept = last.setdefault(partition, (next(reversed(layers)), []))
            kept.append(values.get("output_kept", 0))
    for (partition, name), tasks in sorted(found.items(), key=lambda entry: entry[0][0] or 0):
        # A forward may keep a part, and its recomputation the rest; what is of earlier layers may be the same in both.
        count = sum(max(map(len, phases.values())) for phases in tasks.values())
        sums = [np.array([np.sum(numbers, axis=0) for numbers in phases.values()]) for phases in tasks.values()]
        kept, _, _ = np.sum([of_phases.sum(axis=0) for of_phases in sums], axis=0).tolist()
        _, earlier, both = np.sum([of_phases.max(axis=0) for of_phases in sums], axis=0).tolist()
        of_weights = float(np.mean(waiting.get((partition, name), [0])))
        of_output = float(np.sum(last[partition][1]) / count) if last[partition][0] == name else None
        yield LayerMemory(partition, name, kept / count, earlier / count, both / count, of_weights, of_output)


def _inside(rows: list[_Row]) -> Iterator[LayerPeak]:
    found: dict[tuple[int, str | None, bool], list[list[float]]] = {}
    for *_, values in (row for row in rows if row[0] == _INSIDE):
        partition, phase, layers = values.get("partition"), values.get("phase"), values.get("layers")
        if not isinstance(partition, int) or not isinstance(layers, dict) or values.get("checkpointing"):
            continue
        if phase == "weight":  # a backward without inputs
            continue
        backward = phase == "backward"
        parts = {**layers} | ({None: values.get("before" if backward else "after")} if values.get("last") else {})
        for name, numbers in parts.items():
            if isinstance(numbers, list) and len(numbers) == 2:
                found.setdefault((partition, name, backward), []).append(numbers)
    for (partition, name, backward), own in found.items():
        most, left = np.median(own, axis=0).tolist()
        yield LayerPeak(partition, name, backward, most, left)


def _outside(rows: list[_Row]) -> tuple[float, float] | None:
    found = [(values.get("most"), values.get("left")) for *_, values in (row for row in rows if row[0] == _OUTSIDE)]
    known = [(most, left) for most, left in found if isinstance(most, int) and isinstance(left, int)]
    if not known:
        return None
    most, left = np.median(known, axis=0).tolist()
    return most, left


def _optimizer(rows: list[_Row], devices: list[DeviceMemory]) -> float | None:
    """Return the least of the steps: in the first one, the optimizer makes its state."""
    weights = {(entry.rank, entry.device): entry.parts["weights"] for entry in devices}
    shares = []
    for _, rank, _, _, values in (row for row in rows if row[0] == _OPTIMIZER):
        held, most = weights.get((rank, str(values.get("device")))), values.get("most")
        if held and isinstance(most, int):
            shares.append(most / held)
    return min(shares, default=None)
