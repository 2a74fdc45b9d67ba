"""What was measured of one tensor in one iteration, and the statistics that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesight.stats.actions import Action
from pipesight.stats.moments.cuda_readback import Calls
from pipesight.stats.moments.moments import LaterMoments, Moments, merge_each
from pipesight.stats.moments.quantity import MOMENTS, Quantity
from pipesight.stats.nonfinite import Bad, Layers, Place, whole_spot
from pipesight.stats.sinks.record import Name, Records

__all__ = ["Statistics", "TensorMeasurements", "add_all", "add_rows", "merge_all"]


class TensorMeasurements:
    """Records of one tensor: of its micro-batches, or of several calls.

    Attributes:
        calls: A record a source for each call, and when and where it was, in order of time; none if this rank's copy
            does not count. Several threads may append.
        bad_ranks: Those with NaN or Inf, where ranks were merged; the first to have them first.
        first: The first call with NaN or Inf, and its place among the bad tensors of the iteration and its rank.
    """

    __slots__ = ("action", "bad_ranks", "calls", "first", "iteration", "layer", "tensor")

    def __init__(self, layer: str, tensor: str, iteration: int, action: Action) -> None:
        self.layer, self.tensor, self.iteration, self.action = layer, tensor, iteration, action
        self.calls: Calls = []
        self.bad_ranks: list[int] = []
        self.first: tuple[int, Place] | None = None

    @property
    def changed(self) -> bool:
        """Whether a tensor changed before it was measured."""
        return any(records is None for records, _ in self.calls)

    @property
    def is_plain(self) -> bool:
        """Whether formulas over moments are all that is to be logged: nothing was cast, nor was there NaN or Inf."""
        return len(self.action.sources) == 1 and self.first is None and bool(self.action.quantities)

    def bad(self, layers: Layers) -> Bad | None:
        """Return the first call with NaN or Inf."""
        found: Bad | None = None
        for records, when in self.calls:
            if not records or not records[0].is_bad:
                continue
            spot = whole_spot(when)
            if found is None or spot[0] < found.number:
                found = layers.bad(self.layer, self.tensor, self.iteration, spot, _resolve(records[0]))
        return found

    def add_to(self, records: Records, merged: Mapping[str, Any]) -> None:
        """Add what is to be logged."""
        moments = merged[MOMENTS]
        nans, infs = int(moments.nans), int(moments.infs)
        labels = self.action.labels
        values = [float(quantity.formula(merged[quantity.source])) for quantity in self.action.quantities]
        if not values:  # only NaN and Inf are looked for
            found = [(label, count) for label, count in (("nans", nans), ("infs", infs)) if count]
            labels, values = tuple(label for label, _ in found), [float(count) for _, count in found]
        extra: tuple[Any, ...] | None = None
        if nans or infs or self.bad_ranks or self.first is not None:
            extra = nans, infs, tuple(self.bad_ranks)
            if self.first is not None:
                order, place = self.first
                extra += order, place.partition, place.microbatch, place.phase
        records.add(_names(self.layer, self.tensor, labels), values, extra)


@lru_cache(maxsize=1 << 16)
def _names(layer: str, tensor: str, labels: tuple[str, ...]) -> tuple[Name, ...]:
    """Return the names of the values of a tensor; the same ones again, which are quick to compare."""
    return tuple((layer, tensor, label) for label in labels)


class Named(Protocol):
    """A tensor with what is done with it."""

    @property
    def layer(self) -> str: ...
    @property
    def tensor(self) -> str: ...
    @property
    def action(self) -> Action: ...


class Logged(NamedTuple):
    """A tensor with what is done with it, the same in each step."""

    layer: str
    tensor: str
    action: Action


Formula: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def add_rows(records: Records, tensors: Sequence[Named], rows: NDArray[np.float64]) -> None:
    """Add what is to be logged of tensors that have neither NaN nor Inf, given their moments, a row each."""
    for formulas, members, names in _alike(tuple(tensors)):
        values = np.stack([of_rows(rows[members]) for of_rows in formulas], 1)
        records.add(names, values.ravel().tolist())


@lru_cache(maxsize=16)  # steps repeat themselves
def _alike(tensors: tuple[Named, ...]) -> list[tuple[list[Formula], list[int], list[Name]]]:
    """Return the tensors of which the same is logged, by their places, with the names of all values."""
    alike: dict[tuple[Quantity, ...], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault(tensor.action.quantities, []).append(i)
    found = []
    for quantities, members in alike.items():
        formulas = [quantity.formulas for quantity in quantities if quantity.formulas is not None]
        labels = [quantity.label for quantity in quantities]
        names = [(tensors[i].layer, tensors[i].tensor, label) for i in members for label in labels]
        if formulas:
            found.append((formulas, members, names))
    return found


def add_all(entries: Iterable[TensorMeasurements]) -> list[Records]:
    """Return what is to be logged of entries that are not merged over ranks, an iteration each."""
    found: dict[int, list[TensorMeasurements]] = {}
    for entry in entries:
        if entry.calls:
            found.setdefault(entry.iteration, []).append(entry)
    all_records = []
    for iteration, members in found.items():
        records = Records(iteration)
        plain = [entry for entry in members if entry.is_plain]
        add_rows(records, [Logged(entry.layer, entry.tensor, entry.action) for entry in plain], _moments(plain))
        others = [entry for entry in members if not entry.is_plain]
        for entry, merged in zip(others, merge_all(others), strict=True):
            entry.add_to(records, merged)
        all_records.append(records)
    return all_records


def merge_all(entries: Sequence[TensorMeasurements]) -> list[dict[str, Any]]:
    """Return one record a source for each entry, none for one without a call that counts."""
    merged: list[dict[str, Any]] = [{} for _ in entries]
    for entry, result, row in zip(entries, merged, _moments(entries).tolist(), strict=True):
        if not entry.calls:
            continue
        result[MOMENTS] = Moments.from_row(row)
        records_of = zip(*(records[1:] for records, _ in entry.calls if records), strict=True)
        for source, records in zip(entry.action.sources[1:], records_of, strict=False):
            result[source.key] = reduce(lambda a, b: a.merge(b), records)
    return merged


def _moments(entries: Sequence[TensorMeasurements]) -> NDArray[np.float64]:
    """Merge the moments of the calls of each entry: they are the first of its records."""
    return merge_each([[records[0].row() for records, _ in entry.calls if records] for entry in entries])


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
