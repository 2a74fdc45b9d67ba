"""What a model was seen to change while it is called, in the mini-batches in which micro-batches follow each other."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipesight._nested import PLAIN
from pipesight._torch.module_internals import forward_hook_tables
from pipesight.pipeline.attribute_access import LookedUp, OwnHook, look_up, original_hook
from pipesight.pipeline.filled_attributes import Contents, Place, contents_of, text_of

__all__ = ["Lesson", "ModelAttributes", "Rest"]


class ModelAttributes:
    """What is known of the attributes of a model: which of them lead to something that it fills in place.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules = {id(m): m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)}
        self.filled: dict[Place, None] = {}
        """The attributes and hooks that lead to something filled."""
        self.shared: dict[Place, set[int]] = {}
        """Those that lead to a list or dict of numbers which changes; the partitions in which it is reached."""
        self.stale: dict[Place, set[Any]] = {}
        """What is filled; what a micro-batch finds there that another one has put there."""
        self.used: dict[Place, set[int]] = {}
        """Where tensors that belong to modules were seen to be used: the partitions."""
        self.changed: set[Place] = set()
        """The tensors that were seen to change."""
        self._rest: dict[Any, Rest] = {}
        self._tables = [table for module in self.modules.values() for table in forward_hook_tables(module)]
        self._learned: set[Any] = set()

    def learns(self, count: int) -> bool:
        """Tell whether it is yet to be seen what a mini-batch of so many micro-batches changes in place."""
        if self._key(count) not in self._learned:
            hooks = (hook for table in self._tables for hook in table.values())
            if all(map(_is_of_torch, (*map(type, self.modules.values()), *hooks))):  # they keep no more than statistics
                self.learned(count)
        return self._key(count) not in self._learned

    def learned(self, count: int) -> None:
        """Note that it was seen."""
        self._learned.add(self._key(count))

    def rest(self, count: int) -> Rest:
        """Return what was not seen to change in such mini-batches."""
        key = self._key(count)
        if key not in self._rest:
            known = {**self.filled, **self.shared}
            contents = Contents((root, value) for root, value in self._roots() if root not in known)
            self._rest[key] = Rest(contents, self.tensors(contents), self.changed)
        return self._rest[key]

    def forget(self, count: int) -> None:
        """Let the next of such mini-batches show once more what it changes."""
        self._learned.discard(self._key(count))
        self._rest.pop(self._key(count), None)

    def _key(self, count: int) -> Any:
        return self._model.training, count > 1, sum(map(len, self._tables))

    def contents(self, *, filled: bool = False) -> Contents:
        """Return what attributes and hooks hold, now: all of them, or those that are filled."""
        if filled:
            return Contents((root, value) for root in self.filled for value in _there(*root))
        return Contents(self._roots())

    def _roots(self) -> Iterator[tuple[Place, Any]]:
        hooks = {id(hook): hook for table in self._tables for hook in map(original_hook, table.values())}
        return contents_of(self.modules.values(), (hook for hook in hooks.values() if not _is_of_torch(hook)))

    def outside(self) -> tuple[dict[Place, Any], Contents]:
        """Return what classes of modules hold, and the global variables that their forwards name, and what is there."""
        found: dict[Place, Any] = {}
        for kind in {base for module in self.modules.values() for base in type(module).__mro__[:-1]}:
            if not _is_of_torch(kind):
                tables = vars(kind), _globals_of(kind)
                pairs = [pair for table in tables for pair in table.items() if type(pair[1]) not in _FIXED]
                found |= {(kind, name): value for name, value in pairs if not name.startswith(("__", "_pipesight"))}
        return found, Contents(found.items())

    def note(self, changes: Iterable[tuple[Place, Any, set[Any]]], *, first: bool) -> None:
        """Note that containers are filled, and what in them is not there for the next micro-batch.

        Args:
            changes: The containers and their keys.
            first: Whether the first micro-batch has filled them, as one does that makes what others find.
        """
        found = {id(value): keys for place, value, keys in changes}
        if not found:
            return
        for place, _, keys in changes:
            if keys:
                self.stale.setdefault(place, set()).update(() if first else keys)
        for root, value in self._roots():
            inside = [found[key] for key in Contents([(root, value)]) if key in found]
            owner, name = root
            if any(inside):
                self.filled[root] = None
                for table in self._tables:
                    table.update({key: OwnHook(hook) for key, hook in table.items() if hook is owner})
            elif inside:
                self.shared.setdefault(root, set())
            if inside and isinstance(owner, nn.Module):
                look_up(owner, name)

    def tensors(self, contents: Contents) -> dict[Place, Tensor]:
        """Return the tensors that a model may change in place: buffers, frozen parameters, those in attributes."""
        found: dict[Place, Tensor] = dict(contents.tensors())
        for module in self.modules.values():
            if not isinstance(module, _WITH_STATISTICS):
                for table in (module._parameters, module._buffers, vars(module)):
                    found |= {(module, name): one for name, one in table.items() if isinstance(one, Tensor)}
        return found


class Rest:
    """What a model was not seen to change. It may begin to, such as after a number of steps.

    Args:
        contents: What is in containers.
        tensors: Those that it might change, and which it does.
        changed: Of these, those that it does change.
    """

    def __init__(self, contents: Contents, tensors: Mapping[Place, Tensor], changed: Container[Place]) -> None:
        self._contents = contents
        self._tensors = [(place, weakref.ref(t)) for place, t in tensors.items() if place not in changed]
        self._versions: list[int] = []

    def note(self) -> None:
        """Note what is there before a mini-batch."""
        self._contents.renew()
        self._versions = self._versions_now()

    def first_change(self) -> Place | None:
        """Return where something is that is no number and was not there before, or another value of a tensor."""
        pairs = zip(self._tensors, self._versions, self._versions_now(), strict=True)
        found = next((place for (place, _), before, now in pairs if before != now), None)
        return found or next((place for place, _, keys in self._contents.changes() if keys), None)

    def _versions_now(self) -> list[int]:
        found = (tensor() for _, tensor in self._tensors)
        return [0 if tensor is None else _version(tensor) for tensor in found]


class Lesson:
    """What is seen while micro-batches run one after the other.

    Args:
        model: Learns it.
        partitions: How many there are.
        contents: What is in containers.
    """

    def __init__(self, model: ModelAttributes, partitions: int, contents: Contents) -> None:
        self._model, self._partitions, self._contents = model, partitions, contents
        self._tensors = model.tensors(contents)
        self._places = {id(tensor): place for place, tensor in self._tensors.items()}
        self._versions = {place: _version(tensor) for place, tensor in self._tensors.items()}
        self._changed: dict[Place, set[int]] = {}
        self._aliases: list[tuple[Place, Tensor, int]] = []  # and their versions
        self._outside = model.outside()

    def use(self, tensor: Tensor, j: int) -> None:
        """Note that a tensor is used in a partition."""
        place = self._places.get(id(tensor))
        if place is not None:
            self._model.used.setdefault(place, set()).add(j)

    def alias(self, tensor: Tensor, other: Tensor | None, j: int) -> None:
        """Note that a partition uses ``tensor.data``, which is ``other``; None if it puts something else there."""
        place = self._places.get(id(tensor))
        if place is not None and other is None:
            self.change(place, j)
        elif place is not None and other is not None:
            self.use(tensor, j)
            self._aliases.append((place, other, other._version))

    def end_task(self, j: int, own: Container[tuple[int, str]]) -> None:
        """Note which tensors were changed in a partition, but in the micro-batch's ``own`` attributes."""
        for place, other, version in self._aliases:
            if other._version != version:
                self.change(place, j)
        self._aliases.clear()
        for place, tensor in self._model.tensors(self._contents).items():
            version = _version(tensor)
            changed = self._tensors.get(place) is tensor and version != self._versions[place]
            if changed and (id(place[0]), place[1]) not in own:
                self.change(place, j)
            self._tensors[place], self._versions[place], self._places[id(tensor)] = tensor, version, place

    def change(self, place: Place, j: int) -> None:
        """Note that a partition puts something else into a tensor, or another tensor there."""
        self._model.changed.add(place)
        self._changed.setdefault(place, set()).add(j)

    def end_micro_batch(self, i: int, *, checks: bool) -> None:
        """Note which containers were filled.

        Raises:
            RuntimeError: A tensor was changed in one partition, and used in another.
        """
        self._model.note([*self._contents.changes()], first=i == 0)
        self._contents = self._model.contents()
        before, self._outside = self._outside, self._model.outside()
        if i and checks and (place := _first_change(before, self._outside)) is not None:
            raise RuntimeError(
                f"{text_of(place)} is changed while the model is called, and what is not in a module is shared by all "
                "micro-batches: in a pipeline, another one has changed it by the time it is read; put it into an "
                "attribute of a module, self.state = ..., or use chunks=1"
            )
        for place, partitions in self._changed.items():
            both = sorted(partitions | self._model.used.get(place, set()))
            if checks and len(both) > 1:
                raise RuntimeError(
                    f"{text_of(place)} is a tensor that the model changes in partition {max(partitions)}, and it is "
                    f"used in {' and '.join(map(str, both))}, too: in a pipeline, another micro-batch is there by "
                    "then; cut where all of that is in one partition, change it outside forward, or use chunks=1"
                )


def _globals_of(kind: type[nn.Module]) -> dict[str, Any]:
    """Return the global variables that the methods of a class name, and the functions of its file that these call."""
    variables, found = vars(sys.modules.get(kind.__module__, sys)), dict[str, Any]()
    waiting: list[Any] = list(vars(kind).values())
    while waiting:
        code = getattr(inspect.unwrap(waiting.pop()), "__code__", None)
        for name in {name for one in _codes(code) for name in one.co_names} & variables.keys() - found.keys():
            value = found[name] = variables[name]
            if isinstance(value, FunctionType) and value.__module__ == kind.__module__:
                waiting.append(value)
    return found


def _codes(code: Any) -> Iterator[Any]:
    """Yield the code of a function and of those in it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)


def _there(owner: Any, name: Any) -> list[Any]:
    """Return what is at a place now, if anything is."""
    if isinstance(owner, nn.Module):
        return [vars(owner)[name]] if name in vars(owner) else []
    return [value for (_, number), value in contents_of((), [owner]) if number == name]


_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)  # which may be updated in any order

_FIXED = (type, FunctionType, ModuleType, property, staticmethod, classmethod, LookedUp)


def _first_change(before: tuple[dict[Place, Any], Contents], now: tuple[dict[Place, Any], Contents]) -> Place | None:
    """Return where something is that is no number and was not there before."""
    fresh = (place for place, value in now[0].items() if type(value) not in PLAIN and before[0].get(place) is not value)
    return next(fresh, None) or next((place for place, _, keys in before[1].changes() if keys), None)


def _is_of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("pipesight", "torch")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
