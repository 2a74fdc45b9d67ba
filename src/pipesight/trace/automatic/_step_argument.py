"""Give events the training step that they belong to."""

from __future__ import annotations

from typing import Any

from pipesight import context
from pipesight.trace._span_events import Args

__all__ = ["with_step"]


def with_step(args: Args, **more: Any) -> dict[str, Any]:
    """Return arguments with ``more``, and with ``step`` if steps are counted and the program gives none."""
    step = context.counted_step()
    return {**args, **more} if step is None or "step" in args else {"step": step, **args, **more}
