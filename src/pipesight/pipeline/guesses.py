"""What micro-batches get of the arguments of a call, where that was guessed: which guesses are doubtful, and the words.

A tensor with as many rows as the batch has samples is taken for samples. It may as well be a table, a learned one or
one of positions, and a list of that length may be one of samples. A first call cannot tell, so it says so.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesight._nested import tensors_in
from pipesight._torch.module_internals import HOOK_TABLES
from pipesight.pipeline.batch_dims import Rule
from pipesight.pipeline.flattening import Flat, flatten

__all__ = [
    "Share",
    "doubt",
    "handed_out",
    "hardly_a_table",
    "has_several_rows",
    "is_unclear",
    "rows_taken",
    "ways_taken",
]


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
        return [*rows, *([0] if has_several_rows(self, size) else [])]


def has_several_rows(share: Share, size: int) -> bool:
    """Tell whether a tensor may have several rows for each of so many samples, such as the patches of pictures."""
    value = share.value
    return isinstance(value, Tensor) and bool(value.dim()) and value.size(0) > size > 0 and value.size(0) % size == 0


def hardly_a_table(share: Share) -> bool:
    """Tell whether a tensor looks like tokens or their mask, and not like a table or a mask of steps for steps."""
    value = share.value
    return value.dim() > 1 and not value.is_floating_point() and value.size(0) != value.size(1)


def doubt(share: Share, source: Share | None, size: int, part: int) -> str:
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


def is_unclear(share: Share, source: Share) -> bool:
    """Tell whether a tensor was cut for no other reason than the number of its rows, and may as well be a table."""
    value = share.value
    if not share.guessed or share.dim is None or share.name == source.name or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or (value.dim() > 1 and not _has_steps_of(value, source.value, share.dim))


def ways_taken(
    model: nn.Module, name: str, positional: int, cut: Mapping[str, Any], whole: Mapping[str, Any]
) -> tuple[bool, bool]:
    """Return whether a model takes an argument cut with the samples, and whether all of it with some of the samples.

    With both, what it returns must have the same shapes. An argument that it does not use is taken cut. Only shapes are
    computed, with a copy of the model that has no values; neither is true where that fails.

    Args:
        model: The model.
        name: The argument.
        positional: How many arguments are positional.
        cut: The arguments of a micro-batch.
        whole: The same, with all rows of the one.
    """
    cut_shapes, whole_shapes = _shapes_of(model, positional, (cut, whole), name)
    return cut_shapes is not None, bool(whole_shapes) and cut_shapes in (None, whole_shapes)


def rows_taken(
    model: nn.Module,
    positional: int,
    batch: Mapping[str, Any],
    cut: Mapping[str, Any],
    whole: Mapping[str, Any],
    part: Fraction,
) -> tuple[bool, bool]:
    """Return whether a model takes arguments with several rows a sample cut, and whether it takes all of them.

    What it returns must have the shapes that it has for the batch, but for the samples: tables of classes make as many
    columns as there are classes, and rows of samples as each sample has. Only shapes are computed.

    Args:
        model: The model.
        positional: How many arguments are positional.
        batch: The arguments of all samples.
        cut: Those of a part of them.
        whole: The same, with all rows.
        part: How large that part is.
    """
    expected, *found = _shapes_of(model, positional, (batch, cut, whole))
    if not expected:
        return False, False
    one, other = (
        shapes is not None and len(shapes) == len(expected) and _is_part(part, expected, shapes) for shapes in found
    )
    return one, other


def _is_part(part: Fraction, batch: list[torch.Size], shapes: list[torch.Size]) -> bool:
    """Whether shapes are those of a batch, or have a part of the rows."""
    return len(batch) == len(shapes) and all(
        len(a) == len(b) and a[1:] == b[1:] and (not a or b[0] in (a[0], a[0] * part))
        for a, b in zip(batch, shapes, strict=True)
    )


def _shapes_of(
    model: nn.Module, positional: int, calls: Sequence[Mapping[str, Any]], name: str | None = None
) -> list[list[torch.Size] | None]:
    """Return the shapes of what a model returns in each call, computed without values; None where that fails."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        empty = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    for table in (vars(module).get(name) for module in model.modules() for name in HOOK_TABLES):
        if table:
            memo[id(table)] = OrderedDict()  # hooks must not see this
    shapes: list[list[torch.Size] | None] = []
    for arguments in calls:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outline = copy.deepcopy(model, dict(memo))
                shapes.append(_shapes(outline, flatten(arguments), positional, name))
        except Exception:
            shapes.append(None)
    return shapes


def _shapes(outline: nn.Module, arguments: Flat, positional: int, name: str | None) -> list[torch.Size]:
    """Return the shapes of what a model returns; none if it does not use the argument of that name."""
    tensors = [tensor.to("meta") for tensor in arguments.tensors]
    place = next((k for k, names in enumerate(arguments.names) if name in names), None)
    items = list(arguments.rebuild(tensors).items())
    with _Using(tensors[place]) if place is not None else contextlib.nullcontext() as mode:
        output = flatten(outline(*(value for _, value in items[:positional]), **dict(items[positional:])))
    return [tensor.shape for tensor in output.tensors] if mode is None or mode.used else []


class _Using(TorchFunctionMode):
    """Notes whether a tensor is used."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor, self.used = tensor, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "size", "dim"):
            self.used = self.used or any(tensor is self._tensor for tensor in tensors_in((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


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
