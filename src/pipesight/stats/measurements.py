"""What was measured of one tensor in one iteration, and the statistics that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pipesight.stats.actions import Action
from pipesight.stats.moments.moments import LaterMoments
from pipesight.stats.moments.quantity import MOMENTS
from pipesight.stats.nonfinite import Bad, Layers, Place, Spot
from pipesight.stats.sinks import Record

__all__ = ["Statistics", "TensorMeasurements"]


class TensorMeasurements:
    """Records of one tensor: of its micro-batches, or of several calls.

    Attributes:
        calls: A record a source for each call, in order of time; none if this rank's copy does not count.
        spots: When and where each of them was.
        bad_ranks: Those with NaN or Inf, where ranks were merged; the first to have them first.
        first: The first call with NaN or Inf, and its place among the bad tensors of the iteration and its rank.
    """

    __slots__ = ("action", "bad_ranks", "calls", "first", "iteration", "layer", "spots", "tensor")

    def __init__(self, layer: str, tensor: str, iteration: int, action: Action) -> None:
        self.layer, self.tensor, self.iteration, self.action = layer, tensor, iteration, action
        self.calls: list[Sequence[Any]] = []
        self.spots: list[Spot] = []
        self.bad_ranks: list[int] = []
        self.first: tuple[int, Place] | None = None

    @property
    def ready(self) -> bool:
        """Whether :meth:`merged` does not wait for a device."""
        return all(not isinstance(call[0], LaterMoments) or call[0].ready for call in self.calls)

    def bad(self, layers: Layers) -> Bad | None:
        """Return the first call with NaN or Inf."""
        found: Bad | None = None
        for (first, *_), spot in zip(self.calls, self.spots, strict=True):
            moments = _resolve(first)
            if (moments.nans or moments.infs) and (found is None or spot[0] < found.number):
                found = layers.bad(self.layer, self.tensor, self.iteration, spot, moments)
        return found

    def merged(self) -> dict[str, Any]:
        """Return one record a source, none if there was no call that counts."""
        if not self.calls:
            return {}
        records = zip(*self.calls, strict=True)
        return {
            source.key: reduce(lambda a, b: a.merge(b), map(_resolve, records_of_it))
            for source, records_of_it in zip(self.action.sources, records, strict=True)
        }

    def records(self, merged: Mapping[str, Any]) -> Iterator[Record]:
        """Yield what is to be logged."""
        moments = merged[MOMENTS]
        nans, infs, ranks = int(moments.nans), int(moments.infs), tuple(self.bad_ranks)
        where: tuple[Any, ...] = ()
        if self.first is not None:
            order, place = self.first
            where = (order, place.partition, place.microbatch, place.phase)
        values = [(quantity.label, quantity.formula(merged[quantity.source])) for quantity in self.action.quantities]
        if not values:  # only NaN and Inf are looked for
            values = [(label, count) for label, count in (("nans", nans), ("infs", infs)) if count]
        for label, value in values:
            yield Record(self.layer, self.tensor, label, self.iteration, float(value), nans, infs, ranks, *where)


class Statistics(Mapping[str, Tensor]):
    """The statistics of one call, worked out when they are looked at; each is a 0-d float64 tensor.

    Example::

        >>> statistics = log_tensor_stats("fc1", tensor=x, tensor_name="activation")
        >>> statistics["mean"].item()
    """

    __slots__ = ("_action", "_records", "_values")

    def __init__(self, action: Action, records: Sequence[Any]) -> None:
        self._action, self._records = action, records
        self._values: dict[str, Tensor] | None = None

    def _all(self) -> dict[str, Tensor]:
        if self._values is None:
            found = dict(zip((s.key for s in self._action.sources), map(_resolve, self._records), strict=True))
            self._values = {
                q.label: torch.tensor(q.formula(found[q.source]), dtype=torch.float64, device="cpu")
                for q in self._action.quantities
            }
        return self._values

    def __getitem__(self, label: str) -> Tensor:
        return self._all()[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._action.quantities)

    def __repr__(self) -> str:
        return repr({label: value.item() for label, value in self._all().items()})


def _resolve(record: Any) -> Any:
    return record.moments() if isinstance(record, LaterMoments) else record
