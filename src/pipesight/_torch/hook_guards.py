"""``torch.compile`` and hooks of modules that come and go: compiled code is chosen by the hooks that are there.

By default torch takes code that was compiled without hooks for modules that have some by now.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["HookGuards"]


class HookGuards:
    """Have what is compiled from now on be valid only for the hooks that were there."""

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
