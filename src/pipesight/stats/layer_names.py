"""The layers of a model by the names that a configuration selects them by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from pipesight.pipeline.gpipe import GPipe

__all__ = ["named_layers", "partitions_of"]


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model and their names, as ``named_modules()`` but without the model itself.

    Those of a `GPipe` have the names they had before the model was cut into partitions.
    """
    seen: set[nn.Module] = {model}
    yield from _named(model, "", seen)


def partitions_of(model: Any) -> dict[nn.Module, int]:
    """Return the number of the partition of each layer that is in one; over ranks, those of this rank."""
    pipes = [inner for inner in model.modules() if isinstance(inner, GPipe)] if isinstance(model, nn.Module) else []
    numbered = [(j, partition) for pipe in pipes for j, partition in enumerate(pipe.partitions)]
    if not isinstance(model, nn.Module):
        numbered = list(model.partitions.items())
    return {layer: j for j, partition in numbered for layer in partition.modules()}


def _named(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    owners = list(module.partitions) if isinstance(module, GPipe) else [module]
    for owner in owners:
        for name, child in owner.named_children():
            if child not in seen:
                seen.add(child)
                yield f"{prefix}{name}", child
                yield from _named(child, f"{prefix}{name}.", seen)
