"""What the allocator of a device has given out: PyTorch's on a GPU; on the CPU, that of the C library."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from pipesight.recording.memory.machine_memory import machine_memory

__all__ = ["allocated", "capacity", "most_allocated", "resident"]


_OWN_PAGES = Path("/proc/self/statm")


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


def resident(device: torch.device) -> int | None:
    """Return the bytes that the process has of the machine, those that its C library keeps for later included."""
    if device.type != "cpu":
        return None
    try:
        return int(_OWN_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # not on this system
        return None


def capacity(device: torch.device) -> int | None:
    """Return the bytes that a GPU has, or those of the machine that the process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory() if device.type == "cpu" else None


def most_allocated(device: torch.device) -> int | None:
    """Return the most bytes that were in use on a GPU since the program last reset that."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])
