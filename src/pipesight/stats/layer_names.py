"""The names of a model's layers, as a configuration selects them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from pipesight.pipeline.partition import Partition

__all__ = ["named_layers", "partitions_of"]


def named_layers(model: nn.Module, *, numbered: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and layers of a model, as ``named_modules()`` does, without the model itself.

    Layers of a `GPipe` have the names they had before the model was partitioned.

    With ``numbered``, layers in a list that have a ``layer_number`` go by it: there, layers of one rank of a pipeline
    have numbers that count those of the ranks before it.
    """
    seen: set[nn.Module] = {model}
    yield from _named(model, "", seen, numbered)


def partitions_of(model: Any) -> dict[nn.Module, int]:
    """Return the partition of each layer that is in one: of a module, or of this rank's part of a pipeline."""
    if isinstance(model, nn.Module):
        numbered = [item for inner in model.modules() for item in enumerate(_partitions(inner, of_any_model=True))]
    else:
        numbered = list(model.partitions.items())
    return {layer: j for j, partition in numbered for layer in partition.modules()}


def _named(module: nn.Module, prefix: str, seen: set[nn.Module], numbered: bool) -> Iterator[tuple[str, nn.Module]]:
    for owner in _partitions(module) or [module]:
        for name, child in owner.named_children():
            if child not in seen:
                seen.add(child)
                if numbered and isinstance(module, nn.ModuleList):
                    name = getattr(child, "layer_number", name)
                yield f"{prefix}{name}", child
                yield from _named(child, f"{prefix}{name}.", seen, numbered)


def _partitions(module: nn.Module, *, of_any_model: bool = False) -> list[nn.Module]:
    """Return the partitions of a pipeline; none, if the module is something else.

    Those of a pipeline of any model only if asked for: its layers have their names without them.
    """
    found = getattr(module, "partitions", None)
    known = isinstance(found, nn.ModuleList) or (of_any_model and isinstance(found, list))
    partitions = list(found) if known and found is not None else []
    return partitions if all(isinstance(partition, Partition) for partition in partitions) else []
