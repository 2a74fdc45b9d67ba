"""Tensors that share memory, and what layers change in place.

In the plain model, a layer that changes its input in place also changes a skip that was stashed from it. In a pipeline
it does not: each partition has its own graph, and maybe its own copy. The result would be silently wrong, so it is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesight._torch.tensors import storage_id

__all__ = ["Changes", "Region", "region_of"]


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of a tensor."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    def overlaps(self, other: Region) -> bool:
        """Return whether the two share any element."""
        if self.storage != other.storage or 0 in self.size or 0 in other.size:
            return False
        if self.itemsize != other.itemsize:
            return True
        extent = max(r.offset + sum((n - 1) * s for n, s in zip(r.size, r.stride, strict=True)) for r in (self, other))
        taken = torch.zeros(extent + 1, dtype=torch.bool, device="cpu")
        taken.as_strided(self.size, self.stride, self.offset).fill_(True)
        return bool(taken.as_strided(other.size, other.stride, other.offset).any())


def region_of(tensor: Tensor | None) -> Region | None:
    """Return the memory of a tensor, or ``None`` if it cannot be shared, as that of a sparse one."""
    if tensor is None or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    return Region(
        storage_id(tensor), int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), tensor.itemsize
    )


class Changes:
    """What partitions have changed in place in one micro-batch."""

    def __init__(self) -> None:
        self._changed: list[tuple[int, Region]] = []

    def note(self, j: int, regions: Sequence[Region | None], changed: Sequence[int]) -> None:
        """Note that partition j, into which tensors came from ``regions``, changed some of them; raise if shared."""
        for k in changed:
            region = regions[k]
            if region is None:
                continue
            if any(o is not None and n != k and o.overlaps(region) for n, o in enumerate(regions)):
                raise _refusal(j, "that it received twice, in a tuple or as a skip")
            self._changed.append((j, region))

    def check_skip(self, name: str, source: int, region: Region | None) -> None:
        """Raise if a partition after ``source``, which stashed a skip, has changed it."""
        for j, changed in self._changed:
            if j > source and region is not None and region.overlaps(changed):
                raise _refusal(j, f"that had been stashed as the skip '{name}'")


def _refusal(j: int, which: str) -> RuntimeError:
    return RuntimeError(
        f"partition {j} changed a tensor in place {which}: the plain model would change both, a pipeline does not; use "
        "inplace=False, clone() the tensor first, or put these layers into one partition"
    )
