"""Tensors: what kind they are, where their memory is, and how to use them unseen by subclasses and modes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = [
    "base_of",
    "current_gpu",
    "in_transform",
    "is_capturing_stream",
    "is_fake",
    "is_freed",
    "is_functional",
    "is_instance",
    "is_tracing",
    "is_transformed",
    "is_view",
    "local_part",
    "raw_stream",
    "storage_id",
    "storage_key",
    "with_function_overrides",
    "without_function_overrides",
    "without_subclass_overrides",
]

without_function_overrides: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A context in which no ``__torch_function__`` is called: neither that of a subclass nor that of a mode."""

with_function_overrides: Callable[[], AbstractContextManager[None]] = torch._C._EnableTorchFunction
"""A context in which they are called again, inside :data:`without_function_overrides`."""

without_subclass_overrides: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""A context in which no ``__torch_function__`` of a subclass is called; modes still are."""

is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Tell whether a tensor is one inside a ``torch.func`` transform, which has no values of its own."""

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Tell whether ``torch.jit.trace`` records what runs."""

_innermost_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def in_transform() -> bool:
    """Tell whether a ``torch.func`` transform, such as ``vmap`` or ``grad``, calls this code."""
    return _innermost_transform() is not None


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
"""Return the address of a GPU's current stream: ``torch.cuda.current_stream`` without an object for it."""

is_capturing_stream: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
"""Tell whether a CUDA graph captures the current stream, where CUDA is initialised: the C function itself."""


def base_of(tensor: Tensor) -> Tensor:
    """Return what a tensor is a view of, if it is one, and otherwise the tensor."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is spread over ranks, and any other tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def current_gpu() -> int:
    """Return the calling thread's GPU: ``torch.cuda.current_device`` where CUDA is known to be initialised."""
    return int(torch._C._cuda_getDevice())  # builds without CUDA do not have it


def is_view(tensor: Tensor) -> bool:
    """Tell whether a tensor is a view of another, as far as autograd knows."""
    return bool(tensor._is_view())


def storage_id(tensor: Tensor) -> int:
    """Return a number of a tensor's storage, also where that has no address, as on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the number that ``StorageWeakRef.cdata`` would have, without making one."""
    return int(storage._cdata)


is_freed: Callable[[int], object] = torch.UntypedStorage._expired
"""Tell whether a storage is freed, by the number of a ``StorageWeakRef``: its ``expired`` without two calls."""


def is_instance(value: object, module: str, name: str) -> bool:
    """Tell whether a value is of a class in a module that need not be imported: then there is no such value."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor has a shape but no values, as while a model is compiled or exported."""
    return is_instance(tensor, "torch._subclasses.fake_tensor", "FakeTensor")


def is_functional(tensor: Tensor) -> bool:
    """Tell whether a tensor is one that compilers put around others to record changes in place."""
    return is_instance(tensor, "torch._subclasses.functional_tensor", "FunctionalTensor")
