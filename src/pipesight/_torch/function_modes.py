"""Modes that see every call of a torch function (``TorchFunctionMode``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

__all__ = [
    "DATA_GETTER",
    "DATA_SETTER",
    "OWN_GETTERS",
    "innermost_mode",
    "pop_mode",
    "push_mode",
    "without_innermost_mode",
]

innermost_mode: Callable[[], Any] = _get_current_function_mode
"""Return the mode that sees a call first, ``None`` if there is none."""

push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
"""Let a mode see calls first; what entering it does, in a third of the time."""

pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
"""Take away the mode that sees calls first."""

without_innermost_mode: Callable[[], AbstractContextManager[Any]] = _pop_mode_temporarily
"""A context without that mode."""

_OF_DEVICE, _COMPUTED = ("device", "is_cuda", "is_cpu", "is_meta"), ("T", "mT", "H", "mH", "real", "imag")
OWN_GETTERS = frozenset(getattr(torch.Tensor, name).__get__ for name in (*_OF_DEVICE, *_COMPUTED))
"""What a mode is called with for attributes that depend on the device of a tensor, or are computed from it."""

_data: Any = torch.Tensor.data
DATA_GETTER, DATA_SETTER = _data.__get__, _data.__set__
"""What a mode is called with for ``tensor.data``, whose changes in place the tensor does not count."""
