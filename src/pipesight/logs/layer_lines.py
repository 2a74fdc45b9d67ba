"""Log each layer that runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from pipesight import context
from pipesight.logs.context_filter import attributes, lines
from pipesight.pipeline.partition import Partition

if TYPE_CHECKING:
    from pipesight.pipeline.gpipe import GPipe

__all__ = ["register_layer_logging_hooks"]


def register_layer_logging_hooks(partitions: GPipe | Iterable[nn.Module]) -> list[RemovableHandle]:
    """Log each layer of a `GPipe`, or of its ``partitions``, at DEBUG. Returns handles; their ``remove()`` ends it.

    Example::

        hooks = register_layer_logging_hooks(model.partitions)
        model(input)  # Executing layer '2' in partition 1: Linear
        for hook in hooks:
            hook.remove()

    Raises:
        TypeError: The argument is neither, for example a plain model.
    """
    given = getattr(partitions, "partitions", partitions)
    found: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(item, Partition) for item in found):
        raise TypeError(
            f"expected a GPipe or its partitions, but got {type(partitions).__name__}: "
            "register_layer_logging_hooks(model.partitions)"
        )
    return [
        layer.register_forward_pre_hook(functools.partial(_log, name, j))
        for j, partition in enumerate(found)
        for name, layer in partition.named_children()
    ]


def _log(name: str, j: int, layer: nn.Module, _: object) -> None:
    if lines.isEnabledFor(logging.DEBUG):
        where = context.current()
        extra = {**attributes(where), "partition": j, "layer": name}
        lines.debug("Executing layer '%s' in partition %d: %s", name, j, type(layer).__name__, extra=extra)
