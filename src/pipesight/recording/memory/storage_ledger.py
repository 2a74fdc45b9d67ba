"""The memory behind tensors: what it is for, and whether it is still in use.

The ledger holds weak references to storages, so it changes no lifetime, and nobody has to tell it what was freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipesight._torch.tensors import local_part

__all__ = ["PARTS", "StorageLedger", "Sums", "storage_of"]

PARTS = ("weights", "gradients", "optimizer_state", "inputs", "activations")
"""What memory is for. What is for several counts as the first that it was found to be."""

Sums = dict[str, int]
"""Bytes by part."""


class StorageLedger:
    """The storages of one device."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, int, dict[int | None, str]]] = {}

    def add(self, tensors: Iterable[Tensor | None], part: str, partition: int | None) -> None:
        """Note what the memory of some tensors is for; ``partition`` is ``None`` outside of all."""
        for tensor in tensors:
            storage = None if tensor is None else storage_of(tensor)
            if storage is not None:
                reference: Any = StorageWeakRef(storage)
                entry = self._entries.setdefault(reference.cdata, (reference, storage.nbytes(), {}))
                entry[2].setdefault(partition, part)

    def sums(self) -> tuple[dict[int | None, Sums], Sums]:
        """Return what is in use by partition, and in all.

        What two partitions use counts in both, since they would not share it on two devices; in all, it counts once.
        """
        freed = [key for key, (reference, _, _) in self._entries.items() if reference.expired()]
        for key in freed:
            del self._entries[key]
        by_partition: dict[int | None, Sums] = {}
        total = dict.fromkeys(PARTS, 0)
        for _, size, holders in self._entries.values():
            for partition, part in holders.items():
                own = by_partition.get(partition)
                if own is None:
                    own = by_partition[partition] = dict.fromkeys(PARTS, 0)
                own[part] += size
            total[next(iter(holders.values()))] += size
        return by_partition, total


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory behind a tensor; ``None`` if it has none of its own kind, like sparse ones."""
    local = local_part(tensor)
    if local.layout is not torch.strided or local.device.type == "meta":
        return None
    try:
        storage = local.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage if storage.nbytes() else None
