"""Spans in code that ``torch.compile`` compiles: no graph break, and no event.

The compiler is told to treat nodes as context managers that do nothing. Others import it, at any time or never, so an
import hook waits for that.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipesight._logger import own_logger
from pipesight._torch import compiling
from pipesight.trace import _span_events
from pipesight.trace.node import Node, SilentNode
from pipesight.trace.use import Use

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    Loader = MetaPathFinder = object  # these abstract classes take long to import, and nothing needs them

__all__ = ["prepare_for_compiler", "register_with_compiler"]

logger = own_logger(__name__)

_kinds: list[type] = [Node, SilentNode, Use]


def prepare_for_compiler() -> None:
    """Register the classes of spans with the compiler, now or when it is imported."""
    if compiling.is_imported():
        _register()
    else:
        sys.meta_path.insert(0, _CompilerFinder())


def register_with_compiler(kind: type) -> None:
    """Register another class of spans."""
    _kinds.append(kind)
    if compiling.is_imported():
        _register()


class _CompilerFinder(MetaPathFinder):
    """Finds the compiler as usual, with a loader that notices when it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != compiling.COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _NoticingLoader(spec.loader)
        return spec


class _NoticingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()

    def __getattr__(self, name: str) -> Any:  # get_source and the like
        return getattr(self._loader, name)


def _register() -> None:
    try:
        _span_events.is_compiling = compiling.register_empty_context(_kinds)
    except Exception:  # the compiler's internals may change
        logger.warning("code with spans in it may not compile as one graph with this version of torch", exc_info=True)
