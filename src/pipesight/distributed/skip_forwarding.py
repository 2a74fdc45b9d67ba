"""Forward skips between partitions that are not neighbours through those in between.

A skip travels with the output, as one more tensor, and its gradient the same way back. A partition pops it, stashes it,
or only passes it on. ::

    cut     output   skip a   skip b
               │        │        │
            [ partition pops a ] │        stashes c
               │        │        │
    cut     output    skip b   skip c
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipesight.distributed.shapes import Cut, meta_of
from pipesight.pipeline.partition import SkipRoutes
from pipesight.pipeline.skip import SkipKey

__all__ = ["SkipForwarding"]


class SkipForwarding:
    """Separates the skips of one partition from those that only pass it, and puts them together again."""

    def __init__(self, j: int, routes: SkipRoutes) -> None:
        self._j, self._routes = j, routes
        self.leaving = routes.leaving[j]
        """Those that begin here and end in another partition."""

    def ends_here(self, key: SkipKey) -> bool:
        """Return whether this partition pops the skip."""
        return self._routes.target[key] == self._j

    def sort(self, came: list[Tensor], cut: Cut) -> tuple[list[Tensor], dict[SkipKey, Tensor]]:
        """Separate what the partition takes from skips that only pass."""
        if not cut.skips:
            return came, {}
        own, passing = came[: len(cut.output)], {}
        for key, tensor in zip(_present(cut), came[len(cut.output) :], strict=True):
            if self.ends_here(key):
                own.append(tensor)
            else:
                passing[key] = tensor
        return own, passing

    def arriving(self, own: Sequence[Tensor], cut: Cut) -> dict[SkipKey, Tensor | None]:
        """Return the skips among what goes into the partition."""
        rest = iter(own[len(cut.output) :])
        return {key: None if meta is None else next(rest) for key, meta in cut.skips.items() if self.ends_here(key)}

    def merge(
        self,
        outputs: Sequence[Tensor],
        leaving: dict[SkipKey, Tensor | None],
        passing: dict[SkipKey, Tensor],
        cut: Cut,
    ) -> list[Tensor]:
        """Return what goes to the next partition, after a check that it has the inferred shapes."""
        going = list(outputs)
        for key, meta in cut.skips.items():
            tensor = leaving[key] if key in leaving else passing.get(key)
            if (tensor is None) != (meta is None):
                raise RuntimeError(f"the skip '{key.name}' is {_what(tensor)}, but {meta or None} was inferred")
            if tensor is not None:
                going.append(tensor)
        found = [meta_of(t) for t in going]
        if found != cut.tensors:
            raise RuntimeError(
                f"the output must have the inferred shapes: {', '.join(map(str, cut.tensors))}, but has "
                f"{', '.join(map(str, found))}; shapes must not depend on the values of tensors"
            )
        return going

    def sort_gradients(
        self, came: list[Tensor | None], cut: Cut
    ) -> tuple[list[Tensor | None], dict[SkipKey, Tensor | None]]:
        """Separate the gradients of the partition's outputs from those of skips that only pass."""
        own, passed = came[: len(cut.output)], {}
        for key, gradient in zip(_present(cut), came[len(cut.output) :], strict=True):
            if self._routes.source[key] == self._j:
                own.append(gradient)
            else:
                passed[key] = gradient
        return own, passed

    def merge_gradients(
        self, own: list[Tensor | None], passed: dict[SkipKey, Tensor | None], cut: Cut
    ) -> list[Tensor | None]:
        """Return the gradients of everything that came in, in the same order."""
        rest = iter(own[len(cut.output) :])
        skips = [next(rest) if self.ends_here(key) else passed[key] for key in _present(cut)]
        return [*own[: len(cut.output)], *skips]


def _present(cut: Cut) -> list[SkipKey]:
    return [key for key, meta in cut.skips.items() if meta is not None]


def _what(tensor: Tensor | None) -> str:
    return "None" if tensor is None else str(meta_of(tensor))
