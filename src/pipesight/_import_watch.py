"""Call a function once a module has been imported: now, or when the program imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import MetaPathFinder
else:
    MetaPathFinder = object  # this abstract class takes long to import, and nothing needs it

__all__ = ["ImportWatch"]


class ImportWatch(MetaPathFinder):
    """Waits for a module. Importing it here would cost programs seconds that never use it.

    ``imported`` is called after it has run, in the thread that imports it.
    """

    def __init__(self, name: str, imported: Callable[[], None]) -> None:
        self._name, self._imported = name, imported
        if name in sys.modules:
            imported()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as others do, and let its loader report."""
        if name != self._name or self not in sys.meta_path:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._imported()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
