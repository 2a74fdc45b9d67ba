"""Choose where to cut a model, by the time that its units take or by the memory that they keep."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from pipesight.pipeline.batch_dims import BatchDim, BatchDims
from pipesight.pipeline.calls import split_call
from pipesight.pipeline.profiling import undisturbed
from pipesight.pipeline.unit_timing import LOSS, UnitRun, called_once, device_of, median, restored
from pipesight.schedule.balancing import balance_cost

__all__ = ["CallSample", "cuts_by_size", "cuts_by_time"]

CallSample: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]] | Mapping[str, Any]
"""Positional and keyword arguments of a call, or the latter alone."""


def cuts_by_time(
    model: nn.Module,
    sample: CallSample,
    partitions: int,
    *,
    chunks: int = 1,
    batch_dim: BatchDim = None,
    timeout: float = 1.0,
) -> list[str]:
    """Return where to cut a model so that the forward and backward of its partitions take about the same time.

    Example::

        cuts = cuts_by_time(model, {"input_ids": ids, "labels": ids}, partitions=4, chunks=8)
        pipe = Pipeline(model, cuts, chunks=8)

    The model is run where it is, in train mode. Its parameters, gradients, buffers and modes, and the random number
    generators, are left as they were. Blocks, and other modules that take long, can begin a partition if they are
    called once.

    Args:
        model: Any.
        sample: A call: ``(args, kwargs)``, or ``kwargs`` alone.
        partitions: How many.
        chunks: Number of micro-batches that the call will be cut into; the first one is run.
        batch_dim: As that of the pipeline.
        timeout: Seconds to spend, about; more where a call takes long, since there are at least four.
    """
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout must be finite and not negative (timeout: {timeout})")

    def seconds(run: UnitRun) -> dict[str, float]:
        run.times()  # the first run loads kernels and fills caches
        deadline = time.perf_counter() + timeout
        rounds = [run.times() for _ in range(3)]
        while time.perf_counter() < deadline:
            rounds.append(run.times())
        return {name: median([sum(found.get(name, (0.0,))) for found in rounds]) for name in run.calls}

    return _cuts(model, sample, partitions, chunks, batch_dim, seconds)


def cuts_by_size(
    model: nn.Module,
    sample: CallSample,
    partitions: int,
    *,
    chunks: int = 1,
    batch_dim: BatchDim = None,
    param_scale: float = 2.0,
) -> list[str]:
    """Return where to cut a model so that its partitions keep about the same number of bytes during training.

    Kept are the parameters and what is saved for the backward of one micro-batch, as `balance_by_size` counts it.

    Args:
        model: Any; it is left as it was.
        sample: A call: ``(args, kwargs)``, or ``kwargs`` alone.
        partitions: How many.
        chunks: Number of micro-batches that the call will be cut into; the first one is run.
        batch_dim: As that of the pipeline.
        param_scale: 2 for a parameter and its gradient, plus what the optimizer keeps: 1 for SGD with momentum, 2 for
            Adam.
    """
    if not 0 <= param_scale < float("inf"):
        raise ValueError(f"param_scale must be finite and not negative (param_scale: {param_scale})")

    def size(run: UnitRun) -> dict[str, float]:
        kept = {name: found.first for name, found in run.kept_bytes().items()}
        last = next(reversed(run.calls))
        kept[last] = kept.get(last, 0.0) + kept.pop(LOSS, 0.0)
        counted: set[int] = set()
        for name in run.calls:
            parameters = {id(p): p for p in run.units[name].parameters() if id(p) not in counted} if name else {}
            counted |= set(parameters)
            kept[name] = kept.get(name, 0.0) + param_scale * sum(p.nbytes for p in parameters.values())
        return kept

    return _cuts(model, sample, partitions, chunks, batch_dim, size)


def _cuts(
    model: nn.Module,
    sample: CallSample,
    partitions: int,
    chunks: int,
    batch_dim: BatchDim,
    measure: Callable[[UnitRun], dict[str, float]],
) -> list[str]:
    """Return the modules that begin partitions 1, 2 and so on, so that the costliest partition costs least."""
    if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
        raise ValueError(f"partitions must be a positive integer (partitions: {partitions!r})")
    args, kwargs = call_of(sample)
    dims = BatchDims(batch_dim, inspect.signature(model.forward), model=model)

    def call() -> Any:
        split = split_call(args, kwargs, chunks, dims)
        mine, named = split.calls[0]
        with split.watched():
            return model(*mine, **named)

    opened: list[str] = []
    while True:
        run = UnitRun(model, opened, call)
        with undisturbed(device_of(model)), restored(model), run.hooked():
            run.count_calls()
            costs = measure(run)
        most = 1.1 * sum(costs.values()) / partitions
        stages = [name for name in run.calls if name and costs[name] > most and _has_blocks(run.units[name])]
        inner = [f"{name}.{child}" for name in stages for child, _ in run.units[name].named_children()]
        if not inner:
            return _balanced(model, run.calls, costs, partitions)
        opened += inner


def _balanced(model: nn.Module, calls: Mapping[str, int], costs: Mapping[str, float], partitions: int) -> list[str]:
    once = called_once(calls)[1:]  # the first one begins partition 0
    least = sum(costs.values()) / (4 * partitions)
    able = [name for name in once if name.rpartition(".")[2].isdecimal() or costs[name] >= least]
    if len(able) < partitions - 1:
        able = once
    if len(able) < partitions - 1:
        raise ValueError(
            f"{type(model).__name__} has too few modules that are called once to be cut into {partitions} partitions "
            f"(they can begin at: {', '.join(able) or 'none'})"
        )
    sums = [0.0]
    for name in calls:
        if name in able:
            sums.append(0.0)
        sums[-1] += costs[name]
    sizes = balance_cost(sums, partitions)
    return [able[sum(sizes[:k]) - 1] for k in range(1, partitions)]


def _has_blocks(unit: nn.Module) -> bool:
    """Whether a unit is a stage: it lists modules that consist of others."""
    lists = (inner for inner in unit.modules() if isinstance(inner, (nn.ModuleList, nn.Sequential)) and len(inner) > 1)
    return any(next(child.children(), None) is not None for some in lists for child in some)


def call_of(sample: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(sample, Mapping):
        return (), sample
    pair = isinstance(sample, tuple) and len(sample) == 2
    if pair and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], Mapping):
        return sample[0], sample[1]
    raise TypeError(
        "sample must be the arguments of a call of the model, (args, kwargs) or kwargs alone, such as ((x,), {}) or "
        f"{{'input_ids': ids}}, but got {type(sample).__name__}"
    )
