"""Rows of moments on their way from a GPU: read back once a step, and handed out or merged by whose they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesight.stats.moments.cuda_launch import Table
from pipesight.stats.moments.moments import FIELDS, LaterMoments, Moments, merge_rows

__all__ = ["Batch", "Calls", "DeviceRow", "Readback", "RowOwner", "SentRows"]

_NANS, _INFS = FIELDS.index("nans"), FIELDS.index("infs")
_code = attrgetter("code")


class Readback:
    """Rows on their way from a device.

    Args:
        rows: Memory of the host that they are copied to.
        tables: Those that nobody reads any more when they have arrived, each after the list of free ones it goes to.
    """

    def __init__(self, rows: Tensor, tables: list[tuple[list[Table], list[Table]]]) -> None:
        self._rows, self._tables = rows, tables
        self._event = torch.cuda.Event()
        self._event.record()
        self._read: NDArray[np.float64] | None = None
        self._bad: frozenset[int] = frozenset()
        self._arrived = False

    def ready(self) -> bool:
        """Whether they are here."""
        if not self._arrived and self._event.query():
            self._arrive()
        return self._arrived

    def _arrive(self) -> None:
        self._arrived = True
        with contextlib.suppress(IndexError):  # another thread may have found it, too
            while True:
                free, used = self._tables.pop()
                free += used

    @property
    def rows(self) -> NDArray[np.float64]:
        """All rows; waits for them."""
        if self._read is None:
            self._event.synchronize()
            self._arrive()
            rows: NDArray[np.float64] = self._rows.numpy()
            self._bad = frozenset(np.flatnonzero((rows[:, _NANS] != 0) | (rows[:, _INFS] != 0)).tolist())
            self._read = rows
        return self._read

    def is_bad(self, index: int) -> bool:
        """Whether a tensor has NaN or Inf."""
        return bool(len(self.rows)) and index in self._bad

    def has_bad(self) -> bool:
        """Whether any tensor has NaN or Inf."""
        return bool(len(self.rows)) and bool(self._bad)


class DeviceRow(LaterMoments):
    """The moments of one tensor, on a device or on their way from it."""

    __slots__ = ("_at", "_block", "index", "readback")

    def __init__(self, block: Tensor | None, at: int, index: int) -> None:
        self._block = block
        self._at = at
        self.index = index
        self.readback: Readback | None = None

    @classmethod
    def of(cls, readback: Readback, index: int) -> DeviceRow:
        """Return a row on its way."""
        row = cls(None, 0, index)
        row.readback = readback
        return row

    @property
    def ready(self) -> bool:
        """Whether :meth:`moments` does not wait."""
        return self.readback is not None and self.readback.ready()

    @property
    def is_bad(self) -> bool:
        """Whether the tensor has NaN or Inf; waits for the device."""
        if self.readback is not None:
            return self.readback.is_bad(self.index)
        return self.moments().is_bad

    def row(self) -> list[float]:
        """Return the row; waits for it."""
        row: list[float]
        if self.readback is not None:
            row = self.readback.rows[self.index].tolist()
        else:
            assert self._block is not None
            row = self._block[self._at].tolist()
        return row

    def put(self, moments: Moments) -> None:
        """Write moments that were measured otherwise."""
        assert self._block is not None
        self._block[self._at].copy_(torch.tensor(moments.row(), dtype=torch.float64))

    def sent(self, readback: Readback, start: int) -> None:
        """The row is on its way, with others; those of its stream begin at ``start``."""
        self.index += start
        self.readback, self._block = readback, None


Calls: TypeAlias = list[tuple[Sequence[Any] | None, Any]]


class RowOwner(Protocol):
    """Gets the rows of one tensor.

    Attributes:
        calls: To it is added ``((row,), spot)``, or ``(None, spot)`` where the tensor changed before it was measured.
        code: A number that no other owner has whose tensors are measured on the device.
        powers: Whether the third and fourth moments are wanted.
        one_by_one: Whether it wants each row, not only what they merge to.
    """

    calls: Calls
    code: int
    powers: bool
    one_by_one: ClassVar[bool]


class Batch(NamedTuple):
    """Rows that one kernel wrote: the owners of each call, and their rows from the start on."""

    start: int
    rows: Sequence[int]
    owners: tuple[RowOwner, ...]
    spots: tuple[Any, ...]


class SentRows:
    """Rows of one step on their way from a device, and whose they are."""

    def __init__(self, readback: Readback, batches: list[Batch]) -> None:
        self._readback, self._batches = readback, batches

    def ready(self) -> bool:
        """Whether they are here."""
        return self._readback.ready()

    def has_bad(self) -> bool:
        """Whether any tensor has NaN or Inf; waits for the device."""
        return self._readback.has_bad()

    def hand_out(self, calls_of: Callable[[Any], Calls]) -> None:
        """Add the rows of each owner to its calls, one by one."""
        for start, rows, owners, spots in self._batches:
            for row, owner, spot in zip(rows, owners, spots, strict=True):
                calls_of(owner).append(((DeviceRow.of(self._readback, start + row),), spot))
        self._batches = []

    def merged(self) -> tuple[list[Any], NDArray[np.float64]]:
        """Return the owners whose rows were not handed out, by their codes, and for each the row of all its calls.

        Waits for the device.
        """
        each = [owner for batch in self._batches for owner in batch.owners]
        if not each:
            return [], np.empty((0, len(FIELDS)))
        codes = np.array(list(map(_code, each)))
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
        counts = np.diff(starts, append=len(codes))
        rows = self._readback.rows[np.concatenate([np.array(batch.rows) + batch.start for batch in self._batches])]
        rows = rows[order]
        merged = np.empty((len(starts), len(FIELDS)))
        for count in np.unique(counts):  # those with as many calls, at once
            alike = np.flatnonzero(counts == count)
            places = starts[alike][None, :] + np.arange(count)[:, None]
            merged[alike] = merge_rows(torch.from_numpy(rows[places])).numpy()
        return [each[place] for place in order[starts].tolist()], merged
