"""Layers that recompute in their backward, as ``torch.utils.checkpoint`` does: their backward is not split.

A schedule that splits backwards walks the graph of a partition twice, for the gradients of inputs and for those of
weights, and a checkpointed layer would run again each time: ::

    split     forward  backward: run again, inputs   weight: run again, weights
    whole     forward  backward: run again, inputs and weights
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["RecomputingLayers"]


class RecomputingLayers:
    """Detects, in the first split backward, whether a partition recomputes."""

    def __init__(self, partition: nn.Module) -> None:
        self._partition = partition
        self._found: bool | None = None  # nobody has looked yet

    def in_graph(self, ends: Sequence[Tensor]) -> bool:
        """Return whether the backward of ``ends`` must not be split."""
        if self._found is None and _has_reentrant(ends):  # which cannot be split at all
            self._found = True
        return bool(self._found)

    @contextlib.contextmanager
    def noticed(self, j: int) -> Iterator[None]:
        """Detect whether layers are called during the backward in this block; only the first time."""
        if self._found is not None:
            yield
            return
        called: list[nn.Module] = []
        handle = register_module_forward_pre_hook(lambda module, _: called.append(module))
        try:
            yield
        finally:
            handle.remove()
        names = {module: name for name, module in self._partition.named_modules()}
        mine = [names[module] for module in called if names.get(module)]
        self._found = bool(mine)
        if mine:
            warnings.warn(
                f"layer '{mine[0]}' of partition {j} recomputes in its backward, as torch.utils.checkpoint does; the "
                "backward of this partition will not be split, because it would recompute twice; to split it, use "
                "the checkpoint argument of DistributedPipeline instead",
                RuntimeWarning,
                stacklevel=2,
            )


def _has_reentrant(ends: Sequence[Tensor]) -> bool:
    """Return whether there is a ``torch.utils.checkpoint(use_reentrant=True)`` in a graph."""
    seen: set[Any] = set()
    todo: list[Any] = [t.grad_fn for t in ends]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return False
