"""Public names that are imported when first used: torch takes seconds to import, and much of pipesight needs none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(
    package: str, homes: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    ``homes`` is the module that defines each lazy name, and ``modules`` are submodules that become attributes. The
    package's ``__all__`` is what ``dir`` and ``help`` show.
    """
    module = sys.modules[package]

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in modules:
            return importlib.import_module(f"{package}.{name}")  # which sets the attribute
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted(module.__all__)

    return __getattr__, __dir__
