"""Initialise the weights of this rank's layers only, without the whole model in memory.

A factory builds the model on the ``meta`` device, where tensors have shapes but no memory. It does not notice: tensors
report the device ``cpu``, because some models skip their initialisation on ``meta``. Every operator is recorded. To
initialise the layers of one partition, the operators that made their tensors run again, for real::

    factory()          empty(8, 8) ──> uniform_() ──> ...        on meta, recorded
    materialise(...)   the same, for the tensors of some layers  on the CPU, with values

Each layer draws from a stream seeded by ``torch.initial_seed()`` and its name, so that its weights depend neither on
the layers before it nor on the number of ranks.

A model that looks at values while it is built cannot be built so: see `model_building`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesight._torch.module_internals import TRUNCATED_NORMAL
from pipesight._torch.operators import TorchDispatchMode, schema_of, takes_device, tree_leaves, tree_map_only
from pipesight._torch.tensors import storage_id
from pipesight.pipeline.randomness import seed_of

__all__ = ["Recipe", "build_on_meta", "meta_tensors"]


def build_on_meta(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe]:
    """Call ``factory`` on the meta device; return its module, and the recipe for its weights."""
    recipe = Recipe()
    with torch.random.fork_rng(devices=[]), _Pretending(recipe), _Noting(recipe), _whole_truncated_normal(recipe):
        return factory(), recipe


@dataclass(frozen=True, slots=True)
class _Operator:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def tensors(self) -> list[Tensor]:
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    def touched(self) -> set[int]:
        """Return the storages that it made or may have changed."""
        outputs = [t for t in tree_leaves(self.output) if isinstance(t, Tensor)]
        return {storage_id(t) for t in (*outputs, *self.tensors()) if t.is_meta}

    def written(self) -> set[int]:
        """Return the storages that it gave values to."""
        outputs = {storage_id(t) for t in tree_leaves(self.output) if isinstance(t, Tensor) and t.is_meta}
        schema = schema_of(self.function)
        if schema is None:
            return outputs
        given = [*zip(schema.arguments, self.args, strict=False)]
        given += [(a, self.kwargs[a.name]) for a in schema.arguments if a.name in self.kwargs]
        changed = [value for a, value in given if a.alias_info is not None and a.alias_info.is_write]
        found = {storage_id(t) for t in tree_leaves(changed) if isinstance(t, Tensor) and t.is_meta}
        if schema.name.split("::")[1].startswith(("empty", "new_empty")):
            return found
        return found | (outputs - {storage_id(t) for t in self.tensors() if t.is_meta})


class Recipe:
    """The operators that made the tensors of a model, in order."""

    def __init__(self) -> None:
        self._operators: list[_Operator] = []
        self._touched: list[set[int]] | None = None

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record an operator."""
        self._operators.append(_Operator(function, args, kwargs, output))

    def without_values(self, module: nn.Module) -> str | None:
        """Return the name of a tensor that was never initialised, if there is one."""
        written: set[int] = set()
        for operator in self._operators:
            written |= operator.written()
        for name, child in module.named_modules():
            for _, key, tensor in meta_tensors(child):
                if storage_id(tensor) not in written and tensor.numel():
                    return f"{name}.{key}".lstrip(".")
        return None

    def materialise(self, layers: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
        """Give the tensors of some layers memory and their initial values, in place."""
        for name, layer in layers:
            self._materialise(name, layer, device)

    def _materialise(self, name: str, layer: nn.Module, device: torch.device) -> None:
        places = [place for module in layer.modules() for place in meta_tensors(module)]
        found = self.values(name, [tensor for _, _, tensor in places])  # those that modules share stay shared
        for values, key, tensor in places:
            value = found[id(tensor)]
            if value.device != device:
                value = found[id(tensor)] = _like(tensor, value.detach().to(device))
            values[key] = value

    def values(self, name: str, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the initial values of some meta tensors by their ids, drawn from the stream of ``name``."""
        needed = {storage_id(tensor) for tensor in tensors}
        if self._touched is None or len(self._touched) != len(self._operators):
            self._touched = [operator.touched() for operator in self._operators]
        chosen: list[_Operator] = []
        for operator, touched in zip(reversed(self._operators), reversed(self._touched), strict=True):
            if not needed.isdisjoint(touched):
                chosen.append(operator)
                needed |= {storage_id(t) for t in operator.tensors() if t.is_meta}
        real: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.default_generator.manual_seed(seed_of(torch.initial_seed(), "initial weights", name))
            for operator in reversed(chosen):
                _run(operator, real)
        return {id(tensor): _like(tensor, _view(tensor, real)) for tensor in tensors}


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def meta_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return the meta tensors of a module itself, plain attributes included, and the dictionaries that hold them."""
    return [
        (values, key, tensor)
        for values in (module._parameters, module._buffers, vars(module))
        for key, tensor in values.items()
        if isinstance(tensor, Tensor) and tensor.is_meta
    ]


class _Noting(TorchDispatchMode):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recipe = recipe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._recipe.note(func, args, kwargs or {}, output)
        return output


class _Pretending(TorchFunctionMode):
    """Puts tensors on the meta device, lets them report ``cpu``, and records the values of ``torch.tensor([1.0])``."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is None and takes_device(func):
            if func in _FROM_NUMBERS and not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
                return self._constant(func, args, kwargs)
            return func(*args, **{**kwargs, "device": _META})
        if func in _MOVES and args[0].is_meta:
            return _moved(func, args, kwargs)
        if func in _QUESTIONS and args[0].is_meta and not _is_torch(sys._getframe(1)):
            return _QUESTIONS[func]
        return func(*args, **kwargs)

    def _constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value = func(*args, **{**kwargs, "device": "cpu", "requires_grad": False})
        output = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        self._recipe.note(Tensor.copy_, (output, value), {}, output)
        return output.requires_grad_(kwargs.get("requires_grad", False))


_META = torch.device("meta")
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_MOVES = (Tensor.to, Tensor.cpu)
_QUESTIONS: dict[Any, Any] = {
    Tensor.device.__get__: torch.device("cpu"),
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


def _is_torch(frame: Any) -> bool:
    """Return whether torch's own code asks, which must know; except `torch.nn.init`, which would do nothing."""
    name = str(frame.f_globals.get("__name__"))
    return frame.f_globals is globals() or (name.split(".")[0] == "torch" and name != "torch.nn.init")


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do ``tensor.to(...)`` without the move to the CPU."""
    if func is Tensor.cpu:
        return args[0]
    rest = [value.dtype if isinstance(value, Tensor) else value for value in args[1:] if not _is_cpu(value)]
    kwargs = {key: value for key, value in kwargs.items() if not _is_cpu(value)}
    return func(args[0], *rest, **kwargs) if rest or kwargs else args[0]


def _is_cpu(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "cpu"


@contextlib.contextmanager
def _whole_truncated_normal(recipe: Recipe) -> Iterator[None]:
    """Record a truncated normal as one operator: how many draws it takes depends on the values."""
    original = getattr(nn.init, TRUNCATED_NORMAL)

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        recipe.note(original, (tensor, *args), kwargs, tensor)
        return tensor

    setattr(nn.init, TRUNCATED_NORMAL, noted)
    try:
        yield
    finally:
        setattr(nn.init, TRUNCATED_NORMAL, original)


def _view(tensor: Tensor, real: dict[int, Tensor]) -> Tensor:
    """Return the real counterpart of a meta tensor: the same view of the real storage."""
    if not tensor.is_meta:
        return tensor
    key = storage_id(tensor)
    if key not in real:
        real[key] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
    whole = real[key].untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def _run(operator: _Operator, real: dict[int, Tensor]) -> None:
    known = set(real) | {storage_id(t) for t in operator.tensors() if t.is_meta}
    args, kwargs = tree_map_only(Tensor, lambda t: _view(t, real), (operator.args, operator.kwargs))
    args, kwargs = tree_map_only(torch.device, lambda d: torch.device("cpu") if d.type == "meta" else d, (args, kwargs))
    outputs = operator.function(*args, **kwargs)
    for mine, theirs in zip(tree_leaves(outputs), tree_leaves(operator.output), strict=True):
        if isinstance(theirs, Tensor) and theirs.is_meta and storage_id(theirs) not in known:
            if mine.stride() == theirs.stride() and mine.storage_offset() == theirs.storage_offset():
                real[storage_id(theirs)] = mine
            else:
                _view(theirs, real).copy_(mine)
