"""What micro-batches get of the arguments of a call, where that was guessed: which guesses are doubtful, and the words.

A tensor with as many rows as the batch has samples is taken for samples. It may as well be a table, a learned one or
one of positions, and a list of that length may be one of samples. A first call cannot tell, so it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipesight.pipeline.batch_dims import Rule

__all__ = ["Share", "doubt", "handed_out"]


@dataclass(frozen=True, slots=True)
class Share:
    """What each micro-batch gets of an argument."""

    name: str
    value: Any
    dim: int | None
    """The dimension in which it is cut; ``None`` if each micro-batch gets all of it."""
    guessed: bool
    """Whether ``batch_dim`` does not name it."""

    @property
    def looks(self) -> str:
        """Its shape, or how many items there are."""
        return f"{list(self.value.shape)}" if isinstance(self.value, Tensor) else f"{len(self.value)} items"

    def others(self, size: int) -> list[Rule]:
        """Return what else may be right, in a batch of so many samples."""
        if not isinstance(self.value, Tensor):
            return ["items"]
        if self.dim is not None:
            return [None]
        rows = [dim for dim, length in enumerate(self.value.shape) if length == size]
        several = self.value.dim() and self.value.size(0) > size > 0 and self.value.size(0) % size == 0
        return [*rows, *([0] if several else [])]  # such as the patches of pictures


def doubt(share: Share, source: Share | None, size: int) -> str:
    """Return why a guess may be wrong; nothing if there is no sign of it.

    Args:
        share: What micro-batches get of an argument.
        source: Of the one from which the size of the batch is known, if that is a tensor.
        size: That of the batch.
    """
    value, dim = share.value, share.dim
    if not share.guessed or (source is not None and share.name == source.name):
        return ""
    if not isinstance(value, Tensor):
        return f"has as many items as the batch has samples, {size}, and each micro-batch gets all of it"
    if dim is None:
        return ""
    if isinstance(value, nn.Parameter):
        return f"is a parameter with as many rows as the batch has samples, {size}, and it was cut into micro-batches"
    if source is None or _is_like(value, source, dim, size):
        return ""
    return (
        f"has {size} rows (shape: {list(value.shape)}), and so many are both the samples and the steps of each in "
        f"{source.name!r} (shape: {source.looks}): it was taken for samples, and cut into micro-batches"
    )


def _is_like(value: Tensor, source: Share, dim: int, size: int) -> bool:
    """Whether a tensor with as many rows as there are samples is hardly one of positions."""
    lengths = [source.value.size(k) for k in range(source.value.dim()) if k != source.dim]
    if len(lengths) not in (1, 2) or lengths[0] != size:
        return True  # a batch of sequences has one dimension of steps; pictures have others
    others = [value.size(k) for k in range(value.dim()) if k != dim]
    return size in others and (len(others) > 1 or value.dtype == source.value.dtype)


def handed_out(shares: Sequence[Share], source: str, sizes: Sequence[int]) -> str:
    """Return in words what each micro-batch gets, if any of it was guessed and could have been guessed otherwise."""
    first = next((share.value for share in shares if share.name == source), None)
    guessed = [share for share in shares if share.guessed and share.name != source]
    cut = [share for share in guessed if share.dim is not None and not _has_steps_of(share.value, first, share.dim)]
    whole = [share for share in guessed if share.dim is None]
    if not cut and not whole:
        return ""
    told = [f"of {share.name!r} ({share.looks}) its samples" for share in cut]
    told += [f"all of {share.name!r} ({share.looks})" for share in whole]
    advice = [f"batch_dim={{{share.name!r}: None}} gives each all of it" for share in cut[:1]]
    ways = [(share.name, rule) for share in whole for rule in share.others(sum(sizes))]
    advice += [f"batch_dim={{{name!r}: {rule!r}}} cuts it" for name, rule in ways]
    return (
        f"each of {len(sizes)} micro-batches got {', '.join(told)}, since the batch has {sum(sizes)} samples, as "
        f"{source!r} has" + (f"; if that is wrong, {', '.join(advice)}" if advice else "")
    )


def _has_steps_of(value: Any, first: Any, dim: int) -> bool:
    """Whether a tensor has the samples and the steps of the first one: a mask, or labels, of its tokens."""
    return (
        isinstance(value, Tensor)
        and isinstance(first, Tensor)
        and value.dim() > dim + 1
        and value.shape[: dim + 2] == first.shape[: dim + 2]
    )
