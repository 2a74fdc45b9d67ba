"""Skip connections: ``stash`` a tensor in one layer, ``pop`` it in a later one, whatever partitions they are in.

A layer declares what it stashes and pops, and its ``forward`` yields the commands::

    @skippable(stash=["skip"])
    class Down(nn.Module):
        def forward(self, input):
            yield stash("skip", input)
            return self.conv(input)

    @skippable(pop=["skip"])
    class Up(nn.Module):
        def forward(self, input):
            skip = yield pop("skip")
            return self.conv(input) + skip

In a plain ``nn.Sequential`` the tensor stays in the thread; in a ``GPipe`` it is copied straight from the source's
device to the target's, and its gradient straight back.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import uuid
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = [
    "Namespace",
    "SkipKey",
    "SkipTracker",
    "pop",
    "skip_keys",
    "skippable",
    "stash",
    "use_tracker",
    "verify_skippables",
]

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Separates equal skip names of different parts of a model; see ``isolate`` of a skippable layer.

    Example::

        ns = Namespace()
        block = nn.Sequential(Down().isolate(ns), Up().isolate(ns))
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4)
    """Two namespaces are equal if their ids are."""


@dataclass(frozen=True, slots=True)
class SkipKey:
    """The full name of one skip connection."""

    namespace: Namespace | None
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class stash:  # noqa: N801 (a command, written like a function call)
    """``yield stash(name, tensor)`` stores ``tensor`` (or ``None``) for the layer that pops ``name``."""

    name: str
    """Of the skip."""
    tensor: Tensor | None
    """What is put aside."""

    def __post_init__(self) -> None:
        if self.tensor is not None and not isinstance(self.tensor, Tensor):
            raise TypeError(f"only a Tensor or None can be stashed, but '{self.name}' is {_class(self.tensor)}")


@dataclass(frozen=True, slots=True)
class pop:  # noqa: N801
    """``tensor = yield pop(name)`` fetches what an earlier layer stashed as ``name``."""

    name: str
    """Of the skip."""


class SkipTracker:
    """Holds stashed tensors until they are popped."""

    def __init__(self, tensors: dict[Hashable, Tensor | None] | None = None) -> None:
        self.tensors: dict[Hashable, Tensor | None] = {} if tensors is None else tensors

    def stash(self, key: Hashable, tensor: Tensor | None) -> None:
        """Store ``tensor``; a second one under the same key replaces the first."""
        self.tensors[key] = tensor

    def pop(self, key: Hashable) -> Tensor | None:
        """Remove and return what was stored, or raise ``KeyError``."""
        return self.tensors.pop(key)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_here = _PerThread()


class use_tracker:  # noqa: N801 (a context manager, written like a function call)
    """Make the skippable layers that run in this thread use ``tracker``."""

    __slots__ = ("_before", "_tracker")

    def __init__(self, tracker: SkipTracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        self._before, _here.tracker = _here.tracker, self._tracker

    def __exit__(self, *_: object) -> None:
        _here.tracker = self._before


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declare the skip connections of a module class whose ``forward`` yields :class:`stash` and :class:`pop`.

    The class itself is kept, and with it parameters, pickling and ``isinstance``; it gains
    ``isolate(namespace, *, only=None)``, which moves its names (or those in ``only``) into a namespace and returns
    the layer. A class that is declared once more, with other names, is kept too, and a class derived from it returned.
    """
    if isinstance(stash, type):
        raise TypeError(
            f"skippable needs the names that {_class(stash)} stashes and pops: @skippable(stash=[...], pop=[...])"
        )
    stashes, pops = _names("stash", stash), _names("pop", pop)
    if twice := sorted(stashes & pops):
        raise ValueError(f"a layer cannot stash and pop the same name (names: {', '.join(twice)})")

    def decorate(cls: type[M]) -> type[M]:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"skippable decorates an nn.Module class, but got {_class(cls)}")
        original = getattr(cls.forward, "skippable_forward", cls.forward)
        if "stashable_names" in vars(cls):
            own = {"__module__": cls.__module__, "__doc__": cls.__doc__}
            cls = types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(own))

        @functools.wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _drive(self, original(self, *args, **kwargs), stashes, pops)

        forward.skippable_forward = original  # type: ignore[attr-defined]
        cls.forward = forward
        cls.stashable_names = stashes  # type: ignore[attr-defined]
        cls.poppable_names = pops  # type: ignore[attr-defined]
        cls.isolate = _isolate  # type: ignore[attr-defined]
        cls.stashable, cls.poppable = _stashable, _poppable  # type: ignore[attr-defined]
        return cls

    return decorate


def _drive(layer: nn.Module, body: object, stashes: frozenset[str], pops: frozenset[str]) -> Any:
    """Run the generator of a skippable ``forward``, and carry out its commands."""
    due_stashes, due_pops = set(stashes), set(pops)
    if isinstance(body, Generator):
        resume = functools.partial(body.send, None)
        while True:
            try:
                command = resume()
            except StopIteration as stop:
                body = stop.value
                break
            try:
                answer: Tensor | None = None
                if isinstance(command, stash):
                    _take(due_stashes, stashes, command.name, "stash")
                    _here.tracker.stash(_key(layer, command.name), command.tensor)
                elif isinstance(command, pop):
                    _take(due_pops, pops, command.name, "pop")
                    answer = _pop(layer, command.name)
                else:
                    raise TypeError(
                        f"{command!r:.80} is not a command from @skippable: forward must yield stash(...) or pop(...)"
                    )
                resume = functools.partial(body.send, answer)
            except Exception as error:  # raised at the yield, so that the traceback shows the user's line
                resume = functools.partial(body.throw, error)
    if due_stashes:
        raise RuntimeError(
            f"{_quoted(due_stashes)} must be stashed but have not been, by {_class(layer)}; "
            f"did you forget `yield`? yield stash({min(due_stashes)!r}, tensor)"
        )
    if due_pops:
        raise RuntimeError(
            f"{_quoted(due_pops)} must be popped but have not been, by {_class(layer)}; "
            f"did you forget `yield`? tensor = yield pop({min(due_pops)!r})"
        )
    return body


def _take(due: set[str], declared: frozenset[str], name: str, verb: str) -> None:
    if name not in declared:
        able = {"stash": "stashable", "pop": "poppable"}[verb]
        raise RuntimeError(f"'{name}' has not been declared as {able}: @skippable({verb}=['{name}'])")
    if name not in due:
        raise RuntimeError(f"'{name}' is used twice; a layer can {verb} a name only once")
    due.discard(name)


def _pop(layer: nn.Module, name: str) -> Tensor | None:
    try:
        return _here.tracker.pop(_key(layer, name))
    except KeyError:
        raise RuntimeError(f"'{name}' has not been stashed by an earlier layer") from None


def _isolate(self: nn.Module, namespace: Namespace, *, only: Iterable[str] | None = None) -> nn.Module:
    declared: frozenset[str] = self.stashable_names | self.poppable_names  # type: ignore[operator, assignment]
    names = declared if only is None else _names("only", only)
    if unknown := sorted(names - declared):
        raise ValueError(f"{_class(self)} declares no such names: {', '.join(unknown)}")
    spaces: dict[str, Namespace] = {**self.__dict__.get("skip_namespaces", {}), **dict.fromkeys(names, namespace)}
    self.__dict__["skip_namespaces"] = spaces
    return self


def _stashable(self: nn.Module) -> Iterator[tuple[Namespace | None, str]]:
    """Yield the names that this layer stashes, each with its namespace."""
    return ((key.namespace, key.name) for key in _keys(self, "stashable_names"))


def _poppable(self: nn.Module) -> Iterator[tuple[Namespace | None, str]]:
    """Yield the names that this layer pops, each with its namespace."""
    return ((key.namespace, key.name) for key in _keys(self, "poppable_names"))


def _keys(layer: nn.Module, declared: str) -> list[SkipKey]:
    return [_key(layer, name) for name in sorted(getattr(layer, declared, ()))]


def _key(layer: nn.Module, name: str) -> SkipKey:
    return SkipKey(layer.__dict__.get("skip_namespaces", {}).get(name), name)


def skip_keys(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return what ``layer`` and the layers inside it stash and pop, in the order of ``layer.modules()``."""
    stashes: list[SkipKey] = []
    pops: list[SkipKey] = []
    for module in layer.modules():
        stashes += _keys(module, "stashable_names")
        pops += _keys(module, "poppable_names")
    return stashes, pops


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every stash of a sequential model has exactly one pop, in a later layer.

    Raises:
        TypeError: Some do not; the message lists all of them.
    """
    stashed: dict[SkipKey, str] = {}
    popped: dict[SkipKey, str] = {}
    wrong: list[str] = []
    for name, layer in module.named_children():
        wrong += _undecorated(name, layer)
        stashes, pops = skip_keys(layer)
        for key in stashes:
            if key in stashed:
                wrong.append(
                    f"layer '{name}' redeclared '{key.name}' as stashable but not isolated by namespace, "
                    f"after layer '{stashed[key]}'"
                )
            stashed.setdefault(key, name)
        for key in pops:
            if key in popped:
                wrong.append(
                    f"layer '{name}' redeclared '{key.name}' as poppable but not isolated by namespace, "
                    f"after layer '{popped[key]}'"
                )
            elif key not in stashed:
                wrong.append(
                    f"layer '{name}' declared '{key.name}' as poppable but it was not stashed by an earlier layer"
                )
            popped.setdefault(key, name)
    wrong += [
        f"no module declared '{key.name}' as poppable but stashed by layer '{name}'"
        for key, name in stashed.items()
        if key not in popped
    ]
    if wrong:
        raise TypeError(
            "one or more pairs of stash and pop do not match; every stash needs exactly one pop in a later layer:\n"
            + "".join(f"  * {line}\n" for line in wrong)
            + "to use a name for several pairs, isolate each: layer.isolate(Namespace())"
        )


def _undecorated(name: str, layer: nn.Module) -> list[str]:
    """Name the layers that would hand a generator to the next one. Inside of others, a generator may be meant."""
    if isinstance(layer, nn.Sequential):
        inside = [_undecorated(f"{name}.{inner}", child) for inner, child in layer.named_children()]
        return [line for lines in inside for line in lines]
    if not inspect.isgeneratorfunction(layer.forward):
        return []
    return [
        f"forward of layer '{name}' ({_class(layer)}) yields, but nothing drives it; "
        "did you forget @skippable(stash=[...], pop=[...])?"
    ]


def _names(what: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{what} must be a list of names, but got the string '{names}': {what}=['{names}']")
    return frozenset(names)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


def _class(thing: object) -> str:
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__
