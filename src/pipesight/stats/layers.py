"""The layers of a model by the names that a configuration selects them by."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipesight.pipeline.gpipe import GPipe

__all__ = ["named_layers"]


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model and their names, as ``named_modules()`` but without the model itself.

    Those of a `GPipe` have the names they had before the model was cut into partitions.
    """
    seen: set[nn.Module] = {model}
    yield from _named(model, "", seen)


def _named(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    owners = list(module.partitions) if isinstance(module, GPipe) else [module]
    for owner in owners:
        for name, child in owner.named_children():
            if child not in seen:
                seen.add(child)
                yield f"{prefix}{name}", child
                yield from _named(child, f"{prefix}{name}.", seen)
