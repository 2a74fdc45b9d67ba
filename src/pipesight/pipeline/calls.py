"""Cut the arguments of a call of any model into those of its micro-batches.

The batch size is the first dimension of the first tensor that has one. Tensors of that first dimension are cut as
``torch.chunk`` cuts; everything else goes whole to each micro-batch, in lists, mappings and objects of its own, so that
micro-batches do not see what others put into a cache. Where this is wrong, ``batch_dim`` says what is right.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesight._nested import tensors_in
from pipesight.pipeline.batch_dims import BatchDim, BatchDims, Rule
from pipesight.pipeline.checkpoint import versions_of
from pipesight.pipeline.flattening import Flat, equal, flatten, items_of
from pipesight.pipeline.guesses import Guesses, Share, handed_out
from pipesight.schedule.packing import chunk_sizes

__all__ = ["SplitCall", "is_batch_size", "split_call"]


@dataclass(slots=True)
class SplitCall:
    """A call, cut into micro-batches."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    """The arguments of each micro-batch. Tensors are detached, and their version counters their own."""
    sizes: list[int]
    """How many samples each micro-batch has."""
    inputs: list[Tensor]
    """The caller's tensors that require grad, each once."""
    pieces: list[list[Tensor]]
    """``pieces[i][k]`` is what micro-batch ``i`` got of ``inputs[k]``, the very object in ``calls[i]``."""
    dims: BatchDims
    arguments: list[dict[str, Any]]
    """The arguments of each micro-batch in the order of the call, by name or, where that is not known, by position."""
    positional: int
    """How many of them are positional."""
    cuts: list[int | None]
    """Along which dimension ``inputs[k]`` was cut, if it was."""
    cut_again: Callable[[int, BatchDims], SplitCall] | None
    """Cuts the same arguments into so many micro-batches, by other rules."""
    _originals: dict[int, tuple[Any, Any]]
    _containers: dict[str, Any]
    """The lists, mappings and objects that the first micro-batch got, by name."""
    _shares: list[Share]
    """What micro-batches got of tensors, and of lists with as many items as the batch has samples."""
    _source: str
    """The argument from which the size of the batch is known."""
    _whole: dict[str, list[Tensor]]
    """What micro-batches got of tensors of which each got all, if it is no copy."""
    _seen: dict[str, Any]
    """What was guessed in earlier calls."""

    def original(self, value: Any) -> Any:
        """Return the caller's tensor, list, mapping or object for which a micro-batch got ``value``, if it did."""
        got, original = self._originals.get(id(value), (None, None))
        return original if got is value else None

    def changed_arguments(self) -> dict[str, Any]:
        """Return the lists, mappings and objects that the model changed, as the first micro-batch has them, by name."""
        return {name: got for name, got in self._containers.items() if self._is_changed(got)}

    def _is_changed(self, got: Any) -> bool:
        given, now = (dict(items_of(value) or ()) for value in (self.original(got), got))
        return given.keys() != now.keys() or any(self._is_other(given[key], now[key], str(key)) for key in now)

    def _is_other(self, old: Any, new: Any, name: str) -> bool:
        if new is old or self.original(new) is old:
            return False
        if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
            return any(self._is_other(a, b, name) for a, b in zip(old, new, strict=True))
        if isinstance(new, Tensor) or isinstance(old, Tensor) or items_of(new) is not None:
            return True
        return not (equal(old, new) or is_batch_size(name, old, sum(self.sizes)))

    def guesses(self) -> list[tuple[str, Rule]]:
        """Return the arguments of which it was guessed what each micro-batch gets, and what else may be right."""
        guessed = [share for share in self._shares if share.guessed and share.name != self._source]
        return [(share.name, other) for share in guessed for other in share.others(sum(self.sizes))]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run the micro-batches in this: errors of the model tell what each got, and what it may not change is noticed.

        Raises:
            RuntimeError: Micro-batches have changed a tensor in place that each got all of.
        """
        with self.told():
            yield
        self.check_unchanged()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Let errors of the model in this tell what each micro-batch got."""
        try:
            yield
        except BaseException as error:
            self.dims.forget_but(self._seen)
            if not isinstance(error, (RuntimeError, ValueError, IndexError, AssertionError)):
                raise
            if self.sizes == [0]:
                error.add_note(f"the batch has no samples, as {self._source!r} has none")
            told = handed_out(self._shares, self._source, self.sizes) if len(self.sizes) > 1 else ""
            if told and not isinstance(error, torch.OutOfMemoryError) and _is_of_the_model(error):
                error.add_note(told)
            raise

    def check_unchanged(self) -> None:
        """Raise if micro-batches have changed a tensor in place that each got all of."""
        for name, pieces in self._whole.items():
            if any(versions_of(pieces)):
                raise _changed_by_each(name)

    def refuse_changes(self, i: int, places: Set[int]) -> None:
        """Raise if a tensor that each micro-batch gets all of is among ``places``, which the model changes in place."""
        given = flatten(self.calls[i]).tensors if places and self._whole else []
        changed = {id(tensor) for k, tensor in enumerate(given) if k in places}
        for name, pieces in self._whole.items():
            if id(pieces[i]) in changed:
                raise _changed_by_each(name)

    def forget_arguments(self) -> None:
        """Let go of the arguments; pieces of tensors that want a gradient are kept."""
        self.calls, self.arguments = [], []
        self._shares, self._whole, self.cut_again = [], {}, None
        self._originals.clear()
        self._containers.clear()

    def call_with(self, function: Callable[..., Any], i: int) -> Any:
        """Call a function with the arguments of micro-batch ``i``, which may be gone from ``calls``."""
        args, kwargs = _as_call(self.arguments[i], self.positional)
        return function(*args, **kwargs)

    def join_gradients(self, k: int, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of ``inputs[k]``, given those of its pieces; None stands for zeros."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        home, dim = self.inputs[k].device, self.cuts[k]
        if dim is None:
            return functools.reduce(torch.add, [part.to(home) for part in known])
        shape = list(self.inputs[k].shape)
        filled = []
        for part, size in zip(parts, _rows(self.inputs[k], dim, self.sizes), strict=True):
            shape[dim] = size
            filled.append(known[0].new_zeros(shape, device=home) if part is None else part.to(home))
        return filled[0] if len(filled) == 1 else torch.cat(filled, dim)


def split_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], chunks: int, batch_dim: BatchDims | BatchDim = None
) -> SplitCall:
    """Cut a call into at most ``chunks`` micro-batches; a batch smaller than that gives one for each sample.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        chunks: How many micro-batches.
        batch_dim: Where the batch is, if not in the first dimension. Engines pass the same :class:`BatchDims` at each
            call, so that it can be noticed if an argument is cut in one call and not in another.
    """
    dims = batch_dim if isinstance(batch_dim, BatchDims) else BatchDims(batch_dim)
    seen = dims.seen()
    try:
        return _split(args, kwargs, chunks, dims, seen)
    except BaseException:
        dims.forget_but(seen)
        raise


def _split(
    args: Sequence[Any], kwargs: Mapping[str, Any], chunks: int, dims: BatchDims, seen: dict[str, Any]
) -> SplitCall:
    names = [dims.name_of(position) for position in range(len(args))]
    names = [str(position) if name in kwargs else name for position, name in enumerate(names)]
    given = dict(zip(names, args, strict=True)) | dict(kwargs)
    flat = flatten(given, opaque=dims.listed("items"), has_samples=True)
    dims.check_used([*(name for name, _ in flat.form), *flat.value_names], given)
    size, source = _batch_size(flat, dims, chunks)
    sizes = chunk_sizes(size, chunks) if size is not None else [1]
    batch = _Batch(size, source, sizes, dims)
    cuts = [batch.dimension(*known) for known in zip(flat.tensors, flat.names, strict=True)]
    pieces = [batch.pieces(*known) for known in zip(flat.tensors, cuts, flat.held, strict=True)]
    values = [batch.values(*known) for known in zip(flat.values, flat.value_names, strict=True)]
    shares = batch.shares(flat, cuts)
    cut_again = functools.partial(split_call, args, kwargs)
    if len(sizes) > 1 and size is not None and Guesses(shares, source, sizes, dims, cut_again).correct():
        return _split(args, kwargs, chunks, dims, seen)
    originals: dict[int, tuple[Any, Any]] = {}  # by id; what was handed out is kept, so that ids stay its own
    arguments = []
    containers: dict[str, Any] = {}
    for i in range(len(sizes)):
        made: dict[int, Any] = {}
        arguments.append(flat.rebuild([piece[i] for piece in pieces], [value[i] for value in values], made=made))
        pairs = [(made[number], value) for number, value in enumerate(flat.containers)]
        pairs += [(piece[i], tensor) for piece, tensor in zip(pieces, flat.tensors, strict=True)]
        originals |= {id(got): (got, original) for got, original in pairs}
        if i == 0:
            containers = {name: made[number] for number, name in enumerate(flat.container_names) if name}
    learn = [k for k, tensor in enumerate(flat.tensors) if tensor.requires_grad]
    return SplitCall(
        calls=[_as_call(mine, len(names)) for mine in arguments],
        sizes=sizes,
        inputs=[flat.tensors[k] for k in learn],
        pieces=[[pieces[k][i] for k in learn] for i in range(len(sizes))],
        dims=dims,
        arguments=arguments,
        positional=len(names),
        cuts=[cuts[k] for k in learn],
        cut_again=cut_again,
        _originals=originals,
        _containers=containers,
        _shares=shares,
        _source=source,
        _seen=seen,
        _whole={
            names[0]: mine
            for names, mine, cut, held in zip(flat.names, pieces, cuts, flat.held, strict=True)
            if cut is None and not held and len(sizes) > 1
        },
    )


def _rows(tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    """Return how many rows of a tensor each micro-batch gets: as many for each sample."""
    each = tensor.size(dim) // max(sum(sizes), 1)
    return [each * size for size in sizes]


def _changed_by_each(name: str) -> RuntimeError:
    return RuntimeError(
        f"the model changes its argument {name!r} in place, of which each micro-batch gets all, so that it is changed "
        f"as often as there are micro-batches and not once; change a copy in the model, {name.rpartition('.')[2]}."
        "clone(), or return the new value; or use chunks=1"
    )


def _is_of_the_model(error: BaseException) -> bool:
    """Whether an error was raised by the model, or by torch when the model called it, and not here."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    home = str(frames[-1].f_globals.get("__name__", "")).partition(".")[0]
    return home != "pipesight" or frames[-1].f_code.co_name in ("__torch_function__", "call", "call_without_values")


def _as_call(arguments: Mapping[str, Any], positional: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    items = list(arguments.items())
    return tuple(value for _, value in items[:positional]), dict(items[positional:])


def is_batch_size(name: str, value: Any, size: int) -> bool:
    """Whether a number is the batch size by its name and value, as caches and configurations hold it."""
    return type(value) is int and value == size and "batch_size" in name.rpartition(".")[2]


def _batch_size(flat: Flat, dims: BatchDims, chunks: int) -> tuple[int | None, str]:
    """Return the size of the batch and what it is read from; None if there is no batch and nothing to cut."""
    tensors = {names[0]: tensor for tensor, names in zip(flat.tensors, flat.names, strict=True)}
    values = dict(zip(flat.value_names, flat.values, strict=True))
    listed = dims.listed("items")
    for name, _ in flat.form:  # the order of the call
        rule, _ = dims.rule(name)
        if name in listed and name in values:
            return len(values[name]), name
        if name in tensors and isinstance(rule, int) and tensors[name].dim() > rule:
            return _fewest_rows(name, rule, tensors, dims)
    if chunks == 1:
        return None, ""
    raise ValueError(
        "there must be a tensor with a batch dimension among the arguments, to be cut into micro-batches "
        f"(arguments: {', '.join(name for name, _ in flat.form if name) or 'none'}; chunks: {chunks}); "
        "pass one, use chunks=1, or name a list with one item for each sample: batch_dim={'name': 'items'}"
    )


def _fewest_rows(name: str, dim: int, tensors: Mapping[str, Tensor], dims: BatchDims) -> tuple[int, str]:
    """Return the size of the batch, that of a tensor: if the user names it and others, some may have several rows each.

    The one with the fewest then has one.
    """
    sizes = {name: tensors[name].size(dim)}
    if dims.rule(name)[1]:
        for other, tensor in tensors.items():
            rule, exact = dims.rule(other)
            if exact and isinstance(rule, int) and tensor.dim() > rule and tensor.size(rule):
                sizes.setdefault(other, tensor.size(rule))
    fewest = min(sizes, key=lambda found: sizes[found])
    return sizes[fewest], fewest


@dataclass(frozen=True, slots=True)
class _Batch:
    """Decides what each micro-batch gets of a tensor or another value."""

    size: int | None
    source: str
    sizes: list[int]
    dims: BatchDims

    def dimension(self, tensor: Tensor, names: Sequence[str]) -> int | None:
        """Return the dimension along which a tensor is cut; None if each micro-batch gets all of it."""
        dims, name, (rule, exact) = self.dims, names[0], self.dims.rule(names[0])
        for other in names[1:]:
            if dims.rule(other)[0] != rule:
                raise ValueError(
                    f"{name!r} and {other!r} are one tensor, which must be cut in one way (batch_dim: {rule!r} and "
                    f"{dims.rule(other)[0]!r}); pass a copy of it: {other}.clone()"
                )
        if rule is None or self.size is None:
            return None
        if not isinstance(rule, int):
            raise ValueError(f"{name!r} is a tensor, so its batch_dim must be a dimension or None (got: {rule!r})")
        guessed = not exact and len(self.sizes) > 1
        if exact and self.size and tensor.dim() > rule and tensor.size(rule) and tensor.size(rule) % self.size == 0:
            return rule  # so many rows for each sample
        if tensor.dim() > rule and tensor.size(rule) == self.size:
            if guessed and dims.seen_whole(name):
                return None
            if guessed:
                dims.remember(name, True, self.size, tensor.shape)
            return rule
        if exact:
            raise ValueError(
                f"{name!r} must have {self.size} samples in dimension {rule}, or so many rows for each (shape: "
                f"{list(tensor.shape)}, "
                f"{self._batch_size}); if each micro-batch needs all of it, use batch_dim={{{name!r}: None}}"
            )
        if guessed and tensor.dim() > rule and tensor.size(rule) != 1:  # of size 1: broadcast
            dims.remember(name, False, self.size, tensor.shape)
        return None

    def pieces(self, tensor: Tensor, dim: int | None, held: bool) -> list[Tensor]:
        """Return what each micro-batch gets of a tensor: a copy if it gets all of what an object may change."""
        with torch.no_grad():
            if dim is not None:
                return [part.data for part in tensor.split(_rows(tensor, dim, self.sizes), dim)]
            copies = held and len(self.sizes) > 1
            return [tensor.detach().clone() if copies else tensor.data for _ in self.sizes]

    def shares(self, flat: Flat, cuts: Sequence[int | None]) -> list[Share]:
        """Return what each micro-batch gets of tensors that are not broadcast, and of lists of the batch's length."""
        dims, found = self.dims, []
        for tensor, names, cut in zip(flat.tensors, flat.names, cuts, strict=True):
            dim = dims.rule(names[0])[0]
            if isinstance(dim, int) and tensor.dim() > dim and tensor.size(dim) > 1:
                found.append(Share(names[0], tensor, cut, not any(map(dims.says, names)), tuple(names[1:])))
        roots = {names[0] for names, cut in zip(flat.names, cuts, strict=True) if cut is not None}
        lists = [*zip(flat.containers, flat.container_names, strict=True)]
        lists += zip(flat.values, flat.value_names, strict=True)
        for value, name in lists:
            if (isinstance(value, list) or type(value).__module__ == "numpy") and not dims.says(name):
                size = len(value) if getattr(value, "shape", (1,)) else 0
                if size == self.size and not any(root.startswith(f"{name}.") for root in roots):
                    found.append(Share(name, value, None, guessed=True))
        return found

    def values(self, value: Any, name: str) -> list[Any]:
        """Return what each micro-batch gets of what is not a tensor."""
        rule, exact = self.dims.rule(name)
        if exact and rule == "items":
            return self._items(value, name)
        if exact and isinstance(rule, int) and value is not None:
            raise ValueError(
                f"{name!r} must be a tensor to be cut in dimension {rule}, but is {type(value).__name__}; to cut a "
                f"list with one item for each sample, use batch_dim={{{name!r}: 'items'}}"
            )
        if self.size is not None and is_batch_size(name, value, self.size):
            return list(self.sizes)
        return [value] * len(self.sizes)

    def _items(self, value: Any, name: str) -> list[Any]:
        if any(t.requires_grad for t in tensors_in(value)):
            raise ValueError(
                f"the tensors in {name!r}, which is cut by items, must not require grad; stack them and pass the tensor"
            )
        if len(value) != self.size:
            raise ValueError(
                f"{name!r} must have an item for each sample (items: {len(value)}, {self._batch_size}); "
                f"if each micro-batch needs all of it, use batch_dim={{{name!r}: None}}"
            )
        stops = itertools.accumulate(self.sizes)
        return [value[stop - size : stop] for stop, size in zip(stops, self.sizes, strict=True)]

    @property
    def _batch_size(self) -> str:
        return f"batch size: {self.size}, the size of {self.source!r}"
