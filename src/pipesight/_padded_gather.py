"""Gather tensors of different lengths from all ranks of a group in one collective, padded to one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipesight._gloo_exit import wait_for_gloo_at_exit

__all__ = ["PaddedGather"]


class PaddedGather:
    """Gathers one-dimensional tensors over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        wait_for_gloo_at_exit()

    def __call__(self, sent: Tensor, size: int, wait: Callable[[Any], object] | None = None) -> Tensor:
        """Return what each rank sent, one row per rank, padded with zeros.

        ``size`` is the longest length of all ranks. ``wait`` is given torch's handle; by default, torch waits.
        """
        padded = sent.new_zeros(size)
        padded[: sent.numel()] = sent
        rows = sent.new_empty(len(self.ranks), size)
        work = dist.all_gather(list(rows), padded, group=self.group, async_op=wait is not None)
        if wait is not None:
            wait(work)
        return rows
