"""What the allocator of a device has given out: PyTorch's on a GPU; on the CPU, that of the C library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

__all__ = ["allocated", "capacity", "most_allocated"]


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    return function


def allocated(device: torch.device) -> int | None:
    """Return the bytes in use on a device; on the CPU, those of the whole process, if its C library knows them."""
    if device.type == "cuda":
        return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"])
    function = _mallinfo() if device.type == "cpu" else None
    if function is None:
        return None
    found = function()
    return int(found.uordblks + found.hblkhd)


def capacity(device: torch.device) -> int | None:
    """Return the bytes that a GPU has."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def most_allocated(device: torch.device) -> int | None:
    """Return the most bytes that were in use on a GPU since the program last reset that."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])
