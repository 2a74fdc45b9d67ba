"""Compiled modules, run uncompiled for a while."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["CompiledModules", "HookGuards", "run_uncompiled_alone", "uses_cuda_graphs"]


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

    def run_uncompiled(self, keep: Callable[[nn.Module], bool], *, anew: bool = False) -> None:
        """Run them as they are, until `restore`; look for more of them anew, if there may be.

        Args:
            keep: Tells of a compiled module, asked before those inside of it, whether all of it stays compiled.
            anew: Whether there may be others than before.
        """
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
            inner = vars(module).get("_modules", {}).get("_orig_mod")
            wraps = inner is not None and "forward" in vars(module)
            if id(module) not in known and (wraps or module._compiled_call_impl is not None):
                if not uses_cuda_graphs(module) and keep(inner if wraps else module):
                    continue
                if wraps:
                    self._change(module, "forward", inner.__call__)
                else:
                    self._change(module, "_compiled_call_impl", None)
            waiting += module._modules.values()

    def _change(self, module: nn.Module, name: str, value: Any) -> None:
        self._changed.append((module, name, vars(module).get(name)))
        vars(module)[name] = value

    def restore(self) -> None:
        """Run what was compiled again."""
        self._known = False
        while self._changed:
            module, name, value = self._changed.pop()
            vars(module)[name] = value


def uses_cuda_graphs(module: nn.Module) -> bool:
    """Tell whether a compiled module is captured in CUDA graphs, whose replays call no code of Python."""
    ask = getattr(module, "get_compiler_config", None)
    ask = ask or getattr(module._compiled_call_impl, "get_compiler_config", None)
    settings = ask() if callable(ask) else None
    return bool(settings and settings.get("triton.cudagraphs"))


def run_uncompiled_alone(function: Callable[..., object]) -> None:
    """Have a function, and what it calls, run as it is wherever it is no part of larger compiled code, for good."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo import types

    if hasattr(eval_frame, "set_code_exec_strategy"):  # since torch 2.7
        kinds: Any = types
        skip = kinds.FrameExecStrategy(kinds.FrameAction.SKIP, kinds.FrameAction.SKIP)
        eval_frame.set_code_exec_strategy(function.__code__, skip)


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
