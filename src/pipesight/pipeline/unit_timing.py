"""Time the units of a model while it runs itself, forward and backward, and count the bytes that they keep.

All that happens belongs to the unit that was called last, as it will belong to the partition of that unit::

    forward    embedding | block 0 | block 1, what the model does itself | head, loss
    backward        the gradient of a unit's output ... that of the output of the unit before
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipesight._nested import tensors_in
from pipesight._torch.autograd import next_sequence_number, sequence_number
from pipesight._torch.cuda_peaks import InsideTask, PeakMeter
from pipesight._torch.saved_tensors import saved_in_attributes, waiting_bytes
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.profiling import storages
from pipesight.pipeline.units import find_units
from pipesight.schedule.costs import Peak

__all__ = ["LOSS", "KeptBytes", "UnitRun", "called_once", "device_of", "median", "restored"]


LOSS = "loss_fn"
"""The name of what comes after the last unit."""


class KeptBytes(NamedTuple):
    """What a unit keeps for its backward."""

    first: float = 0.0
    """What no earlier one keeps."""
    earlier: float = 0.0
    """What earlier ones have made."""
    both: float = 0.0
    """What of that is in `first`."""
    waiting: float = 0.0
    """The gradients that its weights wait for, where their part of the backward comes later."""


class UnitRun:
    """Runs a call of the model, forward and backward, and notes what happens when."""

    def __init__(
        self, model: nn.Module, opened: Sequence[str], call: Callable[[], Any], given: Sequence[Tensor] = ()
    ) -> None:
        self._model, self._call, self._given = model, call, given
        self._device = device_of(model)
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

    def times(self) -> dict[str, tuple[float, float]]:
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
        forward = self._sum([*stamps, ("", middle)])
        # What happens before a gradient reaches the output of a unit belongs to the units after it.
        backward = self._sum([(stamps[-1][0], middle), *reached, ("", last)])
        return {name: (forward.get(name, 0.0), backward.get(name, 0.0)) for name in {*forward, *backward}}

    def _sum(self, stamps: Sequence[tuple[str, Any]]) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for (name, start), (_, stop) in itertools.pairwise(stamps):
            seconds[name] = seconds.get(name, 0.0) + self._between(start, stop)
        return seconds

    def kept_bytes(self) -> dict[str, KeptBytes]:
        """Return the bytes that each unit keeps for the backward. What comes after the last unit is the loss."""
        found: dict[str, list[tuple[Tensor, bool]]] = {"": []}
        now, start, last = [""], [next_sequence_number()], [""]
        starts = [(start[0], "")]

        def pack(tensor: Tensor) -> Tensor:
            earlier = tensor.grad_fn is not None and sequence_number(tensor.grad_fn) < start[0]
            kept = tensor.detach()  # a node must not keep its own output, which refers to it
            found[now[0]].append((kept, earlier))
            return kept

        def begin(name: str) -> None:
            found[last[0]] += found.pop(LOSS, [])
            now[0], start[0] = name, next_sequence_number()
            starts.append((start[0], name))
            found.setdefault(name, [])

        def end(name: str, output: Any) -> None:
            now[0], last[0] = LOSS, name
            start[0] = next_sequence_number()
            found.setdefault(LOSS, [])

        self._begin, self._end = begin, end
        weights = storages([*self._model.parameters(), *self._model.buffers()])
        known = {*weights, *storages(self._given)}
        seen: set[int] = set()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._call()
        self._begin, self._end = lambda name: None, lambda name, output: None

        def unit_of(number: int) -> tuple[int, str]:
            return starts[bisect.bisect_right(starts, number, key=lambda entry: entry[0]) - 1]

        waiting: dict[str, int] = {}
        for size, number in waiting_bytes(tensors_in(output), weights):
            name = unit_of(number)[1]
            waiting[name] = waiting.get(name, 0) + size
        for tensor, number in saved_in_attributes(tensors_in(output)):
            first, name = unit_of(number)
            if LOSS in found and number >= start[0]:
                first, name = start[0], LOSS
            found[name].append(
                (tensor.detach(), tensor.grad_fn is not None and sequence_number(tensor.grad_fn) < first)
            )
        sizes: dict[str, KeptBytes] = {}
        for name, tensors in found.items():
            mine = {a: size for a, size in storages(t for t, _ in tensors).items() if a not in known}
            old = {a: size for a, size in storages(t for t, earlier in tensors if earlier).items() if a not in known}
            first, both = (sum(size for a, size in some.items() if a not in seen) for some in (mine, old))
            seen |= set(mine)
            sizes[name] = KeptBytes(first, sum(old.values()), both, waiting.get(name, 0))
        del output
        return sizes

    def peaks(self) -> dict[str, Peak]:
        """Return what each unit, and the loss, takes of a GPU while it runs, without gradients of weights."""
        meter, device = PeakMeter(), self._device
        for parameter in self._model.parameters():
            parameter.grad = None
        task = InsideTask(device, meter, meter.most_since(device)[0])

        def watch(name: str, output: Any) -> None:
            task.begin(None)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: task.begin(name))

        self._begin, self._end = task.begin, watch
        roots = self._roots(self._call())
        self._begin, self._end = lambda name: None, lambda name, output: None
        forward, gradients = task.found(), [torch.ones_like(root) for root in roots]
        task = InsideTask(device, meter, meter.most_since(device)[0])
        if roots:
            torch.autograd.backward(roots, gradients)
        del roots
        backward, counted = task.found(), set[int]()
        found = {LOSS: Peak(*forward["after"], *backward["before"])}
        for name, own in forward["layers"].items():
            new = {id(p): p.nbytes for p in self.units[name].parameters() if id(p) not in counted}
            counted |= set(new)
            behind = backward["layers"].get(name, [sum(new.values())] * 2)
            found[name] = Peak(*own, *(number - sum(new.values()) for number in behind))
        return found

    def output_bytes(self) -> dict[str, float]:
        """Return the bytes of what each unit returns."""
        found: dict[str, float] = {}
        self._end = lambda name, output: found.update({name: float(sum(t.nbytes for t in tensors_in(output)))})
        with torch.no_grad():
            self._call()
        self._end = lambda name, output: None
        return found

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


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def called_once(calls: Mapping[str, int]) -> list[str]:
    """Return the units that can begin a partition, given how often each is called."""
    return [name for name in calls if name and calls[name] == 1]


def median(values: Sequence[float]) -> float:
    """Return the middle one, or the upper of two."""
    return sorted(values)[len(values) // 2]


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
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
