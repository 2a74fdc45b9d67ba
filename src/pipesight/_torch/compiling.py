"""``torch.compile``, without importing it: that takes seconds, and most programs never do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

__all__ = ["COMPILER", "is_imported", "register_empty_context", "skip_code"]

COMPILER = "torch._dynamo"
"""The module that compiles."""


def is_imported() -> bool:
    """Tell whether the compiler has been imported."""
    return COMPILER in sys.modules


def skip_code(code: CodeType) -> None:
    """Keep the compiler from compiling a function: compiled code that calls it calls it as it is."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def register_empty_context(kinds: list[type]) -> Callable[[], bool]:
    """Let the compiler take objects of these classes for context managers that do nothing: no graph break.

    Return what tells whether the compiler is at work.
    """
    import torch
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable

    class EmptyContextVariable(GenericContextWrappingVariable):
        """What the compiler sees instead of the object."""

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
        return EmptyContextVariable(value, source=builder.source)

    for kind in kinds:
        VariableBuilder._type_dispatch()[kind] = wrap
    return torch.compiler.is_compiling
