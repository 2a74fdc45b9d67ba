"""Take nested arguments and results apart into tensors and other values, and put them together again.

Walked are mappings, lists, tuples, named tuples, dataclasses and plain Python objects (caches of keys and values,
batches with attributes), however deep; what is met twice is one thing. A place is called by its path: ``labels``,
``past_key_values.layers.0.keys``.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator, MutableMapping, Sequence, Set
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pipesight.pipeline.microbatch import form_of

__all__ = ["Flat", "equal", "flatten", "is_plain_object", "items_of"]


@dataclass(slots=True)
class _Node:
    """A list, tuple, mapping or object, and what is in it."""

    value: Any
    keys: list[Any]
    children: list[_Node | _Leaf] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor or another value, by its place in the lists of :class:`Flat`."""

    index: int
    tensor: bool


@dataclass(slots=True)
class Flat:
    """What :func:`flatten` found."""

    tensors: list[Tensor] = field(default_factory=list)
    """Each once, in the order in which they were met."""
    names: list[list[str]] = field(default_factory=list)
    """The paths of each tensor, one for each time it was met."""
    held: list[bool] = field(default_factory=list)
    """Whether an object that is no list, tuple or mapping holds the tensor, which it may change, as a cache does."""
    values: list[Any] = field(default_factory=list)
    """What is not a tensor and holds none."""
    value_names: list[str] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    """The lists, mappings and objects, each once, in the order in which they were met."""
    container_names: list[str] = field(default_factory=list)
    form: list[tuple[str, str]] = field(default_factory=list)
    """Path and kind of everything; two results have the same structure if these are equal."""
    _root: _Node | _Leaf = field(init=False)

    def rebuild(
        self,
        tensors: Sequence[Tensor | None],
        values: Sequence[Any] | None = None,
        shell: Callable[[int, Any], Any] = lambda number, value: copy.copy(value),
        made: dict[int, Any] | None = None,
    ) -> Any:
        """Return a value of the same structure and classes, made of other tensors.

        Args:
            tensors: As many as ``tensors``.
            values: As many as ``values``; by default, these.
            shell: Returns the list, mapping or object to fill, given its place in ``containers`` and the one there.
            made: Takes the new lists, mappings and objects, by their place in ``containers``.
        """
        numbers = {id(value): number for number, value in enumerate(self.containers)}
        others = self.values if values is None else values
        return _Rebuild(numbers, tensors, others, shell, {} if made is None else made).build(self._root)


@dataclass(slots=True)
class _Rebuild:
    """Puts a value together. A function that calls itself would be a cycle, and hold tensors until it is collected."""

    numbers: dict[int, int]
    tensors: Sequence[Tensor | None]
    values: Sequence[Any]
    shell: Callable[[int, Any], Any]
    made: dict[int, Any]
    built: dict[int, Any] = field(default_factory=dict)

    def build(self, node: _Node | _Leaf) -> Any:
        if isinstance(node, _Leaf):
            return self.tensors[node.index] if node.tensor else self.values[node.index]
        known = id(node.value)
        if known in self.built:
            return self.built[known]
        if isinstance(node.value, tuple):
            self.built[known] = form_of(node.value)([self.build(child) for child in node.children])
            return self.built[known]
        number = self.numbers[known]
        new = self.built[known] = self.made[number] = self.shell(number, node.value)
        _fill(new, node.keys, [self.build(child) for child in node.children])
        return new


def flatten(value: Any, name: str = "", opaque: Set[str] = frozenset(), *, has_samples: bool = False) -> Flat:
    """Take ``value`` apart.

    What has one of the paths in ``opaque`` is not walked. With ``has_samples``, it will be cut into samples or put
    together of them, which a ``PackedSequence`` cannot.
    """
    flat = Flat()
    flat._root = _Walk(flat, opaque, has_samples).visit(value, name)
    return flat


class _Walk:
    def __init__(self, flat: Flat, opaque: Set[str], has_samples: bool) -> None:
        self._flat, self._opaque, self._has_samples = flat, opaque, has_samples
        self._tensors: dict[int, int] = {}
        self._nodes: dict[int, _Node] = {}

    def visit(self, value: Any, name: str, held: bool = False) -> _Node | _Leaf:
        flat = self._flat
        if isinstance(value, Tensor):
            index = self._tensors.setdefault(id(value), len(flat.tensors))
            if index == len(flat.tensors):
                flat.tensors.append(value)
                flat.names.append([])
                flat.held.append(held)
            flat.names[index].append(name)
            flat.form.append((name, "a tensor"))
            return _Leaf(index, tensor=True)
        items = None if name in self._opaque else items_of(value)
        if items is None:
            flat.values.append(value)
            flat.value_names.append(name)
            flat.form.append((name, type(value).__name__))
            return _Leaf(len(flat.values) - 1, tensor=False)
        if id(value) in self._nodes:
            flat.form.append((name, "one that was there before"))
            return self._nodes[id(value)]
        if self._has_samples and isinstance(value, PackedSequence):
            raise TypeError(
                f"{name or 'the value'} is a PackedSequence, which cannot be cut into samples or put together of them; "
                "use a padded tensor and its lengths, and pack it in the model"
            )
        found = list(items)
        flat.form.append((name, f"{type(value).__name__} of {len(found)}"))
        node = self._nodes[id(value)] = _Node(value, [key for key, _ in found])
        if not isinstance(value, tuple):
            flat.containers.append(value)
            flat.container_names.append(name)
        held = held or not isinstance(value, (list, tuple, MutableMapping))
        for key, item in found:
            node.children.append(self.visit(item, f"{name}.{key}" if name else str(key), held))
        return node


_PLAIN: set[type] = {bool, int, float, str, type(None), torch.dtype, torch.device}


def items_of(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return what is in ``value`` and under which key; nothing if it is not walked."""
    if type(value) in _PLAIN or isinstance(value, (str, bytes, torch.Size, enum.Enum, type)):
        return None
    if isinstance(value, MutableMapping):
        return iter(list(value.items()))
    if isinstance(value, (list, tuple)):
        named: Any = value
        return zip(named._fields if hasattr(value, "_make") else range(len(value)), value, strict=True)
    return _attributes(value) if is_plain_object(value) else None


def is_plain_object(value: Any) -> bool:
    """Whether this is an object of the user's or of a library, which holds nothing but its attributes."""
    if isinstance(value, (nn.Module, types.ModuleType)) or (callable(value) and not is_dataclass(value)):
        return False
    if is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        return True
    home = type(value).__module__.partition(".")[0]
    if home in sys.stdlib_module_names or home in ("torch", "numpy"):
        return False
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    cls: Any = type(value)
    for name in _slots(cls):
        if hasattr(value, name):
            yield name, getattr(value, name)


@functools.cache
def _slots(cls: Any) -> list[str]:
    found: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _fill(new: Any, keys: list[Any], children: list[Any]) -> None:
    if isinstance(new, list):
        new[:] = children
    elif isinstance(new, MutableMapping):
        for key in [key for key in new if key not in keys]:
            del new[key]
        for key, child in zip(keys, children, strict=True):
            new[key] = child
    else:
        for key, child in zip(keys, children, strict=True):
            object.__setattr__(new, key, child)  # frozen ones, too


def equal(one: Any, other: Any) -> bool:
    """Whether two values that hold no tensors are the same, as far as they can be compared."""
    if one is other:
        return True
    try:
        return bool(one == other) or (one != one and other != other)  # NaN
    except Exception:  # arrays, for one
        return False
