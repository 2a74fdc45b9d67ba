"""Buffers to work in, one set per thread, kept from call to call: fresh memory costs more than the arithmetic on it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["take"]

MOST_VIEWS = 256


class Scratch(threading.local):
    """The buffers of one thread, by name, and the pieces of them that were handed out."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[tuple[str, int], Tensor] = {}


scratch = Scratch()


def take(name: str, size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A flat buffer that holds anything, until the same name is taken again in this thread."""
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    view = scratch.views.get((name, size))
    if view is None:
        buffer = scratch.buffers.get(name)
        if buffer is None or buffer.numel() < size or len(scratch.views) > MOST_VIEWS:
            scratch.views.clear()  # they would keep the old buffer
        with torch.inference_mode(False):  # an inference tensor cannot be written to outside of that mode
            if buffer is None or buffer.numel() < size:
                buffer = scratch.buffers[name] = torch.empty(max(size, 1 << 13), dtype=dtype, device=device)
            view = scratch.views[name, size] = buffer[:size]
    return view
