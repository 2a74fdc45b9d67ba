"""Put the outputs of micro-batches together to what the model would have returned for the whole batch.

Tensors with as many samples as their micro-batch are concatenated. Scalars are losses: their weighted mean is that of
the batch. Everything else must not depend on the batch, so it must be the same in all micro-batches, and is given once.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pipesight.pipeline.asking_shapes import shapes_returned
from pipesight.pipeline.batch_dims import BatchDims, Rule
from pipesight.pipeline.calls import SplitCall, is_batch_size
from pipesight.pipeline.flattening import Flat, equal, flatten
from pipesight.pipeline.guard import guard_all

__all__ = ["Merge", "Weigh", "Weights", "flatten_output", "weigh_by_samples"]


@dataclass(frozen=True, slots=True)
class Weights:
    """What each scalar is multiplied by before they are added."""

    shares: Sequence[float]
    values: Sequence[Tensor] | None = None
    """What is added instead of the scalars; gradients go to these."""


Weigh: TypeAlias = Callable[[str, Sequence[Tensor], Sequence[int]], Weights]
"""Returns the weights of the scalars of micro-batches, given their name, themselves, and the samples."""


def weigh_by_samples(name: str, losses: Sequence[Tensor], sizes: Sequence[int]) -> Weights:
    """Return the weights of a mean over samples."""
    total = sum(sizes)
    return Weights([size / total if total else 1 / len(sizes) for size in sizes])


def flatten_output(output: Any, dims: BatchDims) -> Flat:
    """Take the output of a micro-batch apart; what is a list of items, or wanted of one micro-batch, stays as it is."""
    flat = flatten(output, "output", opaque=dims.listed("items") | dims.listed("first"), has_samples=True)
    for k, (value, name) in enumerate(zip(flat.values, flat.value_names, strict=True)):
        flat.values[k] = guard_all(
            value,
            f"a tensor in {name!r}, which batch_dim says is 'items' or 'first', cannot be differentiated outside the "
            "pipeline; stack the tensors in the model, or compute there what is differentiated",
        )
    return flat


@dataclass(frozen=True, slots=True)
class _Way:
    """How a tensor is put together."""

    kind: Literal["concatenate", "add", "first"]
    dim: int = 0
    sizes: tuple[int, ...] = ()
    weights: Weights = Weights(())


class Merge:
    """Knows how each tensor of the output is put together.

    Args:
        flats: The outputs of all micro-batches, from :func:`flatten_output`.
        call: How the call was cut.
        weigh: How scalars are weighed; by default by samples.

    Raises:
        ValueError: An output depends on the batch in a way that is not known.
    """

    def __init__(self, flats: Sequence[Flat], call: SplitCall, weigh: Weigh = weigh_by_samples) -> None:
        self._flats, self._sizes, self._dims = list(flats), call.sizes, call.dims
        self._call, self._weigh = call, weigh
        first = flats[0]
        for i, flat in enumerate(flats):
            if flat.form != first.form:
                raise ValueError(_different(first, flat, i))
        self.count = len(first.tensors)
        alone = len(flats) == 1
        self._ways = [
            _Way("first") if alone else self._way(k, [flat.tensors[k] for flat in flats]) for k in range(self.count)
        ]
        if not alone and weigh is not weigh_by_samples:  # else the user has chosen it
            self._warn_of_contrasts()
        columns = zip(first.value_names, zip(*(flat.values for flat in flats), strict=True), strict=True)
        self._values = [column[0] if alone else self._value(name, column) for name, column in columns]

    def join(self, k: int, parts: Sequence[Tensor]) -> Tensor:
        """Return tensor ``k`` of the output for the whole batch, given those of the micro-batches."""
        way = self._ways[k]
        if way.kind == "first":
            return parts[0]
        if way.kind == "concatenate":
            return torch.cat(list(parts), way.dim)
        if way.weights.values is not None:
            parts = [_Replaced.apply(part, value) for part, value in zip(parts, way.weights.values, strict=True)]  # type: ignore[no-untyped-call]
        kept = [(part, weight) for part, weight in zip(parts, way.weights.shares, strict=True) if weight]
        if not kept:
            return torch.zeros_like(parts[0])
        dtype = kept[0][0].dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total = sum(part.to(wide) * weight if weight != 1 else part.to(wide) for part, weight in kept)
        assert isinstance(total, Tensor)
        return total.to(dtype)

    def split_gradient(self, k: int, gradient: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of tensor ``k`` of each micro-batch, given that for the whole batch."""
        way, count = self._ways[k], len(self._sizes)
        if gradient is None:
            return [None] * count
        if way.kind == "first":
            return [gradient, *[None] * (count - 1)]
        if way.kind == "concatenate":
            return list(gradient.split(way.sizes, way.dim))
        return [gradient * weight if weight else None for weight in way.weights.shares]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output for the whole batch, in the model's own classes, made of its tensors.

        Objects that the caller passed, such as a cache, are filled and returned themselves. May be called once: the
        outputs of micro-batches are not kept any longer, nor are their arguments.
        """
        given = [self._original([flat.tensors[k] for flat in self._flats]) for k in range(self.count)]
        mixed = [mine if theirs is None else theirs for theirs, mine in zip(given, tensors, strict=True)]
        for way, theirs, mine in zip(self._ways, given, tensors, strict=True):
            if way.kind == "first" and theirs is not None and not _same([theirs.detach(), mine.detach()]):
                with torch.no_grad():  # each micro-batch has changed its copy
                    theirs.copy_(mine)

        def shell(number: int, value: Any) -> Any:
            original = self._original([flat.containers[number] for flat in self._flats])
            return copy.copy(value) if original is None else original

        returned = {id(value) for value in self._flats[0].containers}
        for name, value in self._call.changed_arguments().items():
            if id(value) not in returned:
                self._dims.warn_of_change(name)
        output = self._flats[0].rebuild(mixed, self._values, shell)
        self._flats, self._values = [], []
        self._call.forget_arguments()
        return output

    def _warn_of_contrasts(self) -> None:
        """Warn of a model that scores samples against each other.

        Such a score is in two outputs, by rows and by columns, or the whole batch gives more columns.
        """
        size, first = self._sizes[0], self._flats[0]
        squares = {
            names[0]: k
            for k, (tensor, names) in enumerate(zip(first.tensors, first.names, strict=True))
            if size > 1 and tensor.dim() > 1 and tensor.size(0) == size and size in tensor.shape[1:]
        }
        for one, other in itertools.combinations(squares, 2):
            pairs = [(flat.tensors[squares[one]], flat.tensors[squares[other]]) for flat in self._flats]
            if all(rows.dim() == 2 and torch.equal(rows.detach(), columns.detach().T) for rows, columns in pairs):
                self._dims.warn_of_contrasts(one, other)
        for name, k in squares.items():
            guessed = self._ways[k].kind == "concatenate" and not self._dims.rule(name)[1]
            if guessed and not self._dims.has_contrasts and "_whole_shapes" in vars(self):
                shape = first.tensors[k].shape
                if self._whole_shapes and self._whole_shapes[k] not in (shape, (sum(self._sizes), *shape[1:])):
                    self._dims.warn_of_contrasts(name)
                elif not self._whole_shapes and len(shape) == 2:
                    self._dims.warn_of_square(name, list(shape))

    @functools.cached_property
    def _whole_shapes(self) -> list[torch.Size]:
        """The shapes of what the model returns for the whole batch; none if they are not known without values."""
        model, cut_again = self._dims.model, self._call.cut_again
        assert model is not None
        assert cut_again is not None
        whole = cut_again(1, self._dims)
        shapes = shapes_returned(model, whole.positional, whole.arguments[0])
        return shapes if len(shapes) == self.count else []

    def _original(self, parts: Sequence[Any]) -> Any:
        """Return what the caller passed, if all micro-batches return what they got of it."""
        found = [self._call.original(part) for part in parts]
        return found[0] if all(value is found[0] for value in found) else None

    def _way(self, k: int, parts: Sequence[Tensor]) -> _Way:
        name = self._flats[0].names[k][0]
        rule, exact = self._dims.rule(name)
        if rule == "first" or rule == "items":
            return _Way("first")
        if rule == "sum":
            return _Way("add", weights=Weights([1.0] * len(parts)))
        if rule is None:
            return self._once(name, parts, rule)
        assert isinstance(rule, int)
        if parts[0].dim() == 0 and parts[0].is_floating_point() and not exact:
            return _Way("add", weights=self._weigh(name, parts, self._sizes))
        if not exact and (told := self._told_dim(k, parts, rule)) is not None:
            self._dims.learn([name], told)
            rule, exact = told, True
        sizes = [part.size(rule) if part.dim() > rule else -1 for part in parts]
        rows = self._rows(sizes)
        if rows == 1 and not (not exact and self._dims.seen_whole(name) and _same(parts)):
            self._check_shapes(name, parts, rule)
            if not exact:
                self._dims.remember(name, True, sum(self._sizes), parts[0].shape)
            return _Way("concatenate", rule, tuple(sizes))
        if exact and min(sizes) < 0:
            raise ValueError(f"{name!r} must have a dimension {rule} ({self._shapes(parts)}), as batch_dim says")
        if exact or (rows > 1 and self._is_flattened(parts, rule) and not _same(parts)):
            self._check_shapes(name, parts, rule)
            return _Way("concatenate", rule, tuple(sizes))
        return self._once(name, parts, rule)

    def _told_dim(self, k: int, parts: Sequence[Tensor], guess: int) -> int | None:
        """Return the batch dimension of tensor ``k`` if shapes tell that it is another than the one that is guessed."""
        shapes = [part.shape for part in parts]
        dims = [dim for dim in range(min(map(len, shapes))) if len({(*s[:dim], *s[dim + 1 :]) for s in shapes}) == 1]
        fits = [dim for dim in dims if [shape[dim] for shape in shapes] == list(self._sizes)]
        if fits == [guess]:
            return None
        name = self._flats[0].names[k][0]
        if self._dims.model is None or not (fits or not _same(parts)) or not self._dims.is_new(name):
            return None
        whole = self._whole_shapes
        told = [dim for dim in dims if whole and whole[k] == _joined(shapes, dim)]
        return None if guess in told or not told else told[0]

    def _rows(self, sizes: Sequence[int]) -> int:
        """Return how many rows there are for each sample; 0 if there is no such number."""
        if list(sizes) == list(self._sizes):
            return 1
        rows = max(sizes) // max(max(self._sizes), 1)
        return rows if all(size == rows * mine for size, mine in zip(sizes, self._sizes, strict=True)) else 0

    def _is_flattened(self, parts: Sequence[Tensor], dim: int) -> bool:
        """Whether samples may have been flattened together with another dimension: no other is the batch."""
        if len(set(self._sizes)) > 1:
            return True
        others = (*parts[0].shape[:dim], *parts[0].shape[dim + 1 :])
        return bool(others) and self._sizes[0] not in others

    def _check_shapes(self, name: str, parts: Sequence[Tensor], dim: int) -> None:
        shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if len(shapes) > 1:
            raise ValueError(
                f"{name!r} must have the same shape in all micro-batches, apart from the batch dimension "
                f"({self._shapes(parts)}); pad it to one size in the model, or take that of the first micro-batch: "
                f"batch_dim={{{name!r}: 'first'}}"
            )

    def _once(self, name: str, parts: Sequence[Tensor], rule: Rule) -> _Way:
        if not _same(parts):
            lengths = zip(*(part.shape for part in parts), strict=False)
            dims = [dim for dim, found in enumerate(lengths) if len(set(found)) > 1] or [1]
            raise ValueError(
                f"{name!r} depends on the micro-batch, but its batch dimension is not known ({self._shapes(parts)}); "
                f"say which it is: batch_dim={{{name!r}: {dims[0]}}} puts those of all micro-batches together in that "
                "dimension, 'sum' adds them, 'first' takes that of the first one"
            )
        if isinstance(rule, int) and parts[0].dim() > rule and parts[0].size(rule) != 1:
            self._dims.remember(name, False, sum(self._sizes), parts[0].shape)
        return _Way("first")

    def _shapes(self, parts: Sequence[Tensor]) -> str:
        pairs = zip(parts, self._sizes, strict=True)
        return "shapes by micro-batch: " + ", ".join(f"{list(part.shape)} of {size} samples" for part, size in pairs)

    def _value(self, name: str, column: Sequence[Any]) -> Any:
        """Return what is not a tensor."""
        rule, exact = self._dims.rule(name)
        if exact and rule == "items":
            return self._concatenated(name, column)
        if exact and rule == "sum":
            return sum(column[1:], column[0])
        if rule == "first":
            return column[0]
        if all(is_batch_size(name, value, size) for value, size in zip(column, self._sizes, strict=True)):
            return sum(self._sizes)
        if isinstance(column[0], torch.Size):
            return self._size(name, column, rule if exact else None)
        if all(equal(column[0], value) for value in column[1:]):
            return column[0]
        raise ValueError(
            f"{name!r} must be the same in all micro-batches, since it is no tensor, but is "
            f"{', '.join(_short(value) for value in column[:4])}; return a tensor with a row for each sample, or say "
            f"what to do: batch_dim={{{name!r}: 'first'}} takes that of the first micro-batch, 'sum' adds them"
        )

    def _size(self, name: str, column: Sequence[Any], dim: Rule) -> Any:
        """Return a ``torch.Size``; that of a tensor with samples is refused unless its batch dimension is known."""
        if isinstance(dim, int):
            whole = list(column[0])
            whole[dim] = sum(value[dim] for value in column)
            return torch.Size(whole)
        if len(set(column)) > 1 or self._sizes[0] in column[0]:
            raise ValueError(
                f"{name!r} is a torch.Size, which may hold the number of samples (first micro-batches: "
                f"{', '.join(_short(list(value)) for value in column[:4])}); say where: batch_dim={{{name!r}: 0}}, or "
                "that it holds none: 'first'"
            )
        return column[0]

    def _concatenated(self, name: str, column: Sequence[Any]) -> Any:
        lengths = [len(value) for value in column]
        if lengths != list(self._sizes):
            raise ValueError(
                f"{name!r} must have an item for each sample (items by micro-batch: {lengths}, samples: "
                f"{list(self._sizes)}), as batch_dim says"
            )
        return sum(column[1:], column[0])


class _Replaced(torch.autograd.Function):
    """A scalar of another value, which may be that of one that is NaN."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor) -> Tensor:
        return value.to(part.device, part.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _different(first: Flat, flat: Flat, i: int) -> str:
    # What holds others is listed before them, with their number, so that lists of different lengths differ in a place.
    mine, theirs = next(pair for pair in zip(first.form, flat.form, strict=False) if pair[0] != pair[1])
    return (
        f"all micro-batches must return the same structure, but micro-batch 0 has {mine[1]} at {mine[0]!r} where "
        f"micro-batch {i} has {theirs[1]} at {theirs[0]!r}; if it is a list with one item for each sample, say so: "
        f"batch_dim={{{theirs[0]!r}: 'items'}}; 'first' takes that of the first micro-batch"
    )


def _same(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    return all(
        part is first
        or (part.shape == first.shape and part.dtype == first.dtype and bool(torch.equal(part.to(first.device), first)))
        for part in parts[1:]
    )


def _joined(shapes: Sequence[torch.Size], dim: int) -> tuple[int, ...]:
    """Return the shape of what is concatenated."""
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
