"""Spans in code that ``torch.compile`` compiles: no graph break, and no event.

The compiler is told to treat nodes as context managers that do nothing. Others import it, at any time or never, so
`ImportWatch` waits for that.
"""

from __future__ import annotations

from pipesight._import_watch import ImportWatch
from pipesight._logger import own_logger
from pipesight._torch import compiling
from pipesight.trace import _span_events
from pipesight.trace.node import Node, SilentNode
from pipesight.trace.use import Use

__all__ = ["prepare_for_compiler", "register_with_compiler"]

logger = own_logger(__name__)

_kinds: list[type] = [Node, SilentNode, Use]


def prepare_for_compiler() -> None:
    """Register the classes of spans with the compiler, now or when it is imported."""
    ImportWatch(compiling.COMPILER, _register)


def register_with_compiler(kind: type) -> None:
    """Register another class of spans."""
    _kinds.append(kind)
    if compiling.is_imported():
        _register()


def _register() -> None:
    try:
        _span_events.is_compiling = compiling.register_empty_context(_kinds)
    except Exception:  # the compiler's internals may change
        logger.warning("code with spans in it may not compile as one graph with this version of torch", exc_info=True)
