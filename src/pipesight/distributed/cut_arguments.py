"""How a model is cut over ranks: at modules, by name, or, if it is an ``nn.Sequential``, by numbers of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["check_way", "sizes_and_names"]


def sizes_and_names(
    balance: Iterable[int] | Sequence[str] | None, cuts: Sequence[str] | None
) -> tuple[list[int] | None, Sequence[str] | None]:
    """Return numbers of layers and names of modules apart: a pipeline in one process takes cuts in this place."""
    if balance is not None and not isinstance(balance, Iterable):
        raise TypeError(f"balance must be a list of numbers of layers, such as [2, 2] (got: {balance!r})")
    sizes: list[Any] | None = None if balance is None else list(balance)
    if sizes and cuts is None and all(isinstance(name, str) for name in sizes):
        return None, balance if isinstance(balance, str) else sizes
    return sizes, cuts


def check_way(balance: Any, cuts: Any, loss: Any, loss_fn: Any, sample: Any, batch_dim: Any, verify: bool) -> None:
    """Raise unless a model is cut in one of two ways, and what was given belongs to it."""
    if (balance is None) == (cuts is None):
        which = "neither" if cuts is None else "both"
        raise TypeError(
            "a model is cut at modules, cuts=['transformer.h.4'], or, if it is an nn.Sequential, by numbers of layers, "
            f"balance=[2, 2], but got {which}"
        )
    if cuts is None:
        others = {"loss": loss, "sample": sample, "batch_dim": batch_dim, "verify": verify or None}
        wrong = [name for name, value in others.items() if value is not None]
        if loss_fn is None:
            raise TypeError("balance needs a loss_fn of output and target: DistributedPipeline(..., loss_fn=...)")
        if wrong:
            raise TypeError(f"{wrong[0]} belongs to cuts, but the model is cut by balance")
