"""What micro-batches get of the arguments of a call, where that was guessed: which guesses are doubtful, and the words.

A tensor with as many rows as the batch has samples is taken for samples. It may as well be a table, a learned one or
one of positions, and a list of that length may be one of samples. The model is asked, and in doubt, the user is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipesight.pipeline.asking_shapes import rows_taken, ways_taken
from pipesight.pipeline.batch_dims import BatchDims, Rule

if TYPE_CHECKING:
    from pipesight.pipeline.calls import SplitCall

__all__ = ["Guesses", "Share", "handed_out"]


@dataclass(frozen=True, slots=True)
class Share:
    """What each micro-batch gets of an argument."""

    name: str
    value: Any
    dim: int | None
    """The dimension in which it is cut; ``None`` if each micro-batch gets all of it."""
    guessed: bool
    """Whether ``batch_dim`` does not name it."""
    also: tuple[str, ...] = ()
    """Other names of the same tensor."""

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
        return [*rows, *([0] if _has_several_rows(self, size) else [])]


@dataclass(frozen=True, slots=True)
class Guesses:
    """What was guessed of the arguments of a call."""

    shares: Sequence[Share]
    source: str
    """The argument from which the size of the batch is known."""
    sizes: Sequence[int]
    """How many samples each micro-batch has."""
    dims: BatchDims
    cut: Callable[[int, BatchDims], SplitCall]
    """Cuts the call into so many micro-batches, by other rules."""

    def correct(self) -> bool:
        """Correct a guess that the model tells is wrong, and return whether there was one: then cut the call again.

        If the model does not tell, warn of those that are doubtful.
        """
        return any(map(self._is_corrected, self.shares)) or self._are_rows_corrected()

    def _is_corrected(self, share: Share) -> bool:
        dims, size, value = self.dims, sum(self.sizes), share.value
        first = next(
            (mine for mine in self.shares if mine.name == self.source and isinstance(mine.value, Tensor)), None
        )
        known = share.guessed and isinstance(value, Tensor) and dims.seen_whole(share.name)
        if known and value.size(dims.default) == size:
            if dims.model is not None and size >= 4 and self._ways_taken(share, dims.default) == (True, False):
                dims.follows(share.name)  # what was not cut then was a mistake, such as too few labels
                return True
            dims.remember(share.name, True, size, value.shape)
            return False
        why = _doubt(share, first, size, self.sizes[0])
        if not why and dims.model is not None and _is_unclear(share, first, self.shares) and dims.is_new(share.name):
            taken = self._ways_taken(share, share.dim)
            if taken == (False, True):
                dims.learn([share.name, *share.also], None)
                return True
            if taken == (True, True) and not bool((value == value.narrow(share.dim or 0, 0, 1)).all()):
                why = (  # a mask of ones, say, is not used as one that differs between rows is
                    f"has as many rows as the batch has samples, {size} (shape: {list(value.shape)}), and was "
                    "cut into micro-batches, but the model takes all of it for a micro-batch as well"
                )
        if why:
            dims.warn_of_doubt(share.name, why, share.dim or 0 if isinstance(value, Tensor) else "'items'")
        return False

    def _are_rows_corrected(self) -> bool:
        """Correct what micro-batches get of tensors that may have several rows for each sample."""
        dims, size = self.dims, sum(self.sizes)
        rows = [
            share for share in self.shares if share.guessed and share.dim is None and _has_several_rows(share, size)
        ]
        if dims.model is None or dims.default != 0 or not [share for share in rows if dims.is_new(share.name)]:
            return False
        names = [name for share in rows for name in (share.name, *share.also)]
        taken = self._rows_taken(names)
        if taken == (True, False):
            dims.learn(names, 0)
            return True
        if taken != (False, True):
            for share in rows if taken == (True, True) else filter(_is_hardly_a_table, rows):
                several = f"several rows for each of {size} samples (shape: {list(share.value.shape)})"
                dims.warn_of_doubt(share.name, f"has {several}, and was not cut into micro-batches", 0)
        return False

    def _ways_taken(self, share: Share, dim: int | None) -> tuple[bool, bool]:
        """Return whether the model takes an argument cut, and whether all of it, with the samples of a micro-batch."""
        dims, size = self.dims, sum(self.sizes)
        if dims.model is None or size < 2:
            return True, False
        chunks = min(len(self.sizes), max(size // 2, 2))
        cut, whole = (self.cut(chunks, dims.with_rules([share.name, *share.also], rule)) for rule in (dim, None))
        some, rest = (dims.of_model(call.arguments[0]) for call in (cut, whole))
        taken = ways_taken(dims.model, share.name, cut.positional, some, rest)
        return taken if size >= 4 or not taken[0] else (True, False)  # one sample is broadcast, which proves nothing

    def _rows_taken(self, names: Sequence[str]) -> tuple[bool, bool]:
        """Return whether the model takes arguments with several rows a sample cut, and whether it takes all of them."""
        assert self.dims.model is not None
        as_rows, as_whole = self.dims.with_rules(names, 0), self.dims.with_rules(names, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch, cut, whole = self.cut(1, as_rows), self.cut(2, as_rows), self.cut(2, as_whole)
        everything, some, rest = (self.dims.of_model(call.arguments[0]) for call in (batch, cut, whole))
        part = Fraction(cut.sizes[0], batch.sizes[0])
        return rows_taken(self.dims.model, cut.positional, everything, some, rest, part)


def _has_several_rows(share: Share, size: int) -> bool:
    """Tell whether a tensor may have several rows for each of so many samples, such as the patches of pictures."""
    value = share.value
    return isinstance(value, Tensor) and bool(value.dim()) and value.size(0) > size > 0 and value.size(0) % size == 0


def _is_hardly_a_table(share: Share) -> bool:
    """Tell whether a tensor looks like tokens, their mask or patches, and not like a mask of steps for steps."""
    value: Tensor = share.value
    return value.dim() > 1 and value.size(0) != value.size(1)


def _doubt(share: Share, source: Share | None, size: int, part: int) -> str:
    """Return why a guess may be wrong; nothing if there is no sign of it."""
    value, dim = share.value, share.dim
    if not share.guessed or (source is not None and share.name == source.name):
        return ""
    if not isinstance(value, Tensor):
        return f"has as many items as the batch has samples, {size}, and each micro-batch gets all of it"
    if dim is None:
        if source is None or not value.dim() or not 1 < value.size(0) == part or part in source.value.shape:
            return ""
        return (
            f"has as many rows as a micro-batch has samples, {part} (shape: {list(value.shape)}), and each micro-batch "
            f"got all of it, though the batch has {size} samples, as {source.name!r} has"
        )
    if isinstance(value, nn.Parameter):
        return f"is a parameter with as many rows as the batch has samples, {size}, and it was cut into micro-batches"
    if source is None or _is_like(value, source, dim, size):
        return ""
    return (
        f"has {size} rows (shape: {list(value.shape)}), and so many are both the samples and the steps of each in "
        f"{source.name!r} (shape: {source.looks}): it was taken for samples, and cut into micro-batches"
    )


def _is_unclear(share: Share, source: Share | None, shares: Sequence[Share]) -> bool:
    """Tell whether a tensor was cut for no other reason than the number of its rows, and may as well be a table."""
    value = share.value
    if source is None or share.name == source.name or not share.guessed:
        return False
    if share.dim is None or not isinstance(value, Tensor):
        return False
    if value.is_floating_point():
        return True
    tokens = [mine.value for mine in shares if isinstance(mine.value, Tensor) and not mine.value.is_floating_point()]
    like = [source.value, *(other for other in tokens if other is not value)]  # tokens and their mask, beside pictures
    return value.dim() > 1 and not any(_has_steps_of(value, other, share.dim) for other in like)


def _is_like(value: Tensor, source: Share, dim: int, size: int) -> bool:
    """Whether a tensor with as many rows as there are samples is hardly one of positions."""
    lengths = [source.value.size(k) for k in range(source.value.dim()) if k != source.dim]
    if len(lengths) not in (1, 2) or lengths[0] != size:
        return True  # a batch of sequences has one dimension of steps; pictures have others
    others = [value.size(k) for k in range(value.dim()) if k != dim]
    return size in others and (len(others) > 1 or value.dtype == source.value.dtype)


def handed_out(shares: Sequence[Share], source: str, sizes: Sequence[int]) -> str:
    """Return in words what each micro-batch gets, if any of it was guessed and could have been guessed otherwise."""
    first, size = next((share.value for share in shares if share.name == source), None), sum(sizes)
    guessed = [share for share in shares if share.guessed and share.name != source]
    cut = [share for share in guessed if share.dim is not None and not _has_steps_of(share.value, first, share.dim)]
    whole = [share for share in guessed if share.dim is None]
    if not cut and not whole:
        return ""
    told = [f"of {share.name!r} ({share.looks}) its samples" for share in cut]
    told += [f"all of {share.name!r} ({share.looks})" for share in whole]
    advice = [f"batch_dim={{{share.name!r}: None}} gives each all of it" for share in cut[:1]]
    ways = [(share.name, rule) for share in whole for rule in share.others(size)]
    advice += [f"batch_dim={{{name!r}: {rule!r}}} cuts it" for name, rule in ways]
    fewer = next((share for share in whole if isinstance(share.value, Tensor)), None)
    if fewer is not None and 1 < (rows := fewer.value.size(0)) < size and size % rows == 0:
        advice.append(f"batch_dim={{{source!r}: 0, {fewer.name!r}: 0}} cuts both, in a batch of {rows} samples")
    return (
        f"each of {len(sizes)} micro-batches got {', '.join(told)}, since the batch has {size} samples, as "
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
