"""The most that a GPU gives out in the middle of a task, from layer to layer.

The allocator knows the most since its peaks were last reset, so they are reset wherever a layer begins or ends::

    given out     ┌─┐   ┌┐             of b:  most │─┐┌┐   from its beginning on
               ┌──┘ └───┘└─┐                       │ └┘└──── left, when the next begins
    ───────────┘           └──
    forward    a    b    c   after the layers

What the program asks for, such as `torch.cuda.max_memory_allocated`, stays what it would be.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from pipesight._patches import Patches
from pipesight._torch.cuda_memory import allocator_numbers, forget_peaks

__all__ = ["InsideTask", "PeakMeter"]

AFTER, BEFORE = "after", "before"
_Numbers = dict[str, Any]


class PeakMeter:
    """Reads peaks and resets them."""

    def __init__(self) -> None:
        self._forgotten: dict[int, _Numbers] = {}  # peaks that the program could still ask for
        # Several threads may allocate on a GPU, and the program may ask meanwhile, in a handler of a signal, too.
        self._merging = threading.RLock()
        self._patches = Patches()

    def most_since(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes in use on a GPU, and the most since this was last called for it."""
        gpu = torch.cuda.current_device() if device.index is None else device.index
        if not self._forgotten:  # from now on for good: the program may ask when nothing is recorded anymore
            self._patches.wrap(torch.cuda.memory, "memory_stats_as_nested_dict", self._answer)
            self._patches.wrap(torch.cuda.memory, "reset_peak_memory_stats", self._forget)
            if (newer := getattr(torch, "accelerator", None)) is not None and hasattr(newer, "memory"):
                self._patches.wrap(newer.memory, "memory_stats", self._answer_flat)
                self._patches.wrap(newer.memory, "reset_peak_memory_stats", self._forget)
        with self._merging:
            numbers = allocator_numbers(gpu)
            forget_peaks(gpu)  # at once: a peak of another thread in between is lost
            found = numbers["allocated_bytes"]["all"]
            now, most = int(found["current"]), int(found["peak"])
            _keep_higher(numbers, self._forgotten.setdefault(gpu, {}))
        return now, most

    def _answer(self, original: Any, device: Any = None) -> Any:
        with self._merging:
            numbers = original(device)
            if (gpu := _number(device)) in self._forgotten:
                _keep_higher(numbers, self._forgotten[gpu])
        return numbers

    def _answer_flat(self, original: Any, device: Any = None) -> Any:
        with self._merging:
            numbers = original(device)
            for name in numbers if (gpu := _number(device)) in self._forgotten else ():
                *path, kind = name.split(".")
                known: Any = self._forgotten[gpu]
                for part in path if kind == "peak" else ():
                    known = known.get(part, {})
                if kind == "peak":
                    numbers[name] = max(numbers[name], known.get("peak", 0))
        return numbers

    def _forget(self, original: Any, device: Any = None) -> Any:
        with self._merging:
            result = original(device)
            if (gpu := _number(device)) in self._forgotten:
                self._forgotten[gpu].clear()
        return result


def _keep_higher(numbers: _Numbers, known: _Numbers) -> None:
    """Bring the peaks of both to the higher one."""
    for name, value in numbers.items():
        if isinstance(value, dict):
            _keep_higher(value, known.setdefault(name, {}))
        elif name == "peak":
            numbers[name] = known[name] = max(value, known.get(name, 0))


def _number(device: Any) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


class InsideTask:
    """What a task takes: before its layers, in each, and after."""

    def __init__(self, device: torch.device, meter: PeakMeter, in_use: int) -> None:
        self._device, self._meter = device, meter
        self._part: tuple[str, str] = (BEFORE, "")
        self._found: dict[tuple[str, str], list[int]] = {}
        self.in_use = in_use

    def begin(self, layer: str | None) -> None:
        """End the part of the task under way; begin a layer, or the time after one."""
        now, most = self._meter.most_since(self._device)
        own = self._found.setdefault(self._part, [0, 0])
        own[0] = max(own[0], own[1] + most - self.in_use)
        own[1] += now - self.in_use
        self.in_use = now
        self._part = (AFTER, "") if layer is None else ("layers", layer)

    def found(self) -> dict[str, Any]:
        """End the task; return the most bytes of each part, and those it left, from its beginning on."""
        self.begin(None)
        layers = {name: numbers for (kind, name), numbers in self._found.items() if kind == "layers"}
        return {kind: self._found.get((kind, ""), [0, 0]) for kind in (BEFORE, AFTER)} | {"layers": layers}
