"""The units of a model in their partitions: each where it is first called, on the partition's device."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipesight._torch.module_internals import is_compiled
from pipesight.pipeline.checkpoint import Buffers
from pipesight.pipeline.partition import Partition, PlacedPartition, SkipRoutes, weights_changed
from pipesight.pipeline.seen_changes import ModelAttributes
from pipesight.pipeline.units import find_units, guess_parts, is_repeated

__all__ = ["PlacedUnits", "Placement", "Unit"]


@dataclass(eq=False, slots=True)
class Unit:
    """A unit of the model, and what the engine has learned about it."""

    name: str
    module: nn.Module
    buffers: Buffers
    is_checkpointed: bool  # others save little: a `Linear`, its input
    is_compiled: bool
    settled: bool = False  # it has been called
    closed: dict[bool, bool] = field(default_factory=dict)
    """Whether a call, with gradients or without, used nothing of other partitions but its arguments."""


class PlacedUnits(PlacedPartition):
    """The units of one partition, and the parameters of others that it uses: tied ones."""

    def __init__(self, j: int, layers: Partition, device: torch.device) -> None:
        super().__init__(j, layers, device, SkipRoutes([Partition()] * (j + 1)))
        self.guests: dict[int, Tensor] = {}
        self.seen: set[Unit] = set()
        """The units that have been called here."""

    def trainable(self) -> list[Tensor]:
        """Return the tensors that get gradients here."""
        own = super().trainable()
        known = {id(t) for t in own}
        return own + [t for key, t in self.guests.items() if key not in known and t.requires_grad]

    def note_leaves(self, leaves: Mapping[int, Tensor], known: Container[int]) -> list[Tensor]:
        """Remember leaves, by id, that the graph of a task reaches; return those not ``known``."""
        new = {key: leaf for key, leaf in leaves.items() if key not in known}
        self.guests.update(new)
        self.new |= bool(new)  # a micro-batch that is under way may use them, too
        return [*new.values()]

    def check_weights(self, weights: list[Tensor], versions: list[int]) -> None:
        """Raise if the tensors that were `trainable` at forward have been changed."""
        if [weight._version for weight in weights] != versions:
            raise weights_changed()


class Placement:
    """Which unit and which parameter is in which partition.

    Until a unit is called, its place is a guess: that of the last cut before it, in the order in which the model
    registers its modules.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[str], devices: Sequence[torch.device]) -> None:
        self.model, self.devices = model, list(devices)
        modules = dict(model.named_modules())
        self.cuts = {modules[name]: k for k, name in enumerate(cuts, start=1)}
        self.names = ["", *cuts]
        self.attributes = ModelAttributes(model)
        self.units = {
            module: Unit(name, module, Buffers(module), is_repeated(module), _compiled(module))
            for name, module in find_units(model, cuts).items()
        }
        self.partitions = [Partition() for _ in devices]
        self.placed = [PlacedUnits(j, self.partitions[j], device) for j, device in enumerate(devices)]
        self._homes: dict[int, tuple[Tensor, int, bool]] = {}  # of parameters and buffers; whether it is no guess
        self._place_all(cuts)

    def __reduce__(self) -> Any:
        return Placement, (self.model, self.names[1:], self.devices)  # a copy has its own tensors to learn about

    @property
    def on_one_device(self) -> bool:
        """Whether all partitions are on the same device."""
        return len(set(self.devices)) == 1

    def move(self, devices: Sequence[torch.device]) -> None:
        """Note that the partitions have been moved to other devices."""
        self.devices[:] = devices
        for partition, device in zip(self.placed, devices, strict=True):
            partition.device = device

    def _place_all(self, cuts: Sequence[str]) -> None:
        parts = guess_parts((name for name, _ in self.model.named_modules()), cuts)
        for name, module in self.model.named_modules():
            j = parts[name]
            if (unit := self.units.get(module)) is not None:
                self.partitions[j]._modules[unit.name] = module
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.use(tensor, j, guess=True)

    def settle(self, unit: Unit, j: int) -> None:
        """Note that a unit is called in partition j: there it belongs if this is its first call."""
        layers = self.partitions[j]._modules
        if not unit.settled:
            unit.settled = True
            for partition in self.partitions:
                partition._modules.pop(unit.name, None)
            layers[unit.name] = unit.module  # at the end: units are in the order of their first calls
        for tensor in (*unit.module.parameters(), *unit.module.buffers()):
            self.use(tensor, j)
        self.placed[j].seen.add(unit)

    def use(self, tensor: Tensor, j: int, *, guess: bool = False) -> None:
        """Note that partition j uses a parameter or buffer, and move it there if it is the first to do so."""
        home = self._homes.get(id(tensor))
        if home is None or not (home[2] or guess):
            self._homes[id(tensor)] = (tensor, j, not guess)
            if tensor.device != self.devices[j]:
                tensor.data = tensor.data.to(self.devices[j])
        if not guess:
            self.placed[j].guests[id(tensor)] = tensor
            self.placed[j].new = True

    def is_known(self, tensor: Tensor, j: int) -> bool:
        """Tell whether partition j is known to use a parameter."""
        return id(tensor) in self.placed[j].guests


def _compiled(module: nn.Module) -> bool:
    return any(is_compiled(inner) for inner in module.modules())
