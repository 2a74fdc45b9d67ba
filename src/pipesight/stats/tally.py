"""What has been measured of one tensor in one iteration, until its values are logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pipesight.stats.moments.quantity import MOMENTS
from pipesight.stats.moments.record import LaterMoments
from pipesight.stats.plan import Action
from pipesight.stats.sinks import Record

__all__ = ["Statistics", "Tally"]


class Tally:
    """Records of one tensor: of its micro-batches, or of several calls.

    Attributes:
        calls: A record a source for each call, in order of time; none if this rank's copy does not count.
        bad_ranks: Those with NaN or Inf, where ranks were merged.
    """

    __slots__ = ("action", "bad_ranks", "calls", "iteration", "layer", "tensor")

    def __init__(self, layer: str, tensor: str, iteration: int, action: Action) -> None:
        self.layer, self.tensor, self.iteration, self.action = layer, tensor, iteration, action
        self.calls: list[Sequence[Any]] = []
        self.bad_ranks: list[int] = []

    @property
    def ready(self) -> bool:
        """Whether :meth:`merged` does not wait for a device."""
        return all(not isinstance(call[0], LaterMoments) or call[0].ready for call in self.calls)

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
        for quantity in self.action.quantities:
            value = float(quantity.formula(merged[quantity.source]))
            yield Record(self.layer, self.tensor, quantity.label, self.iteration, value, nans, infs, ranks)


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
