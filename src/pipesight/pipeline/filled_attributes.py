"""What a model changes in place while it is called: lists, dicts, sets, arrays and plain objects of its modules.

Which of them it changes is not guessed, but seen: the first micro-batches run one after the other, and what is in the
containers is compared before and after. From then on, each micro-batch fills copies of its own. When all have ended,
the originals get what was put into the copies, one after the other::

    self.states      a list, empty     ──> a list for micro-batch 0  ──┐
                        │         └──────> a list for micro-batch 1  ──┤
                        └── in the end, what both have appended <──────┘

What a micro-batch has put there for the next one is not there for it: reading it raises. Where nothing but numbers and
names was seen to change, the container is a counter or a log, and shared, within one partition.
"""

from __future__ import annotations

import copy
import enum
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from types import CellType, FunctionType, MethodType
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn

from pipesight._nested import PLAIN
from pipesight.pipeline.flattening import is_plain_object, items_of

__all__ = ["CONTAINERS", "Contents", "Copies", "Place", "contents_of", "is_container", "items", "put", "text_of"]

CONTAINERS = (list, dict, set, deque)
FUNCTIONS = (FunctionType, MethodType)

Place: TypeAlias = tuple[Any, ...]
"""Where something is: a module and the name of its attribute, or a hook and a number, and then keys."""

_MOST = 10_000  # items of a container, and containers: more are a vocabulary, a data set
_MOST_BYTES = 2**22  # of an array


def is_container(value: Any) -> bool:
    """Tell whether a value may be filled in place, and can be copied."""
    if is_array(value):
        return bool(value.nbytes <= _MOST_BYTES and not value.dtype.hasobject)
    if isinstance(value, (*CONTAINERS, MutableMapping)):
        return len(value) <= _MOST and not type(value).__module__.startswith("torch.")
    if isinstance(value, (Collection, str, enum.Enum)) or not is_plain_object(value):
        return False
    settings = getattr(type(value), "__dataclass_params__", None)
    return settings is None or not settings.frozen


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of numpy, which may not be there."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def items(value: Any) -> dict[Any, Any]:
    """Return what is in a container, by its place; the members of a set are their own, an array is a number."""
    if isinstance(value, (list, deque, tuple)):
        return dict(enumerate(value))
    if isinstance(value, FUNCTIONS):
        return dict(enumerate(reached(value)))
    if is_array(value):
        return {"values": zlib.crc32(value.tobytes())}
    return {id(item): item for item in value} if isinstance(value, set) else dict(items_of(value) or ())


class Contents(dict[int, tuple[Place, Any, dict[Any, Any]]]):
    """What is in containers, and in those in them, now: by id, the place, the container and its items.

    Args:
        roots: Places and what is there.
    """

    def __init__(self, roots: Iterable[tuple[Place, Any]] = ()) -> None:
        super().__init__()
        waiting, functions = list(roots), set[int]()
        while waiting and len(self) < _MOST:
            place, value = waiting.pop()
            if type(value) in PLAIN or id(value) in self or id(value) in functions:
                continue
            if isinstance(value, FUNCTIONS):
                functions.add(id(value))  # it may reach itself
            elif type(value) is not tuple and not is_container(value):
                continue
            found = items(value)
            if type(value) is not tuple and not isinstance(value, FUNCTIONS):
                self[id(value)] = (place, value, found)
            waiting += [((*place, key), item) for key, item in found.items()]

    def changes(self) -> Iterator[tuple[Place, Any, set[Any]]]:
        """Yield the containers in which something has changed since, and the keys of it: none if only numbers have."""
        for place, value, before in self.values():
            now = items(value)
            if before.keys() != now.keys() or any(item is not now[key] for key, item in before.items()):
                yield place, value, _changed_keys(before, now)

    def renew(self) -> None:
        """Take what is in the containers now."""
        for key, (place, value, _) in self.items():
            self[key] = place, value, items(value)

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield the tensors in the containers."""
        for place, _, found in self.values():
            yield from (((*place, key), item) for key, item in found.items() if isinstance(item, Tensor))


def _changed_keys(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> set[Any]:
    pairs = {key: (before.get(key, 0), now.get(key, 0)) for key in {**before, **now}}
    found = {key for key, (old, new) in pairs.items() if old is not new}
    return set() if all(_is_number(one) for key in found for one in pairs[key]) else found


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float, str)


def contents_of(modules: Iterable[nn.Module], hooks: Iterable[Any]) -> Iterator[tuple[Place, Any]]:
    """Yield what attributes of modules hold, and what hooks reach that are closures or methods of objects."""
    for module in modules:
        for name, value in vars(module).items():
            if name not in _OF_TORCH and type(value) not in PLAIN:
                yield (module, name), value
    for hook in hooks:
        yield from (((hook, number), value) for number, value in enumerate(reached(hook)))


_OF_TORCH = frozenset(vars(nn.Module()))


def reached(function: Any) -> list[Any]:
    """Return what a closure or a method holds."""
    if isinstance(function, MethodType):
        return [function.__self__]
    if isinstance(function, FunctionType):
        return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return []


class Copies:
    """Copies of containers, and of those in them; what is met twice is one thing in the copies, too.

    Args:
        first: What is in containers, where that is not what is in them now.
        stale: By place, the keys of what another micro-batch has put there, which must not be read.
        change: Makes the tensors of the copies; the same by default.
    """

    def __init__(
        self,
        first: Contents | None = None,
        stale: Mapping[Place, set[Any]] | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._first, self._stale, self._change = first or Contents(), stale or {}, change
        self._made: dict[int, tuple[Any, Any, dict[Any, Any]]] = {}  # by id: original, copy, what was in this at first
        self._originals: dict[int, Any] = {}  # by id of the copy
        self._functions: dict[int, Any] = {}  # by id: what stands for it

    def of(self, value: Any, place: Place) -> Any:
        """Return the copy of a value; itself if it is nothing that may be filled."""
        if isinstance(value, Tensor):
            return value if self._change is None else self._change(value)
        if type(value) is tuple:
            return tuple(self.of(item, (*place, key)) for key, item in enumerate(value))
        if isinstance(value, FUNCTIONS):
            return self.function_of(value, place)
        if type(value) in PLAIN or not is_container(value):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        place, _, found = self._first.get(id(value)) or (place, value, items(value))
        try:
            new = copy.copy(value)
        except Exception:  # an object that does not want to
            return value
        self._made[id(value)] = (value, new, {})
        self._originals[id(new)] = value
        inside = {key: self.of(item, (*place, key)) for key, item in found.items()}
        if stale := self._stale.get(place):
            keys = ([*found] or [0]) if isinstance(value, (list, deque, set)) else stale
            inside |= dict.fromkeys(keys, _Stale(place))
        put(new, inside)
        self._made[id(value)] = (value, new, items(new))
        return new

    def function_of(self, function: Any, place: Place = ()) -> Any:
        """Return a closure or method that reaches copies; itself if it reaches nothing that may be filled."""
        if id(function) in self._functions:
            return self._functions[id(function)]
        self._functions[id(function)] = function  # as long as it is looked at: it may reach itself
        old = reached(function)
        new = [self.of(value, (*(place or (function,)), number)) for number, value in enumerate(old)]
        if all(one is other for one, other in zip(old, new, strict=True)):
            return function
        if isinstance(function, MethodType):
            self._functions[id(function)] = bound = MethodType(function.__func__, new[0])
            return bound
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(map(CellType, new))
        )
        made.__kwdefaults__ = function.__kwdefaults__
        self._functions[id(function)] = made
        return made

    def again(self, change: Callable[[Tensor], Tensor], filled: Iterable[Any] = ()) -> Copies:
        """Return copies of the copies as they are now, and of originals that were filled themselves."""
        other, again = Copies(self._first, self._stale, change), Copies(change=change)
        for original, mine in (*((o, m) for o, m, _ in self._made.values()), *((one, one) for one in filled)):
            other._made[id(original)] = (original, again.of(mine, ()), {})
        return other

    def write_back(self, change: Callable[[Tensor], Tensor]) -> None:
        """Do to the originals what was done to the copies; ``change`` makes the tensors that are put there."""
        for original, mine, before in list(self._made.values()):
            now = items(mine)
            if before.keys() == now.keys() and all(item is now[key] for key, item in before.items()):
                continue
            new = {key: self._back(item, change) for key, item in now.items() if type(item) is not _Stale}
            if is_array(original):
                original[...] = mine
                continue
            there = items(original)
            gone = before.keys() - now.keys()
            if isinstance(mine, (list, deque)) and not gone and all(now[key] is before[key] for key in before):
                original.extend([item for key, item in new.items() if key not in before])
            elif isinstance(mine, (list, deque)):
                put(original, new)
            else:
                new = {key: item for key, item in new.items() if before.get(key, self) is not now[key]}
                put(original, {key: item for key, item in there.items() if key not in gone} | new)

    def _back(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if type(value) is tuple:
            return tuple(self._back(item, change) for item in value)
        if id(value) in self._originals:
            return self._originals[id(value)]
        if type(value) in CONTAINERS and type(value) is not set:
            put(value, {key: self._back(item, change) for key, item in items(value).items()})
        return value


def put(value: Any, new: Mapping[Any, Any]) -> None:
    """Let these be the items of a container."""
    if is_array(value):
        return
    if isinstance(value, list):
        value[:] = new.values()
    elif isinstance(value, (deque, set)):
        value.clear()
        value.extend(new.values()) if isinstance(value, deque) else value.update(new.values())
    elif isinstance(value, MutableMapping):
        value.clear()
        value.update(new)
    else:
        for key in items(value).keys() - new.keys():
            object.__delattr__(value, key)
        for key, item in new.items():
            object.__setattr__(value, key, item)


def text_of(place: Place) -> str:
    """Return how a place is called.

    >>> text_of((nn.ReLU(), "states", 0, "mask"))
    "ReLU.states[0]['mask']"
    """
    owner, name, *keys = place
    if isinstance(owner, FunctionType | MethodType):
        return f"what {owner.__qualname__} reaches, a hook,"
    root = f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"
    return root + "".join(f"[{key!r}]" for key in keys)


class _Stale:
    """Stands for what another micro-batch has put somewhere. It can be replaced; all other use raises."""

    def __init__(self, place: Place) -> None:
        self.__dict__["_place"] = place

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{text_of(self.__dict__['_place'])} keeps something from one call of the model for the next: in a "
            "pipeline, that has begun by then; keep no state from one call to the next, put it into an attribute of "
            "the module itself, self.state = ..., in one partition, or use chunks=1"
        )

    __getattr__ = __setattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __eq__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __float__ = __int__ = __index__ = __str__ = __repr__ = _refuse
    __hash__ = object.__hash__
    __torch_function__ = _refuse
