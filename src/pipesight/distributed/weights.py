"""Initial weights of some layers of a model that nobody holds whole.

A factory builds the model on the ``meta`` device, where tensors have shapes but no memory. Meanwhile every operator is
written down. To fill the layers of one partition, the operators that made their tensors run again, for real::

    factory()          empty(8, 8) ──> uniform_() ──> ...        on meta, written down
    materialise(...)   the same, for the tensors of some layers  on the CPU, with numbers

Each layer draws from a stream seeded by ``torch.initial_seed()`` and its name, so that its weights depend on nothing
else: not on the layers before it, nor on how many ranks there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Recipe", "build_on_meta"]


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
        return {_storage(t) for t in (*outputs, *self.tensors()) if t.is_meta}


class Recipe:
    """The operators that made the tensors of a model, in order."""

    def __init__(self) -> None:
        self._operators: list[_Operator] = []

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Write an operator down."""
        self._operators.append(_Operator(function, args, kwargs, output))

    def materialise(self, layers: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
        """Give the tensors of some layers memory and their initial values, in place."""
        for name, layer in layers:
            self._materialise(name, layer, device)

    def _materialise(self, name: str, layer: nn.Module, device: torch.device) -> None:
        places: list[tuple[dict[str, Any], str, Tensor]] = [
            (values, key, tensor)
            for module in layer.modules()
            for values in (module._parameters, module._buffers)
            for key, tensor in values.items()
            if tensor is not None and tensor.is_meta
        ]
        needed = {_storage(tensor) for _, _, tensor in places}
        chosen: list[_Operator] = []
        for operator in reversed(self._operators):
            if not needed.isdisjoint(operator.touched()):
                chosen.append(operator)
                needed |= {_storage(t) for t in operator.tensors() if t.is_meta}
        real: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.default_generator.manual_seed(_seed(name))
            for operator in reversed(chosen):
                _run(operator, real)
        found: dict[int, Tensor] = {}  # tensors that two modules of the layer share stay shared
        for values, key, tensor in places:
            if id(tensor) not in found:
                value = _view(tensor, real).to(device)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                found[id(tensor)] = value
            values[key] = found[id(tensor)]


def build_on_meta(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe]:
    """Call ``factory`` on the meta device; return its module, and the recipe for its weights."""
    recipe = Recipe()
    with torch.device("meta"), _Values(recipe), _Noting(recipe), _whole_truncated_normal(recipe):
        return factory(), recipe


class _Noting(TorchDispatchMode):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recipe = recipe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._recipe.note(func, args, kwargs or {}, output)
        return output


class _Values(TorchFunctionMode):
    """Keeps what the meta device would lose: the numbers of ``torch.tensor([1.0])``, and what `torch.nn.init` skips."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor):
            value = func(*args, **{**kwargs, "device": "cpu", "requires_grad": False})
            output = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            self._recipe.note(Tensor.copy_, (output, value), {}, output)
            return output.requires_grad_(kwargs.get("requires_grad", False))
        if func == _IS_META and sys._getframe(1).f_globals is vars(nn.init):
            return False  # so that it does its work, and we see the operators
        return func(*args, **kwargs)


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


@contextlib.contextmanager
def _whole_truncated_normal(recipe: Recipe) -> Iterator[None]:
    """Write truncated normal draws down as one operator: how many draws they take depends on the numbers."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name)

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        recipe.note(original, (tensor, *args), kwargs, tensor)
        return tensor

    setattr(nn.init, name, noted)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: Tensor, real: dict[int, Tensor]) -> Tensor:
    """Return the real counterpart of a meta tensor: the same view of the real storage."""
    if not tensor.is_meta:
        return tensor
    key = _storage(tensor)
    if key not in real:
        real[key] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
    whole = real[key].untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def _run(operator: _Operator, real: dict[int, Tensor]) -> None:
    known = set(real) | {_storage(t) for t in operator.tensors() if t.is_meta}
    args, kwargs = tree_map_only(Tensor, lambda t: _view(t, real), (operator.args, operator.kwargs))
    args, kwargs = tree_map_only(torch.device, lambda d: torch.device("cpu") if d.type == "meta" else d, (args, kwargs))
    outputs = operator.function(*args, **kwargs)
    for mine, theirs in zip(tree_leaves(outputs), tree_leaves(operator.output), strict=True):
        if isinstance(theirs, Tensor) and theirs.is_meta and _storage(theirs) not in known:
            if mine.stride() == theirs.stride() and mine.storage_offset() == theirs.storage_offset():
                real[_storage(theirs)] = mine
            else:
                _view(theirs, real).copy_(mine)


def _seed(name: str) -> int:
    text = repr((torch.initial_seed(), "initial weights", name))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
