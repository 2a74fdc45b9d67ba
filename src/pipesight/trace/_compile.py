"""Spans in code that ``torch.compile`` compiles: no graph break, and no event.

Torch's compiler, once it is there, is told that a node is a context manager it can look into; what it finds there is
that nothing is to be done. It is imported by others, at any time or never, so an import hook waits for it.
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
from pipesight.trace import _span
from pipesight.trace.node import Node, SilentNode
from pipesight.trace.use import Use

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    Loader = MetaPathFinder = object  # these abstract classes take long to import, and nobody asks for them

__all__ = ["know", "prepare_for_compiler"]

logger = own_logger(__name__)

_kinds: list[type] = [Node, SilentNode, Use]


def prepare_for_compiler() -> None:
    """Let the compiler know about spans, now or when it is imported."""
    if compiling.is_imported():
        _register()
    else:
        sys.meta_path.insert(0, _Waiter())


def know(kind: type) -> None:
    """Let the compiler know of another class of spans."""
    _kinds.append(kind)
    if compiling.is_imported():
        _register()


class _Waiter(MetaPathFinder):
    """Finds the compiler as others would, and is told when it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != compiling.COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Announcer(spec.loader)
        return spec


class _Announcer(Loader):
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
        _span.is_compiling = compiling.register_empty_context(_kinds)
    except Exception:  # these are the compiler's own affairs, and may change
        logger.warning("code with spans in it may not compile as one graph with this version of torch", exc_info=True)
