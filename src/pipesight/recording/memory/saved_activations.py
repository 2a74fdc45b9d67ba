"""What the autograd graph of a task has saved, by layer: a walk over its nodes, which takes less than 1 µs for each."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesight._torch.autograd import sequence_number
from pipesight._torch.saved_tensors import following_nodes, hanging_weights, saved_by, saved_output
from pipesight._torch.tensors import base_of
from pipesight.recording.memory.storage_ledger import storage_of

__all__ = ["LayerBytes", "SavedActivations", "addresses", "saved_by_units"]

LayerBytes = list[int]
"""Of a layer: what it is the first to keep; what it keeps of earlier layers; and what is in both."""

_INPUT = -1


@dataclass(slots=True)
class _Found:
    """A storage: its bytes, and by autograd's numbers, who made it, if known, and who keeps it."""

    size: int
    made: int | None
    kept: list[int] = field(default_factory=list)


class SavedActivations:
    """What one task has saved. `walk` may be called as the task proceeds: it goes on from where it was."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """Until `forget`."""
        self.after_layers: list[tuple[int, str]] = []
        """Marks where layers have ended."""
        self._seen: set[int] = set()
        self._found: dict[int, _Found] = {}
        self._waiting: list[tuple[int, list[Tensor], int]] = []
        self.output_kept = 0
        """Bytes of outputs that the nodes which made them keep themselves, as that of a ReLU does."""

    def walk(self, ends: Iterable[Any]) -> None:
        """Find what the nodes have saved that lead to some ends, in the order in which the forward made them."""
        pending = []
        for end in ends:
            if (node := _node_of(end)) is not None:
                pending.append(node)
                self.output_kept += saved_output(node, getattr(end, "output_nr", 0))
        while pending:
            node = pending.pop()
            number = sequence_number(node)
            if number in self._seen:
                continue
            self._seen.add(number)
            for tensor in saved_by(node):
                self._add(tensor, number)
            leaves, size = hanging_weights(node)
            if leaves:
                self._waiting.append((number, leaves, size))
            pending.extend(following_nodes(node))

    def forget(self) -> None:
        """Let go of the tensors."""
        self.tensors, self._waiting = [], []

    def by_layer(
        self, marks: Sequence[tuple[int, str]], inputs: Iterable[Tensor | None], weights: Collection[int]
    ) -> tuple[dict[str, LayerBytes], int]:
        """Return the bytes by layer, without the weights, and the bytes of the task's inputs that are kept.

        Args:
            marks: The first number of each layer.
            inputs: What the task was given.
            weights: The addresses of what it keeps for no backward.
        """
        given = addresses(inputs)
        starts, names = [number for number, _ in marks], [name for _, name in marks]
        found: dict[str, LayerBytes] = {}
        of_inputs = 0
        for address, storage in self._found.items():
            if address in weights:
                continue
            layers = sorted({bisect.bisect_right(starts, number) - 1 for number in storage.kept})
            made = layers[0] if storage.made is None else bisect.bisect_right(starts, storage.made) - 1
            if address in given:
                made = _INPUT
            if made == _INPUT:
                of_inputs += storage.size
            for k in layers:
                if not 0 <= k < len(names):
                    continue
                own = found.setdefault(names[k], [0, 0, 0])
                counts, earlier = k == layers[0] and made != _INPUT, made < k
                own[0] += storage.size * counts
                own[1] += storage.size * earlier
                own[2] += storage.size * (counts and earlier)
        return {name: found[name] for name in dict.fromkeys(names) if name in found}, of_inputs

    def waiting_by_layer(self, marks: Sequence[tuple[int, str]], weights: Collection[int]) -> dict[str, int]:
        """Return the bytes of the gradients that weights wait for, where their part of the backward comes later."""
        starts = [number for number, _ in marks]
        found: dict[str, int] = {}
        for number, leaves, size in self._waiting:
            k = bisect.bisect_right(starts, number) - 1
            if k >= 0 and any(address in weights for address in addresses(leaves)):
                found[marks[k][1]] = found.get(marks[k][1], 0) + size
        return found

    def _add(self, tensor: Tensor, number: int) -> None:
        storage = storage_of(tensor)
        if storage is None:
            return
        found = self._found.get(storage.data_ptr())
        if found is None:
            maker = base_of(tensor).grad_fn
            found = _Found(storage.nbytes(), None if maker is None else sequence_number(maker))
            self._found[storage.data_ptr()] = found
            self.tensors.append(tensor)
        found.kept.append(number)


def saved_by_units(
    units: Iterable[tuple[str, Sequence[Tensor], Sequence[Tensor | None]]], weights: Collection[int]
) -> tuple[dict[str, LayerBytes], int]:
    """Return the same of layers that were recomputed one by one: by name, their arguments and what they have saved."""
    seen = set[int]()
    given: dict[int, int] | None = None  # what the first of them gets, comes from another partition
    found: dict[str, LayerBytes] = {}
    for name, arguments, tensors in units:
        inputs = addresses(arguments)
        given = inputs if given is None else given
        own = found.setdefault(name, [0, 0, 0])
        for address, size in addresses(tensors).items():
            if address in weights:
                continue
            counts = address not in seen and address not in given
            own[0] += size * counts
            own[1] += size * (address in inputs)
            own[2] += size * (counts and address in inputs)
            seen.add(address)
    return found, sum(size for address, size in (given or {}).items() if address in seen)


def addresses(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Return where the memory of some tensors is, and its bytes."""
    storages = (storage_of(t) for t in tensors if t is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage is not None}


def _node_of(end: Any) -> Any:
    """Return the node of a tensor, of an edge to a node, or the node itself."""
    if isinstance(end, Tensor):
        return end.grad_fn
    return getattr(end, "node", end)
