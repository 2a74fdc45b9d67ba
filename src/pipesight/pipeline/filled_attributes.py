"""Lists, dicts, sets and plain objects in attributes of modules, which a model may fill in place while it is called.

All micro-batches would put their tensors into the same one. So each fills a copy of its own, and reads what it has put
there itself. When all have ended, the original gets what they have put into their copies, one after the other::

    self.states      a list, empty     ──> a list for micro-batch 0  ──┐
                        │         └──────> a list for micro-batch 1  ──┤
                        └── in the end, what both have appended <──────┘

What a model keeps for its next call, a state, is not passed on from one micro-batch to the other in this way. Copied is
what is empty, or holds a tensor or ``None``. Lists of numbers and names are settings or counters, and shared.
"""

from __future__ import annotations

import copy
import dis
import enum
import functools
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from pipesight.pipeline.flattening import is_plain_object, items_of

__all__ = ["CONTAINERS", "Copies", "fillable", "kept", "may_fill"]

CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)

_OF_TORCH = frozenset(vars(nn.Module()))
_NO_STATE = ("config", "cfg", "configuration", "args", "arguments", "settings", "options", "hook", "keys", "traits")
_LOOKED_AT = 1000  # items


def fillable(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the attributes of modules that hold something that may be filled; those of bases elsewhere are settings."""
    for module in modules:
        if not type(module).__module__.startswith("torch."):
            kind: Any = type(module)
            settings = _of_bases(kind)
            for name, value in vars(module).items():
                if name not in settings and not _is_no_state(name) and _is_fillable(value, set()):
                    yield module, name


@functools.cache
def _of_bases(kind: Any) -> frozenset[str]:
    """Return the attributes that bases of a class declare which are defined elsewhere, such as `PreTrainedModel`."""
    bases = [base for base in kind.__mro__ if base.__module__ != kind.__module__]
    return _OF_TORCH.union(*(vars(base).keys() | vars(base).get("__annotations__", {}) for base in bases))


def _is_fillable(value: Any, seen: set[int]) -> bool:
    if not _is_walked(value) or id(value) in seen or len(seen) > _LOOKED_AT:
        return False
    seen.add(id(value))
    if isinstance(value, set):
        return not value or any(isinstance(item, Tensor) for item in value)
    items = list(_items(value).values())[:_LOOKED_AT]
    return not items or any(item is None or _is_tensor(item) or _is_fillable(item, seen) for item in items)


def _is_walked(value: Any) -> bool:
    if type(value) in CONTAINERS:
        return True
    if isinstance(value, (Collection, str, enum.Enum)) or not is_plain_object(value):  # others may not be filled
        return False
    if _is_no_state(type(value).__name__):
        return False
    settings = getattr(type(value), "__dataclass_params__", None)
    return settings is None or not settings.frozen


def _is_no_state(name: str) -> bool:
    """Tell whether a class or an attribute is called as those of settings are."""
    return name.lower().endswith(_NO_STATE)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _items(value: Any) -> dict[Any, Any]:
    """Return what is in a list, dict or object, by its place."""
    return dict(enumerate(value)) if isinstance(value, (list, deque)) else dict(items_of(value) or ())


@functools.cache
def _read_first(kind: Any) -> list[str]:
    """Return names of attributes that a forward reads, of any object, before it writes them."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or kind.__module__.startswith("torch."):
        return []
    read: dict[str, None] = {}
    found: dict[str, None] = {}
    written: set[str] = set()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "LOAD_ATTR" and name not in written:
            read[name] = None
        elif instruction.opname == "STORE_ATTR":
            written.add(name)
            if name in read:
                found[name] = None
    return [*found]


def kept(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the attributes of modules that their forward may keep for its next call."""
    for module in modules:
        kind: Any = type(module)
        for name in _read_first(kind):
            static = inspect.getattr_static(type(module), name, None)
            if not hasattr(static, "__set__") and (name in vars(module) or not hasattr(static, "__get__")):
                yield module, name


def may_fill(hook: Any) -> bool:
    """Tell whether a hook is a closure or a method that reaches something that may be filled; an observer's is not."""
    if str(getattr(hook, "__module__", "")).partition(".")[0] in ("pipesight", "torch"):
        return False
    return any(_is_fillable(value, set()) for value in _reached(hook))


def _reached(function: Any) -> list[Any]:
    if isinstance(function, MethodType):
        return [function.__self__]
    if isinstance(function, FunctionType):
        return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return []


class Copies:
    """Copies of containers, and of those in them; what is met twice is one thing in the copies, too.

    Args:
        change: Makes the tensors of the copies; the same by default.
    """

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None) -> None:
        self._change = change
        self._made: dict[int, tuple[Any, Any, Any]] = {}  # by id: the original, its copy, what was in this at first
        self._originals: dict[int, Any] = {}  # by id of the copy

    def of(self, value: Any) -> Any:
        """Return the copy of a value; itself if it is nothing that may be filled."""
        if isinstance(value, Tensor):
            return value if self._change is None else self._change(value)
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(map(self.of, value))
        if not _is_walked(value):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        try:
            new = copy.copy(value)
        except Exception:  # an object that does not want to
            return value
        self._made[id(value)] = (value, new, ())
        self._originals[id(new)] = value
        if not isinstance(value, set):
            _put(new, {key: self.of(item) for key, item in _items(value).items()})
        self._made[id(value)] = (value, new, {*new} if isinstance(new, set) else _items(new))
        return new

    def function_of(self, function: Any) -> Any:
        """Return a closure or method that reaches copies; itself if it reaches nothing that may be filled."""
        old = _reached(function)
        new = [self.of(value) if _is_walked(value) else value for value in old]
        if _same(dict(enumerate(old)), dict(enumerate(new))):
            return function
        if isinstance(function, MethodType):
            return MethodType(function.__func__, new[0])
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(map(CellType, new))
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def copied(self, change: Callable[[Tensor], Tensor]) -> Copies:
        """Return copies of the copies as they are now."""
        other, again = Copies(change), Copies(change)
        for original, mine, _ in self._made.values():
            other._made[id(original)] = (original, again.of(mine), ())
        return other

    def original(self, value: Any) -> Any:
        """Return what a value is the copy of; itself if it is none."""
        return self._originals.get(id(value), value)

    def write_back(self, home: Callable[[Any], Any], change: Callable[[Tensor], Tensor]) -> None:
        """Do to the originals what was done to the copies.

        Args:
            home: Returns what is to be changed, given an original.
            change: Makes the tensors that are put there.
        """
        for first, mine, before in list(self._made.values()):
            original, now = home(first), _items(mine)
            if isinstance(mine, set):
                original -= before - mine
                original |= mine - before
            elif not _same(before, now):
                after = {key: self._back(item, home, change) for key, item in now.items()}
                if not isinstance(original, (list, deque)):
                    kept = {key: item for key, item in _items(original).items() if key in after or key not in before}
                    changed = {k: item for k, item in after.items() if k not in before or before[k] is not now[k]}
                    _put(original, kept | changed)
                elif _same(before, dict([*now.items()][: len(before)])):  # something was appended
                    original.extend([*after.values()][len(before) :])
                else:
                    _put(original, after)

    def _back(self, value: Any, home: Callable[[Any], Any], change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if type(value) is tuple:
            return tuple(self._back(item, home, change) for item in value)
        if id(value) in self._originals:
            return home(self._originals[id(value)])
        if type(value) in CONTAINERS and not isinstance(value, set):
            _put(value, {key: self._back(item, home, change) for key, item in _items(value).items()})
        return value


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(item is other[key] for key, item in one.items())


def _put(value: Any, items: dict[Any, Any]) -> None:
    """Let these be the items of a list, dict or object."""
    if isinstance(value, deque):
        value.clear()
        value.extend(items.values())
    elif isinstance(value, list):
        value[:] = items.values()
    elif isinstance(value, dict):
        value.clear()
        value.update(items)
    else:
        for key in _items(value).keys() - items.keys():
            object.__delattr__(value, key)
        for key, item in items.items():
            object.__setattr__(value, key, item)
