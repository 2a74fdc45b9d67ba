"""What a model writes into attributes of its modules while it is called: each micro-batch reads what it wrote itself.

A model may note a mask, a list of states or an auxiliary loss on a module, and read it further on. In a pipeline, the
next micro-batch has by then written there, too. So what a micro-batch writes is also kept apart, for itself::

    micro-batch 0   self.mask = a ────────────────────────> self.mask is a
    micro-batch 1                     self.mask = b ──────────────────────────> self.mask is b
    everyone else                                                               self.mask is b, the last one

What it did not write itself, it reads as it is; a number that it reads before it writes it is a counter, which all
share. A tensor that another micro-batch wrote, or that is read after the call, has a graph that is not the reader's. It
can be looked at, but not differentiated.

A list, dict, set or plain object that was there before and is filled in place is one for each micro-batch, too; see
`filled_attributes`.

A module whose attributes are written gets a class that derives from its own, which looks them up.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipesight._nested import map_tensors, tensors_in
from pipesight._patches import Patches
from pipesight._torch.module_internals import forward_hook_tables
from pipesight.pipeline.filled_attributes import CONTAINERS, Copies, fillable, kept, may_fill
from pipesight.pipeline.guard import guard

__all__ = ["Attributes", "ModelAttributes", "PassAttributes", "watch_attributes"]


class ModelAttributes:
    """The attributes of a model that hold something which it may fill in place.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {id(m): m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)}
        self._found: list[tuple[nn.Module, str]] = []
        self.hooks: list[Any] = []
        """Those that fill something."""
        self._tables = [table for module in self.modules.values() for table in forward_hook_tables(module)]
        self._calls, self._known = 0, (0, 0)

    def filled(self) -> list[tuple[nn.Module, str]]:
        """Return them, for a mini-batch that is about to begin, and watch them, and those kept from call to call."""
        known = _assigned.count, sum(map(len, self._tables))
        if self._calls < 2 or self._known != known:
            self._calls, self._known = self._calls + 1, known
            self.hooks = []
            self._found = list(fillable(self.modules.values()))
            for module, name in (*self._found, *kept(self.modules.values())):
                if not any(name in table for table in (module._parameters, module._buffers, module._modules)):
                    _derive(module, name)
            for table in self._tables:
                table.update({key: _OwnHook(hook) for key, hook in table.items() if may_fill(hook)})
                self.hooks += [hook.hook for hook in table.values() if isinstance(hook, _OwnHook)]
        return self._found


class PassAttributes:
    """What the micro-batches of a mini-batch have written last.

    Args:
        count: How many they are.
        model: What the model has; modules that are made in a call are its own.
    """

    def __init__(self, count: int = 1, model: ModelAttributes | None = None) -> None:
        self.count = count
        self.modules: Container[int] = () if model is None else model.modules
        self.last: dict[tuple[int, str], nn.Module] = {}
        self.readers: dict[tuple[int, str], int] = {}
        """The first partitions that read what their micro-batch had not written."""
        self.filled: dict[tuple[int, str], Any] = {}
        """What may be filled in place, as it was before all micro-batches."""
        self.copies: dict[int, Copies] = {}
        """Those of each micro-batch."""
        self._first = Copies()
        self.function_of: Callable[[Any], Any] = lambda function: function
        if model is not None and count > 1:
            for module, name in model.filled():
                if name in vars(module):
                    self.filled[id(module), name] = self._first.of(vars(module)[name])
            for hook in model.hooks:
                self._first.function_of(hook)
            self.function_of = self._first.function_of

    def end(self) -> None:
        """Put back what micro-batches have filled, and let nobody differentiate what is left in the modules."""
        for _, copies in sorted(self.copies.items()):
            copies.write_back(self._first.original, _guarded_item)
        for (_, name), module in self.last.items():
            if name in vars(module):
                vars(module)[name] = map_tensors(functools.partial(_guarded, module, name), vars(module)[name])
        self.last, self.copies, self.filled = {}, {}, {}


class Attributes:
    """What one micro-batch has written.

    Args:
        all: What all of its mini-batch have.
        i: Which micro-batch it is.
    """

    def __init__(self, all: PassAttributes, i: int = 0) -> None:
        self._all = all
        self._copies = all.copies[i] = Copies()
        self.modules = all.modules
        self.partition = 0
        """Where the micro-batch is now."""
        self._written: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._read: set[tuple[int, str]] = set()  # before they were written, as a counter is

    def note(self, module: nn.Module, name: str, value: Any, *, counts: bool = False) -> None:
        """Keep what was just written into an attribute, unless it is a number that goes on from what was there.

        Args:
            module: Whose attribute it is.
            name: That of the attribute.
            value: What was written.
            counts: Whether it may go on from what was there: that is not known, since nobody watched yet.

        Raises:
            RuntimeError: A tensor is read in an earlier partition, where the next micro-batch may have been by now.
        """
        key = id(module), name
        self._all.last[key] = module
        if counts:
            self._read.add(key)
        has_tensors = next(tensors_in(value), None) is not None
        if has_tensors or key not in self._read or type(value) in CONTAINERS:
            self._written[key] = (module, value)
        reader = self._all.readers.get(key, self.partition)
        if has_tensors and self._all.count > 1 and reader < self.partition:
            raise RuntimeError(
                f"{type(module).__name__}.{name} is read in partition {reader} and written in partition "
                f"{self.partition}, for the next call of the model: in a pipeline, that has begun by then; keep no "
                "state from one call to the next, write it before the first cut, or use chunks=1"
            )

    def forget(self, module: nn.Module, name: str) -> None:
        """Note that an attribute was deleted."""
        self._written.pop((id(module), name), None)

    def read(self, module: nn.Module, name: str, left: Any) -> Any:
        """Return what this micro-batch wrote into an attribute; else what is ``left`` there."""
        key = id(module), name
        if key in self._written:
            return self._written[key][1]
        if key in self._all.filled:
            return self._copies.of(self._all.filled[key])
        self._read.add(key)
        self._all.readers[key] = min(self._all.readers.get(key, self.partition), self.partition)
        return map_tensors(functools.partial(_guarded, module, name), left) if key in self._all.last else left

    def function(self, function: Any) -> Any:
        """Return a function that fills what this micro-batch has, instead of what it was made with."""
        return self._copies.function_of(self._all.function_of(function))

    def values(self) -> Attributes | None:
        """Return a copy to compute with once more, with values alone; None if nothing was written."""
        if not self._written and not self._all.filled:
            return None
        other = Attributes(PassAttributes())
        other.modules, other._all.filled, other._all.function_of = self.modules, self._all.filled, self._all.function_of
        pairs = self._written.items()
        other._written = {key: (module, map_tensors(_value, value)) for key, (module, value) in pairs}
        other._copies = self._copies.copied(_value)
        return other

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let this thread write and read these within the block."""
        before, _here.attributes = _here.attributes, self
        try:
            yield
        finally:
            _here.attributes = before


class _PerThread(threading.local):
    attributes: Attributes | None = None


class _Assigned:
    """How often a list, dict or set was put into an attribute of a module, outside calls of models."""

    count = 0


_here, _assigned = _PerThread(), _Assigned()
_deriving = threading.Lock()


@functools.cache
def watch_attributes() -> None:
    """Notice from now on, for good, what is written into attributes of modules."""
    Patches().wrap(nn.Module, "__setattr__", _write, may_raise=True)


def _write(original: Callable[..., None], module: nn.Module, name: str, value: Any) -> None:
    attributes = _here.attributes
    if attributes is None or id(module) not in attributes.modules:
        original(module, name, value)
        if attributes is None and type(value) in CONTAINERS:
            _assigned.count += 1
        return
    before = vars(module).get(name)
    original(module, name, value)
    if vars(module).get(name) is value:
        counts = isinstance(before, (int, float)) and not isinstance(vars(type(module)).get(name), _Attribute)
        _derive(module, name)
        attributes.note(module, name, value, counts=counts)


def _derive(module: nn.Module, name: str) -> None:
    """Let a module look an attribute up with the micro-batch that asks."""
    cls = type(module)
    if isinstance(vars(cls).get(name), _Attribute):
        return
    with _deriving:
        if _OWN not in vars(cls := type(module)):
            known = (sub for sub in cls.__subclasses__() if vars(sub).get(_OWN) is cls)
            object.__setattr__(module, "__class__", next(known, None) or _derived(cls))
        setattr(type(module), name, _Attribute(name))


_OWN = "_pipesight_derived_from"


def _derived(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class like that of a module; copies and pickles of the module have its own."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made: Any = cls.__reduce_ex__(self, protocol)
        if not isinstance(made, tuple):
            return made
        arguments = tuple(cls if one is type(self) else one for one in made[1])
        return (_new if made[0] is copyreg.__newobj__ else made[0], arguments, *made[2:])  # type: ignore[attr-defined]

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    derived: type[nn.Module] = metaclass(cls.__name__, (nn.Module,), {**names, _OWN: cls, "__reduce_ex__": reduce})
    derived.__bases__ = (cls,)  # not at once: that would call its `__init_subclass__`, which may keep a list of classes
    return derived


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    return cls.__new__(cls, *args)


class _Attribute:
    """Looks up an attribute of a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return getattr(vars(owner)[_OWN], self._name)
        left = vars(module)[self._name] if self._name in vars(module) else self._of_class(module, owner)
        attributes = _here.attributes
        return left if attributes is None else attributes.read(module, self._name, left)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if _here.attributes is not None:
            _here.attributes.forget(module, self._name)
        if self._name not in vars(module):
            raise AttributeError(self._name)
        del vars(module)[self._name]

    def _of_class(self, module: Any, owner: Any) -> Any:
        found = getattr(vars(owner)[_OWN], self._name)  # or `AttributeError`, and `nn.Module.__getattr__` goes on
        return found.__get__(module, owner) if hasattr(found, "__get__") else found


def _guarded(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    return guard(
        tensor,
        f"{type(module).__name__}.{name} is a tensor with a graph that one micro-batch has left there, and it was "
        "differentiated in another, or outside the pipeline, where that graph cannot be reached; return it from "
        "forward, or write detach() of it into the attribute",
    )


class _OwnHook:
    """Calls a hook that fills what the micro-batch has that calls it. Copies of a module have the hook itself."""

    def __init__(self, hook: Any) -> None:
        functools.update_wrapper(self, hook)
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attributes = _here.attributes
        return (self.hook if attributes is None else attributes.function(self.hook))(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.hook,)


def _itself(hook: Any) -> Any:
    return hook


def _guarded_item(tensor: Tensor) -> Tensor:
    return guard(
        tensor,
        "a tensor that a micro-batch has left in a list, dict or object of a module was differentiated by another, or "
        "outside the pipeline, where its graph cannot be reached; return it from forward, or put detach() of it there",
    )


def _value(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
