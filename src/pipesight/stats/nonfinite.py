"""The first tensor of a step that went NaN or Inf."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipesight import context
from pipesight.stats.moments import Moments

__all__ = ["NonfiniteError", "Place", "Watchman"]


class NonfiniteError(RuntimeError):
    """A tensor has NaN or Inf, and the configuration says ``on_nonfinite: raise``."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor was measured."""

    layer: str
    tensor: str
    iteration: int
    partition: int | None = None
    microbatch: int | None = None
    phase: str | None = None

    @classmethod
    def here(cls, layer: str, tensor: str, iteration: int) -> Place:
        """Return the place of the calling thread in the pipe, if it is in one."""
        where = context.current()
        if where is None:
            return cls(layer, tensor, iteration)
        return cls(layer, tensor, iteration, where.partition, where.microbatch, where.phase)

    def __str__(self) -> str:
        inside = ""
        if self.microbatch is not None:
            inside = f", partition {self.partition}, micro-batch {self.microbatch}, {self.phase}"
        return f"{self.tensor!r} of layer {self.layer!r} (iteration {self.iteration}{inside})"


class Watchman:
    """Reports the first bad tensor of each iteration, once.

    Args:
        warn: Takes the report.
        folder: Where tensors are dumped.
        rank: Of this process.
    """

    def __init__(self, warn: Callable[[str], None], folder: Path, rank: int) -> None:
        self._warn, self._folder, self._rank = warn, folder, rank
        self._lock = threading.Lock()
        self._reported = -1

    def look(self, moments: Moments, place: Place, actions: Collection[str], tensor: Tensor | None) -> None:
        """Report a tensor whose moments count NaN or Inf, if it is the first of its iteration; raise for each.

        Raises:
            NonfiniteError: The actions include ``"raise"``.
        """
        if not moments.nans and not moments.infs:
            return
        with self._lock:
            first = self._reported != place.iteration
            self._reported = place.iteration
        numel = moments.count + moments.nans + moments.infs
        report = f"{place} has {moments.nans:.0f} NaN and {moments.infs:.0f} Inf of {numel:.0f} numbers"
        if first:
            report = f"first bad tensor: {report}"
            if "dump" in actions and tensor is not None:
                report += self._dump(tensor, place)
            self._warn(report)
        if "raise" in actions:
            raise NonfiniteError(f"{report}; to go on instead, set on_nonfinite: warn")

    def _dump(self, tensor: Tensor, place: Place) -> str:
        layer = re.sub(r"[^\w.-]", "_", place.layer)[:100]
        name = re.sub(r"[^\w.-]", "_", place.tensor)[:100]
        path = self._folder / f"iteration-{place.iteration:06d}-rank-{self._rank:05d}-{layer}-{name}.pt"
        entry = {field: getattr(place, field) for field in Place.__slots__}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save({**entry, "rank": self._rank, "values": tensor.detach().cpu().clone()}, path)
        except OSError as error:
            return f"; it could not be saved to {path} ({error})"
        return f"; it is in {path}, for torch.load"
