"""`dgrad`: the gradient that a layer gives to its input.

A hook on the input itself would see the gradients of all layers that use it. So the layer is given a view instead::

    x ──▶ view ──▶ layer        the gradient of the view is the layer's own
    └───────────▶ another

A view that is changed in place loses its hook. Layers that do so, which have ``inplace = True`` somewhere inside, are
given the input itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipesight._torch.tensors import is_view
from pipesight.stats.model_watch._readable import numbers

__all__ = ["InputGradients"]


class InputGradients:
    """Hooks the inputs of one layer.

    ``hook`` puts a hook on a tensor, which is called with its gradient; ``warn`` is told, once, of a layer that changes
    its input unannounced.
    """

    def __init__(self, layer: nn.Module, hook: Callable[[Tensor], None], warn: Callable[[], None]) -> None:
        self._hook, self._warn = hook, warn
        self._in_place = any(getattr(m, "inplace", False) is True for m in layer.modules())
        self._given: dict[int, list[tuple[Tensor, int]]] = {}  # by thread: what a change would take the hook off
        self._warned = False

    def before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Hook the tensors among arguments; return the arguments to call the layer with."""
        wanted = {id(tensor) for tensor in numbers((args, kwargs)) if tensor.requires_grad}
        given = self._given[threading.get_ident()] = []

        def hooked(tensor: Tensor) -> Tensor:
            if id(tensor) not in wanted:
                return tensor
            if not self._in_place and tensor.layout is torch.strided and not tensor.is_nested:
                tensor = tensor.view_as(tensor)
            if is_view(tensor):
                given.append((tensor, tensor._version))
            self._hook(tensor)
            return tensor

        return _mapped(args, hooked), _mapped(kwargs, hooked)

    def after(self) -> None:
        """Look whether the layer has changed what it was given."""
        given = self._given.pop(threading.get_ident(), [])
        if not self._warned and any(tensor._version != version for tensor, version in given):
            self._warned = True
            self._warn()


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the same value with other tensors; containers that cannot be rebuilt keep theirs."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_mapped(item, function) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, function) for key, item in value.items()}
    return value
