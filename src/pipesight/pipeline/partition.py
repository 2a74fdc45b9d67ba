"""A sequential model cut into partitions: their layers, their devices, and the skips between them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipesight import context
from pipesight._nested import tensors_in
from pipesight._torch.autograd import next_sequence_number
from pipesight.pipeline.batchnorm import DeferredBatchNorm
from pipesight.pipeline.checkpoint import Checkpointer
from pipesight.pipeline.skip import SkipKey, skip_keys

__all__ = [
    "Partition",
    "PlacedPartition",
    "SkipRoutes",
    "non_sequential",
    "split",
    "verify_sequential",
    "watch_backward",
    "weights_changed",
]


class Partition(nn.Sequential):
    """Consecutive layers of the original model, under their original names."""

    def forward(self, input: Any) -> Any:
        """Run the layers one after the other, and keep the context up to date."""
        where = context.current()
        if where is None:
            return super().forward(input)  # type: ignore[no-untyped-call]
        for name, layer in self._modules.items():
            assert layer is not None
            where.layer = name
            where.marks.append((next_sequence_number(), name))
            if where.observers.members:
                where.observers.layer_started(where)
                output = layer(input)
                where.observers.layer_ended(where)
                watch_backward(input, output, name)
                input = output
            else:
                input = layer(input)
        return input


def watch_backward(input: object, output: object, name: str) -> None:
    """Tell the observers when backward reaches a layer.

    Its backward starts when the gradient reaches a node of its output, and ends when the next layer's starts or the
    task ends. A layer that adds no node has none.
    """

    def reached(_: object) -> None:
        where = context.current()
        if where is None or where.phase not in ("backward", "weight") or where.layer == name:
            return
        if not where.observers.members:
            return
        if where.layer is not None:
            where.observers.layer_ended(where)
        where.layer = name
        where.observers.layer_started(where)

    for node in _nodes_between(input, output):
        node.register_prehook(reached)


def _nodes_between(input: object, output: object) -> Collection[Node]:
    """Return the nodes of the output that are not the input's."""
    if isinstance(output, Tensor) and isinstance(input, Tensor):  # as in most layers
        node = output.grad_fn
        return () if node is None or node is input.grad_fn else (node,)
    return _nodes(output) - _nodes(input)


def _nodes(value: object) -> set[Node]:
    return {t.grad_fn for t in tensors_in(value) if t.grad_fn is not None}


def verify_sequential(module: nn.Module) -> None:
    """Raise unless ``module`` is a sequential whose layers can be put on different devices."""
    if not isinstance(module, nn.Sequential):
        raise non_sequential(module)
    if type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"non-sequential module cannot be partitioned: {type(module).__name__} is an nn.Sequential "
            "with its own forward, which would not be called; make that a layer, see docs/how-to/sequential.md"
        )
    first: dict[nn.Module | None, str] = {}
    for name, child in module._modules.items():  # named_children() skips repeated layers
        if first.setdefault(child, name) != name:
            raise ValueError(
                "module with duplicate children is not supported "
                f"(layers '{first[child]}' and '{name}' are the same {type(child).__name__}); put them into one layer"
            )
    owner: dict[Tensor, str] = {}
    for name, child in module.named_children():
        for parameter in child.parameters():
            if owner.setdefault(parameter, name) != name:
                raise ValueError(
                    "module with duplicate parameters in distinct children is not supported "
                    f"(layers '{owner[parameter]}' and '{name}' share one); put them into one layer"
                )


def non_sequential(module: object) -> TypeError:
    """Return the error about a module that cannot be cut; a note says what to do."""
    error = TypeError("non-sequential module cannot be partitioned")
    error.add_note(
        f"module must be nn.Sequential to be partitioned, but got {type(module).__name__}; write it as one, "
        "nn.Sequential(layer, layer, ...), in which each layer takes the output of the one before, or cut it as it is, "
        "with cuts=[...] of pipesight.Pipeline or DistributedPipeline; see docs/any-model.md"
    )
    return error


def split(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device], deferred_batch_norm: bool
) -> list[Partition]:
    """Move the layers of ``module`` into ``len(balance)`` partitions, each on its device."""
    layers = iter(module.named_children())
    partitions = []
    for size, device in zip(balance, devices, strict=True):
        partition = Partition(OrderedDict(next(layers) for _ in range(size)))
        if deferred_batch_norm:
            DeferredBatchNorm.convert(partition)
        partition.to(device)
        partition.training = module.training  # its own flag alone: some layers may be in another mode
        partitions.append(partition)
    return partitions


class SkipRoutes:
    """Which skips go from one partition to another; those within a partition need no route."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self.source: dict[SkipKey, int] = {}
        self.target: dict[SkipKey, int] = {}
        stashed: dict[SkipKey, int] = {}
        for j, partition in enumerate(partitions):
            stashes, pops = skip_keys(partition)
            stashed.update(dict.fromkeys(stashes, j))
            for key in pops:
                if stashed[key] != j:
                    self.source[key], self.target[key] = stashed[key], j
        self.leaving = [[key for key, j in self.source.items() if j == k] for k in range(len(partitions))]
        self.arriving = [[key for key, j in self.target.items() if j == k] for k in range(len(partitions))]


class PlacedPartition:
    """A partition on its device, and what the engine has learned about it."""

    def __init__(self, j: int, layers: Partition, device: torch.device, routes: SkipRoutes) -> None:
        self.j = j
        self.layers = layers
        self.device = device
        self.arriving = routes.arriving[j]
        self.leaving = routes.leaving[j]
        self.skips = any(skip_keys(layers))
        self.checkpointer = Checkpointer(layers)
        self.new = True  # no mini-batch has come through yet
        self.changes_input = False  # a layer may change what comes in
        self.leaves_input = False  # it has been seen not to
        self.phony = torch.empty(0, device="cpu", requires_grad=True)
        self._outside: list[weakref.ref[Tensor]] = []  # leaves that layers use, but no parameters of theirs

    def trainable(self) -> list[Tensor]:
        """Return the tensors that get gradients here: parameters, and outside leaves that layers use."""
        self._outside = [ref for ref in self._outside if ref() is not None]
        outside = [t for ref in self._outside if (t := ref()) is not None]
        return [t for t in (*self.layers.parameters(), *outside) if t.requires_grad]

    @property
    def uses_outside_leaves(self) -> bool:
        """Whether `note_leaves` ever found any."""
        return bool(self._outside)

    def note_leaves(self, leaves: Mapping[int, Tensor], known: Container[int]) -> list[Tensor]:
        """Remember leaves, by id, that a layer uses but that are not its parameters; return those not ``known``."""
        outside = [leaf for key, leaf in leaves.items() if key not in known]
        if outside:
            own = set(map(id, self.layers.parameters()))
            outside = [leaf for leaf in outside if id(leaf) not in own]
            self._outside += [weakref.ref(leaf) for leaf in outside]
        return outside

    def check_weights(self, weights: list[Tensor], versions: list[int]) -> None:
        """Raise if the tensors that were `trainable` at forward have been changed or replaced."""
        if [weight._version for weight in weights] != versions:
            raise weights_changed()
        now = {*self.layers.parameters(), *self.trainable()}
        if any(weight not in now for weight in weights):
            raise RuntimeError(
                "a parameter of a checkpointed partition was replaced between forward and backward, for example "
                "by torch.func.functional_call; use checkpoint='never'"
            )


def weights_changed() -> RuntimeError:
    """Return the error about weights that are no longer those of a checkpointed forward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        "parameter of a checkpointed partition, after its forward; call optimizer.step() after backward()"
    )
