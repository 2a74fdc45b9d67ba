"""What stands for the tensors of earlier partitions in each partition of one micro-batch's way.

A partition may change such a tensor in place. Its stand-in then has another node in the autograd graph, and is what
later partitions and the caller get. Another tensor that shares the memory has that node only in the plain model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from pipesight.pipeline.aliasing import region_of

__all__ = ["Roots"]


@dataclass(slots=True)
class _Root:
    tensor: Tensor
    root: Tensor
    node: Node | None
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place, which gives it another node if it has one."""
        node = self.root.grad_fn
        return node is not self.node or (node is None and self.root._version != self.version)


class Roots:
    """Those of one micro-batch."""

    def __init__(self, n: int) -> None:
        self._of: list[dict[int, _Root]] = [{} for _ in range(n)]

    def get(self, j: int, tensor: Tensor) -> Tensor | None:
        """Return what stands for a tensor in partition j, if anything does yet."""
        known = self._of[j].get(id(tensor))
        return None if known is None else known.root

    def add(self, j: int, tensor: Tensor, root: Tensor) -> Tensor:
        """Note what stands for a tensor in partition j, and return it."""
        self._of[j][id(tensor)] = _Root(tensor, root, root.grad_fn, root._version)
        return root

    def of(self, j: int) -> list[Tensor]:
        """Return all that stands for something in partition j."""
        return [known.root for known in self._of[j].values()]

    def left(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the last partition left it, which may have changed a copy on another device."""
        found = (roots.get(id(tensor)) for roots in reversed(self._of))
        return next((known.root for known in found if known is not None and known.is_changed), tensor)

    def latest(self, tensor: Tensor, source: int) -> tuple[int, Tensor]:
        """Return the same for a tensor with a graph, made in partition ``source``, and which partition left it so.

        Raises:
            RuntimeError: One changed what shares memory with it.
        """
        for k in range(len(self._of) - 1, source, -1):
            for known in self._of[k].values():
                if not known.is_changed or known.root is tensor:
                    continue
                if known.tensor is tensor:
                    return k, known.root
                _refuse_alias(k, known.tensor, tensor)
        return source, tensor

    def check(self, j: int) -> None:
        """Raise if partition j, which ends, changed one of two tensors in place that share memory."""
        roots = self._of[j].values()
        for changed in [known for known in roots if known.is_changed]:
            for known in roots:
                if known is not changed:
                    _refuse_alias(j, changed.tensor, known.tensor)

    def clear(self) -> None:
        """Let go of all tensors."""
        for known in self._of:
            known.clear()


def _refuse_alias(k: int, changed: Tensor, tensor: Tensor) -> None:
    """Raise if two tensors share memory, of which partition k changed one. The plain model would change both."""
    regions = region_of(changed), region_of(tensor)
    if regions[0] is not None and regions[1] is not None and regions[0].overlaps(regions[1]):
        raise RuntimeError(
            f"partition {k} changed a tensor of shape {tuple(changed.shape)} in place that shares memory with one of "
            f"shape {tuple(tensor.shape)}, as a view and its base do, and both were made in an earlier partition, so "
            "that a gradient would be lost; make the view after the change, clone() the tensor first, or cut elsewhere"
        )
