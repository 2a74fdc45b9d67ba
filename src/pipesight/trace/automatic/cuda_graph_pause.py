"""Pause the spans of GPUs while a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipesight._patches import Patches
from pipesight.trace.gpu_spans import device_spans

__all__ = ["instrument_graphs"]


def instrument_graphs(patches: Patches) -> None:
    """Resolve no spans of GPUs while a graph is captured."""
    patches.wrap(torch.cuda.CUDAGraph, "capture_begin", _begin)
    patches.wrap(torch.cuda.CUDAGraph, "capture_end", _end)


def _begin(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device_spans.capturing(True)
    try:
        return original(*args, **kwargs)
    except BaseException:
        device_spans.capturing(False)
        raise


def _end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    finally:
        device_spans.capturing(False)
