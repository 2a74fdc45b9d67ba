"""Compiled modules, run uncompiled for a while."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

__all__ = ["CompiledModules", "HookGuards"]


class CompiledModules:
    """The compiled modules of a model, by ``module.compile()`` or ``torch.compile(module)``.

    Code that is compiled with hooks falls apart at each of them, and torch may give up compiling it for good. A module
    whose hooks come and go is better compiled without them, and run as it is while it has them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._around: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._changed: list[tuple[nn.Module, str, Any]] = []
        self._known = False  # whether all that is compiled was looked for since they ran as compiled

    def add(self, compiled: object) -> None:
        """Note what ``torch.compile`` returned, if it is a part of the model, or the model."""
        inner = vars(compiled).get("_modules", {}).get("_orig_mod") if isinstance(compiled, nn.Module) else None
        if isinstance(compiled, nn.Module) and any(inner is module for module in self._model.modules()):
            self._around.add(compiled)

    def run_uncompiled(self, *, anew: bool = False) -> None:
        """Run them as they are, until `restore`; look for more of them anew, if there may be."""
        if self._known and not anew:
            return
        self._known = True
        known = {id(module) for module, _, _ in self._changed}
        waiting: list[nn.Module | None] = [self._model, *self._around]
        seen: set[nn.Module | None] = {None}
        while waiting:  # a third of the time that modules() takes: this is done in each step that is logged
            module = waiting.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            waiting += module._modules.values()
            if id(module) in known:
                continue
            inner = vars(module).get("_modules", {}).get("_orig_mod")
            if inner is not None and "forward" in vars(module):
                self._change(module, "forward", inner.__call__)
            elif module._compiled_call_impl is not None:
                self._change(module, "_compiled_call_impl", None)

    def _change(self, module: nn.Module, name: str, value: Any) -> None:
        self._changed.append((module, name, vars(module).get(name)))
        vars(module)[name] = value

    def restore(self) -> None:
        """Run what was compiled again."""
        self._known = False
        while self._changed:
            module, name, value = self._changed.pop()
            vars(module)[name] = value


class HookGuards:
    """Have code that is compiled from now on be valid only for the hooks that modules had then.

    By default torch takes code that was compiled without hooks for modules that have some by now.
    """

    _before: bool | None = None  # what the setting was, before any of these
    _count = 0

    def __init__(self) -> None:
        self._on = False

    def turn_on(self) -> None:
        """Begin, if torch's compiler has been imported: whoever compiles does that first."""
        config = _config()
        if config is None or self._on:
            return
        self._on = True
        if not HookGuards._count:
            HookGuards._before = config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
        HookGuards._count += 1

    def turn_off(self) -> None:
        """End; the last one restores the setting."""
        if not self._on:
            return
        self._on = False
        HookGuards._count -= 1
        if not HookGuards._count and (config := _config()) is not None:
            config.skip_nnmodule_hook_guards = HookGuards._before


def _config() -> Any:
    return getattr(sys.modules.get("torch._dynamo"), "config", None)
