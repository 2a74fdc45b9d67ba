"""What a task leaves in memory for its backward: engines offer it, observers that count memory ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Kept"]


class Kept(NamedTuple):
    """What is kept. Autograd graphs hold the rest: what their nodes have saved."""

    inputs: Sequence[Tensor | None] = ()
    """What the task was given. A task that is recomputed keeps it."""
    ends: Sequence[Any] = ()
    """Where its autograd graph ends: tensors, nodes, or edges to these."""
    recomputed: Sequence[tuple[str, Sequence[Tensor], Sequence[Tensor | None]]] = ()
    """Of each layer whose saved tensors are not in its graph: its name, its arguments, and what it has saved."""
    outputs: Sequence[Tensor] = ()
    """Those that the engine keeps as long, whether the graph has saved them or not."""
