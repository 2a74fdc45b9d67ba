"""Gather tensors of different lengths from all ranks of a group in one collective, padded to one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["PaddedGather"]


class PaddedGather:
    """Gathers one-dimensional tensors over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self._kept: list[Tensor] = []  # else a thread of gloo may be the one that frees them, at exit

    def __call__(self, sent: Tensor, size: int, wait: Callable[[Any], object] | None = None) -> Tensor:
        """Return what each rank sent, one row per rank, padded with zeros.

        ``size`` is the longest length of all ranks. ``wait`` is given torch's handle; by default, torch waits.
        """
        padded = sent.new_zeros(size)
        padded[: sent.numel()] = sent
        rows = sent.new_empty(len(self.ranks), size)
        parts = list(rows)
        self._kept = [padded, *parts]
        work = dist.all_gather(parts, padded, group=self.group, async_op=wait is not None)
        if wait is not None:
            wait(work)
        return rows
