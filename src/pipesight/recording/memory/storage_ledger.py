"""The memory behind tensors: what it is for, and whether it is still in use.

The ledger holds weak references to storages, so it changes no lifetime, and nobody has to tell it what was freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipesight._torch.tensors import is_freed, local_part, storage_key

__all__ = ["PARTS", "StorageLedger", "Sums", "storage_of"]

PARTS = ("weights", "gradients", "optimizer_state", "inputs", "activations")
"""What memory is for. What is for several counts as the first that it was found to be."""
_LASTING = ("weights", "optimizer_state")
"""Those that stay from step to step."""

Sums = dict[str, int]
"""Bytes by part."""
_Entry = tuple[StorageWeakRef, int, dict[int | None, str]]


class StorageLedger:
    """The storages of one device.

    Models have many weights and few activations at a time: sums are kept, and what lasts is looked through seldom.
    """

    def __init__(self) -> None:
        self._lasting: dict[int, _Entry] = {}
        self._passing: dict[int, _Entry] = {}
        self._by_partition: dict[int | None, Sums] = {}
        self._total = dict.fromkeys(PARTS, 0)

    def add(self, tensors: Iterable[Tensor | None], part: str, partition: int | None) -> None:
        """Note what the memory of some tensors is for; ``partition`` is ``None`` outside of all."""
        for tensor in tensors:
            storage = None if tensor is None else storage_of(tensor)
            if storage is None:
                continue
            key = storage_key(storage)
            entry = self._lasting.get(key) or self._passing.get(key)
            if entry is None:
                reference: Any = StorageWeakRef(storage)
                entry = (reference, storage.nbytes(), {})
                (self._lasting if part in _LASTING else self._passing)[key] = entry
                self._total[part] += entry[1]
            if partition not in entry[2]:
                entry[2][partition] = part
                own = self._by_partition.get(partition)
                if own is None:
                    own = self._by_partition[partition] = dict.fromkeys(PARTS, 0)
                own[part] += entry[1]

    def sums(self, *, lasting: bool = False) -> tuple[dict[int | None, Sums], Sums]:
        """Return what is in use by partition, and in all.

        What two partitions use counts in both, since they would not share it on two devices; in all, it counts once.

        Args:
            lasting: Look whether weights and optimizer state are still in use, too.
        """
        for entries in (self._lasting, self._passing) if lasting else (self._passing,):
            for key in [key for key, (reference, _, _) in entries.items() if is_freed(reference.cdata)]:
                _, size, holders = entries.pop(key)
                self._total[next(iter(holders.values()))] -= size
                for partition, part in holders.items():
                    self._by_partition[partition][part] -= size
        return {partition: {**own} for partition, own in self._by_partition.items()}, {**self._total}


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
