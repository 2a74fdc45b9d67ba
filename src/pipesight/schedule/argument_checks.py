"""The arguments that engines and plans take, and their checks: balance, chunks, checkpoint modes, schedules."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Literal, get_args

__all__ = [
    "CHECKPOINT_MODES",
    "SCHEDULES",
    "CheckpointMode",
    "check_balance",
    "check_checkpoint",
    "check_chunks",
    "checkpoint_stop",
]

CheckpointMode = Literal["always", "except_last", "never"]
"""Which micro-batches are recomputed in the backward."""

CHECKPOINT_MODES: tuple[CheckpointMode, ...] = get_args(CheckpointMode)

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zero-bubble",
    "zbv-zero-bubble",
    "dualpipev",
    "v-half",
    "v-min",
)
"""The schedules that have a name."""


def check_balance(balance: Iterable[int] | None, layers: int, recipe: str = "") -> list[int]:
    """Return the balance as a list; if it is missing or wrong, ``recipe`` in the error says how to find one."""
    if balance is None:
        raise ValueError("balance is required: how many layers each partition takes" + recipe)
    if not isinstance(balance, Iterable):
        raise TypeError(
            "balance must be a list that says how many layers each partition takes, "
            f"but got {type(balance).__name__} (balance: {balance}, layers: {layers})"
        )
    sizes = [size if isinstance(size, bool) or not hasattr(size, "__index__") else int(size) for size in balance]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise _wrong_balance(f"all numbers of balance must be positive integers (balance: {sizes})", recipe)
    if sum(sizes) != layers:
        values = f"(balance: {sizes} = {sum(sizes)}, layers: {layers})"
        raise _wrong_balance(f"sum of balance must equal the number of layers {values}", recipe)
    return sizes


def _wrong_balance(message: str, recipe: str) -> ValueError:
    error = ValueError(message)
    if recipe:
        error.add_note(recipe.strip("\n"))
    return error


def check_chunks(chunks: int | float) -> int:
    """Return the number of micro-batches; 4.0 is 4, as in torchgpipe."""
    if isinstance(chunks, float) and chunks.is_integer():
        chunks = int(chunks)
    try:
        number = operator.index(chunks)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"chunks must be an integer, but got {type(chunks).__name__} (chunks: {chunks!r:.40})"
        ) from None
    if number < 1:
        raise ValueError(f"number of chunks must be a positive integer (chunks: {number})")
    return number


def check_checkpoint(checkpoint: str) -> CheckpointMode:
    """Return the mode."""
    for mode in CHECKPOINT_MODES:
        if mode == str(checkpoint):
            return mode
    raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never' (checkpoint: {checkpoint!r})")


def checkpoint_stop(checkpoint: CheckpointMode, chunks: int) -> int:
    """Return how many micro-batches are checkpointed: those below this number."""
    return {"always": chunks, "except_last": chunks - 1, "never": 0}[checkpoint]
