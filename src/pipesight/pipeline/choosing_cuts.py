"""Choose where to cut a model, by the time that its units take or by the memory that they keep.

The model itself runs, forward and backward, with hooks on its units. All that happens belongs to the unit that was
called last, as it will belong to the partition of that unit::

    forward    embedding | block 0 | block 1, what the model does itself | head, loss
    backward        the gradient of a unit's output ... that of the output of the unit before
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipesight._nested import tensors_in
from pipesight.pipeline.batch_dims import BatchDim, BatchDims
from pipesight.pipeline.calls import split_call
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.profiling import storages, undisturbed
from pipesight.pipeline.units import find_units
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

    def seconds(run: _Run) -> dict[str, float]:
        run.times()  # the first run loads kernels and fills caches
        deadline = time.perf_counter() + timeout
        rounds = [run.times() for _ in range(3)]
        while time.perf_counter() < deadline:
            rounds.append(run.times())
        return {name: sorted(found.get(name, 0.0) for found in rounds)[len(rounds) // 2] for name in run.calls}

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

    def size(run: _Run) -> dict[str, float]:
        kept = run.kept_bytes()
        counted: set[int] = set()
        for name in run.calls:
            parameters = {id(p): p for p in run.units[name].parameters() if id(p) not in counted} if name else {}
            counted |= set(parameters)
            kept[name] = kept.get(name, 0.0) + param_scale * sum(p.nbytes for p in parameters.values())
        return kept

    return _cuts(model, sample, partitions, chunks, batch_dim, size)


class _Run:
    """Runs a call of the model, forward and backward, and notes what happens when."""

    def __init__(self, model: nn.Module, opened: Sequence[str], call: Callable[[], Any]) -> None:
        self._model, self._call = model, call
        self._device = _device_of(model)
        self.units = find_units(model, opened)
        self.calls: dict[str, int] = {"": 1}
        """How often each unit was called, in the order of their first calls; the first is the model itself."""
        self._begin: Callable[[str], None] = lambda name: None
        self._end: Callable[[str, Any], None] = lambda name, output: None

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Put hooks onto the units for the duration of the block."""
        handles = []
        for name, module in self.units.items():
            handles.append(module.register_forward_pre_hook(lambda module, args, name=name: self._begin(name)))
            handles.append(module.register_forward_hook(lambda m, args, output, name=name: self._end(name, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count_calls(self) -> None:
        """Note which units are called, and how often."""
        self._begin = lambda name: self.calls.update({name: self.calls.get(name, 0) + 1})
        with torch.no_grad():
            self._call()
        self._begin = lambda name: None

    def times(self) -> dict[str, float]:
        """Return the seconds that belong to each unit, forward and backward."""
        stamps: list[tuple[str, Any]] = [("", self._stamp())]
        reached: list[tuple[str, Any]] = []

        def watch(name: str, output: Any) -> None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: reached.append((name, self._stamp())))

        self._begin, self._end = lambda name: stamps.append((name, self._stamp())), watch
        roots = self._roots(self._call())
        self._begin, self._end = lambda name: None, lambda name, output: None
        middle = self._stamp()
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        last = self._stamp()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for (name, start), (_, stop) in itertools.pairwise([*stamps, ("", middle)]):
            seconds[name] = seconds.get(name, 0.0) + self._between(start, stop)
        # What happens before a gradient reaches the output of a unit belongs to the units after it.
        backward = [(stamps[-1][0], middle), *reached, ("", last)]
        for (name, start), (_, stop) in itertools.pairwise(backward):
            seconds[name] = seconds.get(name, 0.0) + self._between(start, stop)
        return seconds

    def kept_bytes(self) -> dict[str, float]:
        """Return the bytes that each unit keeps for the backward, and those of its outputs."""
        found: dict[str, list[Tensor]] = {"": []}
        now = [""]

        def pack(tensor: Tensor) -> Tensor:
            found[now[0]].append(tensor.detach())
            return tensor

        def begin(name: str) -> None:
            now[0] = name
            found.setdefault(name, [])

        self._begin = begin
        known = set(storages([*self._model.parameters(), *self._model.buffers()]))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._call()
        self._begin = lambda name: None
        sizes: dict[str, float] = {}
        for name, tensors in found.items():
            mine = {address: size for address, size in storages(tensors).items() if address not in known}
            known |= set(mine)
            sizes[name] = float(sum(mine.values()))
        del output
        return sizes

    def _roots(self, output: Any) -> list[Tensor]:
        """Return the losses of an output; without any, all that has a gradient."""
        found = [t for t in flatten(output).tensors if t.requires_grad and t.is_floating_point()]
        return [t for t in found if t.dim() == 0] or found

    def _stamp(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        return float(stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1000)


def _cuts(
    model: nn.Module,
    sample: CallSample,
    partitions: int,
    chunks: int,
    batch_dim: BatchDim,
    measure: Callable[[_Run], dict[str, float]],
) -> list[str]:
    """Return the modules that begin partitions 1, 2 and so on, so that the costliest partition costs least."""
    if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
        raise ValueError(f"partitions must be a positive integer (partitions: {partitions!r})")
    args, kwargs = _call_of(sample)
    dims = BatchDims(batch_dim, inspect.signature(model.forward))

    def call() -> Any:
        mine, named = split_call(args, kwargs, chunks, dims).calls[0]
        return model(*mine, **named)

    opened: list[str] = []
    while True:
        run = _Run(model, opened, call)
        with undisturbed(_device_of(model)), _restored(model), run.hooked():
            run.count_calls()
            costs = measure(run)
        most = 1.1 * sum(costs.values()) / partitions
        stages = [name for name in run.calls if name and costs[name] > most and _has_blocks(run.units[name])]
        inner = [f"{name}.{child}" for name in stages for child, _ in run.units[name].named_children()]
        if not inner:
            return _balanced(model, run.calls, costs, partitions)
        opened += inner


def _balanced(model: nn.Module, calls: Mapping[str, int], costs: Mapping[str, float], partitions: int) -> list[str]:
    once = [name for name in calls if name and calls[name] == 1][1:]  # the first one begins partition 0
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


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _call_of(sample: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(sample, Mapping):
        return (), sample
    pair = isinstance(sample, tuple) and len(sample) == 2
    if pair and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], Mapping):
        return sample[0], sample[1]
    raise TypeError(
        "sample must be the arguments of a call of the model, (args, kwargs) or kwargs alone, such as ((x,), {}) or "
        f"{{'input_ids': ids}}, but got {type(sample).__name__}"
    )


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put a model into train mode, and restore modes, gradients and buffers after the block."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        model.train()
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
