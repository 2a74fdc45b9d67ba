"""How a pipeline is cut and run, as the arguments that make one: the first line of every pipeline's ``repr``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["argument_text"]


def argument_text(
    *,
    devices: Sequence[Any],
    chunks: int,
    checkpoint: str,
    balance: Sequence[int] | None = None,
    cuts: Sequence[str] | None = None,
    **more: Any,
) -> str:
    """Write the arguments of a pipeline that is cut by ``balance`` or by ``cuts``.

    >>> argument_text(balance=[1, 1], devices=["cpu", "cpu"], chunks=4, checkpoint="never")
    "balance=[1, 1], devices=['cpu', 'cpu'], chunks=4, checkpoint='never'"
    """
    cut = f"cuts={list(cuts)}" if cuts is not None else f"balance={list(balance or ())}"
    given = {"devices": [str(device) for device in devices], "chunks": chunks, "checkpoint": checkpoint, **more}
    return ", ".join([cut, *(f"{name}={value!r}" for name, value in given.items())])
