"""A line for every layer that runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

from pipesight import context
from pipesight.logs.records import attributes, logger

__all__ = ["register_layer_logging_hooks"]


def register_layer_logging_hooks(partitions: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Log each layer of ``GPipe.partitions`` at DEBUG when it runs; return handles whose ``remove()`` ends it.

    Example::

        hooks = register_layer_logging_hooks(model.partitions)
        model(input)  # Executing layer '2' in partition 1: Linear
        for hook in hooks:
            hook.remove()
    """
    return [
        layer.register_forward_pre_hook(functools.partial(_log, name, j))
        for j, partition in enumerate(partitions)
        for name, layer in partition.named_children()
    ]


def _log(name: str, j: int, layer: nn.Module, _: object) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        where = context.current()
        extra = {**attributes(where), "partition": j, "layer": name}
        logger.debug("Executing layer '%s' in partition %d: %s", name, j, type(layer).__name__, extra=extra)
