"""Operators and the dispatcher: schemas, dispatch keys, modes, tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "FAKE_TENSOR_LOGGER",
    "SPARE_KEY",
    "FakeTensorMode",
    "TorchDispatchMode",
    "aten_operators",
    "dispatch_key",
    "key_set",
    "pass_over_in_higher_order_operators",
    "schema_of",
    "takes_device",
    "tree_leaves",
    "tree_map_only",
    "with_key",
    "without_key",
]

SPARE_KEY = "TESTING_ONLY_GenericMode"
"""A dispatch key that torch reserves for modes and registers nothing for."""

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""The logger that shows a traceback before a fake tensor's error is raised."""

with_key: Callable[[Any], AbstractContextManager[None]] = torch._C._IncludeDispatchKeyGuard
"""Return a context in which this thread's operators go to the kernels of a dispatch key first."""

without_key: Callable[[Any], AbstractContextManager[None]] = torch._C._ExcludeDispatchKeyGuard
"""Return a context in which this thread's operators pass over the kernels of a key set."""


def dispatch_key(name: str) -> Any:
    """Return the dispatch key of that name."""
    return torch._C._dispatch_key_parse(name)


def key_set(key: Any) -> Any:
    """Return a set of one dispatch key."""
    return torch._C.DispatchKeySet(key)


def pass_over_in_higher_order_operators(key: Any) -> None:
    """Let operators that take functions, such as ``flex_attention``, pass over a dispatch key, for good.

    They have no fallback as others have, so that they fail where the key is included.
    """
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)  # of those to come
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)


def aten_operators() -> Iterator[tuple[str, Any]]:
    """Yield the operators of torch with their names, such as ``add.Tensor``; not those made of others, as dropout."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space == "aten" and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            base, _, overload = rest.partition(".")
            yield rest, getattr(getattr(torch.ops.aten, base), overload or "default")


def schema_of(function: Any) -> Any:
    """Return the schema of an operator: its name, and what its arguments are; ``None`` for a Python function."""
    return getattr(function, "_schema", None)


def takes_device(function: Any) -> bool:
    """Tell whether a function of torch makes tensors on the default device unless it is given ``device=``."""
    return function in _device_constructors()
