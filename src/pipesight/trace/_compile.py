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
from pipesight.trace import _span
from pipesight.trace.node import Node, SilentNode, Use

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    Loader = MetaPathFinder = object  # these abstract classes take long to import, and nobody asks for them

__all__ = ["know", "prepare_for_compiler"]

logger = own_logger(__name__)

_COMPILER = "torch._dynamo"
_kinds: list[type] = [Node, SilentNode, Use]


def prepare_for_compiler() -> None:
    """Let the compiler know about spans, now or when it is imported."""
    if _COMPILER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Waiter())


def know(kind: type) -> None:
    """Let the compiler know of another class of spans."""
    _kinds.append(kind)
    if _COMPILER in sys.modules:
        _register()


class _Waiter(MetaPathFinder):
    """Finds the compiler as others would, and is told when it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _COMPILER:
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
        import torch
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.variables.builder import VariableBuilder
        from torch._dynamo.variables.constant import ConstantVariable
        from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable

        class SpanVariable(GenericContextWrappingVariable):
            """A span to the compiler: a context manager that does nothing."""

            def enter(self, tx: Any) -> Any:
                return self

            def exit(self, tx: Any, *args: Any) -> Any:
                if hasattr(tx, "active_generic_context_managers"):
                    tx.active_generic_context_managers.pop()
                else:  # torch 2.6 counts them
                    tx.generic_context_manager_depth -= 1
                return ConstantVariable.create(None)

        def wrap(builder: Any, value: Any) -> Any:
            builder.install_guards(GuardBuilder.ID_MATCH)
            return SpanVariable(value, source=builder.source)

        for kind in _kinds:
            VariableBuilder._type_dispatch()[kind] = wrap
        _span.is_compiling = torch.compiler.is_compiling
    except Exception:  # these are the compiler's own affairs, and may change
        logger.warning("code with spans in it may not compile as one graph with this version of torch", exc_info=True)
