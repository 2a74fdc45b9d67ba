"""Modules: their tables of hooks, wrappers around them, and the metadata of their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils.hooks import RemovableHandle

__all__ = [
    "GLOBAL_HOOKS_CHECK",
    "HOOK_TABLES",
    "TRUNCATED_NORMAL",
    "WRAPPER_NAMES",
    "BatchNorm",
    "forward_hook_tables",
    "intercept_calls",
    "is_compiled",
    "is_persistent",
    "not_compiled",
    "register_end_hook",
    "release_calls",
    "set_state_metadata",
    "state_metadata",
    "target_device",
    "uncompiled",
]

not_compiled = _disable_dynamo
"""Decorate a function that ``torch.compile`` must call as it is. ``torch.compiler.disable`` imports the compiler."""

HOOK_TABLES = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The attributes of a module that hold its hooks."""

WRAPPER_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The names of the child in wrappers: ``torch.compile``, FSDP and ``checkpoint_wrapper``."""

GLOBAL_HOOKS_CHECK = "_has_any_global_hook"
"""The function of ``torch.nn.modules.module`` that compiled modules ask, to warn of hooks on all modules."""

TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
"""The function of ``torch.nn.init`` behind ``trunc_normal_``: it draws until the values are within the bounds."""


def forward_hook_tables(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the live tables of a module's forward hooks and forward pre-hooks."""
    return module._forward_hooks, module._forward_pre_hooks


def register_end_hook(hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook for the end of every call of every module: it gets keyword arguments, too, but after an error."""
    handle = torch_module.register_module_forward_hook(hook, with_kwargs=True, always_call=True)
    # Else removing it leaves its entry there, and torch calls every module as if it had hooks.
    rest = weakref.ref(torch_module._global_forward_hooks_with_kwargs)
    handle.extra_dict_ref = (*handle.extra_dict_ref, rest)
    return handle


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module was compiled, by ``torch.compile(module)`` or by ``module.compile()``."""
    call = module._compiled_call_impl
    while isinstance(call, _Interception):
        call = call.compiled
    return "_orig_mod" in vars(module).get("_modules", ()) or call is not None


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Tell whether a buffer is saved, given its name in the module."""
    return buffer not in module._non_persistent_buffers_set


class _Interception:
    """Stands where torch keeps the compiled call of a module: calls go there, and copies of a module do without it.

    It does not keep the module, which has it, so that the module is freed with its last owner.
    """

    __slots__ = ("_around", "_module", "compiled")

    def __init__(self, module: nn.Module, around: Callable[..., Any]) -> None:
        self.compiled, self._around, self._module = module._compiled_call_impl, around, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.compiled
        if inner is None:
            module = self._module()
            assert module is not None  # which makes this call
            inner = module._call_impl
        return self._around(inner, args, kwargs)


def intercept_calls(
    module: nn.Module, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Let ``around`` make the calls of a module, hooks included: it gets the call and its arguments."""
    # What `torch.compile` returned would set the attribute of what it was given.
    vars(module)["_compiled_call_impl"] = _Interception(module, around)


def release_calls(module: nn.Module) -> None:
    """Undo the last `intercept_calls`, unless something else has taken its place."""
    call = vars(module).get("_compiled_call_impl")
    if isinstance(call, _Interception):
        vars(module)["_compiled_call_impl"] = call.compiled


def uncompiled(value: Any) -> Any:
    """Return what ``torch.compile`` was given to make a module or function; anything else as it is."""
    return getattr(value, "_orig_mod", getattr(value, "_torchdynamo_orig_callable", value))


def target_device(*args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device that ``module.to(*args, **kwargs)`` would move to, ``None`` if none."""
    first = kwargs.get("device", args[0] if args else None)
    if isinstance(first, int):  # which torch refuses to name on a machine without such a device
        return torch.device("cuda", first)
    device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device


def state_metadata(state: Any) -> dict[str, Any]:
    """Return what ``state_dict`` notes beside the tensors: the version of each module's format."""
    metadata: dict[str, Any] = getattr(state, "_metadata", {})
    return metadata


def set_state_metadata(state: Any, metadata: dict[str, Any]) -> None:
    """Give a state dict the notes that ``load_state_dict`` reads."""
    state._metadata = metadata
