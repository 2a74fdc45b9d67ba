"""The costs of any model that has not been run as a pipeline: it runs itself, and its units are timed.

Times with the whole sample and with a quarter of it tell the part that grows with the samples from the part that every
micro-batch takes, however small.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipesight._nested import tensors_in
from pipesight.pipeline.batch_dims import BatchDim, BatchDims
from pipesight.pipeline.calls import split_call
from pipesight.pipeline.profiled_costs import grown
from pipesight.pipeline.profiling import storages, undisturbed
from pipesight.pipeline.unit_timing import LOSS, KeptBytes, UnitRun, called_once, device_of, median, restored
from pipesight.pipeline.units import is_repeated
from pipesight.schedule.costs import Costs, Layer, Link, Peak

__all__ = ["profile_call"]


def profile_call(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: BatchDim = None,
    timeout: float = 2.0,
    link: Link | None = None,
) -> Costs:
    """Time the units of a model, and count their bytes.

    Units that are called more than once cannot begin a partition; they count with the unit before them.

    Args:
        model: It is left as it was, and runs where it is.
        args: Of a call with a whole batch.
        kwargs: Of the call.
        batch_dim: As that of the pipeline.
        timeout: Seconds to spend, about.
        link: The way between devices; by default, it takes no time.
    """
    dims = BatchDims(batch_dim, inspect.signature(model.forward))
    named = dict(kwargs or {})
    samples = sum(split_call(args, named, 1, dims).sizes)

    def run(chunks: int) -> UnitRun:
        def call() -> Any:
            mine, more = split_call(args, named, chunks, dims).calls[0]
            return model(*mine, **more)

        return UnitRun(model, [], call, [*tensors_in((list(args), named))])

    whole, part = run(1), run(4)
    few = split_call(args, named, 4, dims).sizes[0]
    with undisturbed(device_of(model)), restored(model):
        times = []
        for one in (whole, part):
            with one.hooked():
                one.count_calls()
                times.append(_times(one, timeout / 2))
        with whole.hooked():
            kept, outputs = whole.kept_bytes(), whole.output_bytes()
            peaks, other = {}, 0.0
            if (device := device_of(model)).type == "cuda":
                peaks = whole.peaks()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                known = storages([*model.parameters(), *model.buffers(), *gradients, *tensors_in((list(args), named))])
                other = float(max(torch.cuda.memory_allocated(device) - sum(known.values()), 0))
    groups = _groups(whole.calls)
    counted: set[int] = set()
    layers: list[Layer] = []
    for name, units in groups.items():
        (forward, backward), (few_forward, few_backward) = (
            [sum(t[u][k] for u in units) for k in (0, 1)] for t in times
        )
        before = layers[-1].output_bytes if layers else 0.0
        own = [kept[u] for u in units if u in kept] or [KeptBytes()]
        parameters = [p for u in units if u for p in whole.units[u].parameters()]
        layers.append(
            Layer(
                name,
                grown(forward, few_forward, few / samples),
                grown(backward, few_backward, few / samples),
                forward_each=forward - grown(forward, few_forward, few / samples),
                backward_each=backward - grown(backward, few_backward, few / samples),
                kept_bytes=sum(one.first for one in own),
                shared_bytes=own[0].both + before - own[0].earlier if before else 0.0,
                waiting_bytes=sum(one.waiting for one in own),
                peak=_peak([peaks[u] for u in units if u in peaks]),
                output_bytes=outputs.get(units[-1], 0.0),
                parameter_bytes=_bytes_of_new(parameters, counted),
                checkpointed=any(is_repeated(whole.units[u]) for u in units if u),
            )
        )
    inputs = float(sum(storages(tensors_in((list(args), named))).values()))
    loss = kept.get(LOSS, KeptBytes()).first
    found = Costs(tuple(layers), samples=samples, input_bytes=inputs, link=link or Link(), by_cuts=True)
    return replace(found, loss_bytes=loss, loss_peak=peaks.get(LOSS, Peak()), other_bytes=other)


def _peak(units: Sequence[Peak]) -> Peak:
    """Return what units take that run one after the other."""
    found = Peak()
    for unit in units:
        found = Peak(
            max(found.forward, found.forward_left + unit.forward),
            found.forward_left + unit.forward_left,
            max(unit.backward, unit.backward_left + found.backward),
            found.backward_left + unit.backward_left,
        )
    return found


def _times(run: UnitRun, timeout: float) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each unit, forward and backward."""
    run.times()  # the first run loads kernels and fills caches
    deadline = time.perf_counter() + timeout
    rounds = [run.times() for _ in range(3)]
    while time.perf_counter() < deadline:
        rounds.append(run.times())
    columns = {name: [found.get(name, (0.0, 0.0)) for found in rounds] for name in run.calls}
    return {name: (median([c[0] for c in column]), median([c[1] for c in column])) for name, column in columns.items()}


def _groups(calls: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the units that belong together, by the one that a partition can begin at."""
    able = set(called_once(calls))
    groups: dict[str, list[str]] = {}
    first: list[str] = []  # before any that is able
    for name in calls:
        if name in able:
            groups[name] = [*first, name]
            first = []
        elif groups:
            groups[next(reversed(groups))].append(name)
        else:
            first.append(name)
    return groups


def _bytes_of_new(parameters: Sequence[Tensor], counted: set[int]) -> float:
    """Return the bytes of parameters that have not been counted: tied ones count once."""
    new = {id(p): p for p in parameters if id(p) not in counted}
    counted |= set(new)
    return float(sum(p.nbytes for p in new.values()))
