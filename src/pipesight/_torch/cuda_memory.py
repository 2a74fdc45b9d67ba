"""The numbers of the CUDA allocator, without what PyTorch does to find the current device."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allocator_numbers", "forget_peaks"]


def allocator_numbers(gpu: int) -> dict[str, Any]:
    """Return the numbers of a GPU, by name and pool."""
    found: dict[str, Any] = torch._C._cuda_memoryStats(gpu)
    return found


def forget_peaks(gpu: int) -> None:
    """Let all peaks be what is in use now."""
    torch._C._cuda_resetPeakMemoryStats(gpu)
