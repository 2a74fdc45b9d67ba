"""What each layer of a sequential model costs: seconds, or bytes kept for the backward.

Layers are run one after the other, each as a copy that is dropped before the next one is made::

    sample --> copy of layer 0 --> output, detached --> copy of layer 1 --> ...
                    |                                        |
                 cost of 0                                cost of 1

So the model keeps its parameters, buffers, gradients and modes, and is never in memory twice.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pipesight._torch.cuda_peaks import PeakMeter
from pipesight._torch.saved_tensors import saved_in_attributes, waiting_bytes
from pipesight.pipeline.microbatch import TensorOrTensors, as_tuple, scatter
from pipesight.pipeline.skip import SkipTracker, use_tracker

__all__ = [
    "Device",
    "LayerProfile",
    "Sample",
    "profile_layers",
    "profile_size",
    "profile_time",
    "storages",
    "undisturbed",
]

Device: TypeAlias = torch.device | str | int | None
Sample: TypeAlias = TensorOrTensors
_Cost = TypeVar("_Cost")


def profile_time(model: nn.Sequential, sample: Sample, *, timeout: float = 1.0, device: Device = None) -> list[float]:
    """Return the seconds that forward and backward of each layer take, the median of several runs."""
    share, place = _share(model, timeout), _place(device)
    with undisturbed(place):
        return _profile(model, sample, place, lambda layer: sum(_median_seconds(layer, place, share)))


def profile_size(
    model: nn.Sequential, sample: Sample, *, chunks: int = 1, param_scale: float = 2.0, device: Device = None
) -> list[float]:
    """Return the bytes that each layer keeps; :func:`balance_by_size` has the formula."""
    if chunks < 1:
        raise ValueError(f"chunks must be a positive integer (chunks: {chunks})")
    if not 0 <= param_scale < math.inf:
        raise ValueError(f"param_scale must be finite and not negative (param_scale: {param_scale})")
    first = scatter(as_tuple(sample, "sample"), chunks)[0]
    sample, place = first[0] if isinstance(sample, Tensor) else first, _place(device)

    def size(layer: _Layer) -> float:
        return layer.kept().in_all + param_scale * sum(p.nbytes for p in layer.module.parameters())

    with undisturbed(place):
        return _profile(model, sample, place, size)


def profile_layers(
    model: nn.Sequential, sample: Sample, *, timeout: float = 1.0, device: Device = None
) -> list[LayerProfile]:
    """Return what each layer costs, times and bytes, with the whole ``sample``."""
    share, place = _share(model, timeout), _place(device)

    def profile(layer: _Layer) -> LayerProfile:
        forward, backward = _median_seconds(layer, place, share)
        kept = layer.kept()
        outputs = sum(t.nbytes for t in as_tuple(layer.output, "output"))
        parameters = sum(p.nbytes for p in layer.module.parameters())
        peaks = layer.peaks(place, parameters) if place.type == "cuda" else None
        return LayerProfile(forward, backward, kept, outputs, parameters, peaks)

    with undisturbed(place):
        return _profile(model, sample, place, profile)


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """What a layer keeps for its backward and for later layers."""

    own: int
    """Neither its input nor, unless it saves that itself, its output."""
    of_input: int
    """Of its input."""
    of_output: int
    """What of `own` is its output."""
    in_all: int
    """With its output, and without its input."""
    waiting: int
    """The gradients that its weights wait for, where their part of the backward comes later."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer: seconds, and bytes kept for the backward, of the output, and of the parameters."""

    forward: float
    backward: float
    kept: KeptBytes
    output_bytes: int
    parameter_bytes: int
    peaks: tuple[int, int] | None
    """On a GPU: the most bytes that its forward takes, and its backward without the gradients of its weights."""


def _share(model: nn.Sequential, timeout: float) -> float:
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout must be finite and not negative (timeout: {timeout})")
    return timeout / max(len(model), 1)


def _median_seconds(layer: _Layer, place: torch.device, share: float) -> tuple[float, float]:
    layer.seconds(place)  # the first run loads kernels and fills caches
    times: list[tuple[float, float]] = []
    deadline = time.perf_counter() + share
    while len(times) < 3 or time.perf_counter() < deadline:
        times.append(layer.seconds(place))
    return sorted(times, key=sum)[len(times) // 2]


def _profile(model: nn.Sequential, sample: Sample, place: torch.device, cost: Callable[[_Layer], _Cost]) -> list[_Cost]:
    costs: list[_Cost] = []
    skips = _Skips()
    output = _each(lambda t: _detached(t).to(place), sample)
    for name, original in zip(model._modules, model, strict=True):  # named_children() skips repeated layers
        try:
            layer = _Layer(copy.deepcopy(original).to(place).train(), output, skips)
            with use_tracker(skips):
                costs.append(cost(layer))
        except Exception as error:
            inputs = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in as_tuple(output, "input"))
            error.add_note(f"while profiling layer '{name}' ({type(original).__name__}) with input {inputs}")
            raise
        output = _each(_detached, layer.output)
        del layer
        skips.advance()
    return costs


class _Layer:
    """A copy of a layer, with the input that it gets in the model."""

    def __init__(self, module: nn.Module, input: TensorOrTensors, skips: _Skips) -> None:
        self.module, self.input, self.skips = module, input, skips
        self.output = input

    def seconds(self, place: torch.device) -> tuple[float, float]:
        """Run forward and backward once, and return the time that each took."""
        input = self._rewind()
        forward, self.output = _timed(place, lambda: self.module(input))
        roots = [t for t in self._results() if t.requires_grad]
        if not roots:
            return forward, 0.0
        gradients = [torch.ones_like(t) for t in roots]
        return forward, _timed(place, lambda: torch.autograd.backward(roots, gradients))[0]

    def kept(self) -> KeptBytes:
        """Run forward once, and return the bytes that are kept for the backward and for later layers."""
        input = self._rewind()
        saved: list[weakref.ref[Tensor]] = []

        def pack(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            saved.append(weakref.ref(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.output = self.module(input)
        # A part of the graph that leads to no output is gone by now, and with it what it had saved.
        alive = [tensor for reference in saved if (tensor := reference()) is not None]
        alive += [tensor for tensor, _ in saved_in_attributes(self._results())]
        popped = [t for t in self.skips.popped.values() if t is not None]
        weights = storages([*self.module.parameters(), *self.module.buffers()])
        given, put_out = storages([*as_tuple(input, "input"), *popped]), storages(as_tuple(self.output, "output"))
        for_later = storages(t for t in self.skips.stashed.values() if t is not None)
        kept = {a: size for a, size in (storages(alive) | for_later).items() if a not in weights}
        own = {a: size for a, size in kept.items() if a not in given}
        in_all = own | {a: size for a, size in put_out.items() if a not in given and a not in weights}
        return KeptBytes(
            sum(own.values()),
            sum(size for a, size in kept.items() if a in given),
            sum(size for a, size in own.items() if a in put_out),
            sum(in_all.values()),
            sum(size for size, _ in waiting_bytes(self._results(), weights)),
        )

    def peaks(self, place: torch.device, parameters: int) -> tuple[int, int]:
        """Run forward and backward once, and return the most bytes that they take on a GPU."""
        meter = PeakMeter()
        self.module.zero_grad()
        input = self._rewind()
        before, _ = meter.most_since(place)
        self.output = self.module(input)
        forward = meter.most_since(place)[1] - before
        if not (roots := [t for t in self._results() if t.requires_grad]):
            return forward, 0
        gradients = [torch.ones_like(t) for t in roots]
        before, _ = meter.most_since(place)
        torch.autograd.backward(roots, gradients)
        return forward, meter.most_since(place)[1] - before - parameters

    def _rewind(self) -> TensorOrTensors:
        self.skips.rewind()
        return _each(_fresh, self.input)

    def _results(self) -> list[Tensor]:
        stashed = [t for t in self.skips.stashed.values() if t is not None]
        return [*as_tuple(self.output, "output"), *stashed]


class _Skips(SkipTracker):
    """Lets a layer that runs many times pop, each time, what an earlier layer stashed."""

    def __init__(self) -> None:
        super().__init__()
        self.stashed: dict[Hashable, Tensor | None] = {}
        self.popped: dict[Hashable, Tensor | None] = {}

    def stash(self, key: Hashable, tensor: Tensor | None) -> None:
        self.stashed[key] = tensor

    def pop(self, key: Hashable) -> Tensor | None:
        if key in self.stashed:  # stashed by this very layer, a block with both ends inside
            return self.stashed.pop(key)
        if key not in self.popped:
            self.popped[key] = self._copy(key)
        return self.popped[key]

    def rewind(self) -> None:
        """Prepare to run the layer again: copy what it popped last time, before the clock starts."""
        self.stashed, self.popped = {}, {key: self._copy(key) for key in self.popped}

    def advance(self) -> None:
        """Move on to the next layer."""
        for key in self.popped:
            del self.tensors[key]
        self.tensors |= {key: None if t is None else _detached(t) for key, t in self.stashed.items()}
        self.stashed, self.popped = {}, {}

    def _copy(self, key: Hashable) -> Tensor | None:
        tensor = self.tensors[key]
        return None if tensor is None else _fresh(tensor)


def _each(function: Callable[[Tensor], Tensor], value: TensorOrTensors) -> TensorOrTensors:
    return function(value) if isinstance(value, Tensor) else tuple(function(t) for t in value)


def _detached(tensor: Tensor) -> Tensor:
    """Detach ``tensor`` from its graph, but keep its ``requires_grad``."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _fresh(tensor: Tensor) -> Tensor:
    """Return a copy that a layer may change in place, unlike a leaf of the graph."""
    return _detached(tensor).clone()


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return address and bytes of the memory behind ``tensors``. Sparse ones, mostly constants, have none."""
    found = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _timed(place: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Run ``work`` on an idle device, and return the seconds until it was done, and its result."""
    if place.type == "cpu":
        begin = time.perf_counter()
        result = work()
        return time.perf_counter() - begin, result
    torch.cuda.synchronize(place)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000, result


def _place(device: Device) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"layers can be profiled on cpu and cuda only (device: {place})")
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


@contextlib.contextmanager
def undisturbed(place: torch.device) -> Iterator[None]:
    """Record graphs whatever the caller's mode; restore random states and free CUDA memory afterwards."""
    cuda = place.type == "cuda"
    with (
        torch.cuda.device(place) if cuda else contextlib.nullcontext(),
        torch.random.fork_rng(devices=[place] if cuda else []),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        if cuda:  # use the device in the backward's own thread once, or cuBLAS warns
            torch.ones(1, device=place, requires_grad=True).exp().backward()
        yield
    if cuda:
        torch.cuda.empty_cache()
