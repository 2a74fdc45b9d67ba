"""Ask a model what it takes of an argument, by the shapes of what it returns; weights and activations have no value."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesight._nested import map_tensors, tensors_in
from pipesight._torch.module_internals import HOOK_TABLES
from pipesight.pipeline.flattening import Flat, flatten

__all__ = ["rows_taken", "shapes_returned", "ways_taken"]


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


def shapes_returned(model: nn.Module, positional: int, arguments: Mapping[str, Any]) -> list[torch.Size]:
    """Return the shapes of the tensors that a model returns; none if they cannot be computed without values."""
    return _shapes_of(model, positional, [arguments])[0] or []


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
    tensors = [_without_value(tensor) if tensor.is_floating_point() else tensor.clone() for tensor in arguments.tensors]
    place = next((k for k, names in enumerate(arguments.names) if name in names), None)
    items = list(arguments.rebuild(tensors).items())
    device = next((tensor.device for tensor in arguments.tensors), torch.device("cpu"))
    with _Outline(device, None if place is None else tensors[place]) as mode:
        output = flatten(outline(*(value for _, value in items[:positional]), **dict(items[positional:])))
    return [tensor.shape for tensor in output.tensors] if mode.used else []


def _without_value(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


class _Outline(TorchFunctionMode):
    """Lets tensors without values meet tokens, masks and others that have some, on which models branch.

    It notes whether a tensor is used.
    """

    def __init__(self, device: torch.device, tensor: Tensor | None) -> None:
        super().__init__()
        self._device, self._tensor, self.used = device, tensor, tensor is None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_in((args, kwargs))]
        if not self.used and getattr(func, "__name__", "") not in ("__get__", "size", "dim"):
            self.used = any(tensor is self._tensor for tensor in tensors)
        if not any(tensor.is_meta for tensor in tensors):  # what is made where activations are has values, too
            args = tuple(map(self._placed, args))
            kwargs = {key: self._placed(value) for key, value in kwargs.items()}
        elif not all(tensor.is_meta for tensor in tensors):
            args, kwargs = map_tensors(_without_value, args), map_tensors(_without_value, kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            _check_mask(*args, **kwargs)
        return func(*args, **kwargs)

    def _placed(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) and value.type == "meta" else value


def _check_mask(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> None:
    """Raise if an attention mask does not fit, which torch does not notice without values."""
    if attn_mask is not None:
        attn_mask.expand(*query.shape[:-1], key.size(-2))
