"""What was measured in the iteration under way, until that ends: then it is merged and logged.

keep --> Tally per (layer, tensor, group)
              |  end of the iteration
              v
    merged over calls, then over ranks --> sinks
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight.stats.merging import Merging
from pipesight.stats.messages import MessageLog
from pipesight.stats.moments.device import DeviceRows
from pipesight.stats.moments.quantity import MOMENTS, Source
from pipesight.stats.moments.record import LaterMoments
from pipesight.stats.moments.small import SmallRows
from pipesight.stats.nonfinite import Watchman
from pipesight.stats.plan import Action
from pipesight.stats.sinks import Record, Sinks
from pipesight.stats.tally import Tally

__all__ = ["Pending"]

UNREAD = 4  # iterations whose values may be on their way from a device

Key = tuple[str, str, dist.ProcessGroup | None, Action]


class Pending:
    """The tallies of one iteration. Threads may add to them at once.

    Attributes:
        iteration: The one under way; None if nothing has come since the last one ended.
    """

    def __init__(self, merging: Merging, sinks: Sinks, messages: MessageLog, watchman: Watchman) -> None:
        self.iteration: int | None = None
        self._merging, self._sinks, self._messages, self._watchman = merging, sinks, messages, watchman
        self._lock = threading.RLock()
        self._tallies: dict[Key, Tally] = {}
        self._unread: deque[list[Tally]] = deque()
        self._devices: dict[torch.device, DeviceRows] = {}
        self._small = SmallRows()
        self._told: set[tuple[str, str]] = set()

    def turn_to(self, iteration: int) -> None:
        """Begin an iteration, if it is not the one under way: some loops pass iterations and never call ``step``."""
        with self._lock:
            if iteration != self.iteration:
                if self.iteration is not None:
                    self.end(self.iteration)
                self.iteration = iteration

    def keep(
        self,
        layer: str,
        tensor: str,
        iteration: int,
        action: Action,
        group: dist.ProcessGroup | None,
        records: Sequence[Any] | None,
    ) -> None:
        """Add what was measured in a call; ``None`` if other ranks of the group measure the same elements."""
        key = (layer, tensor, group, action)
        with self._lock:
            if iteration != self.iteration:
                self.turn_to(iteration)
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = Tally(layer, tensor, iteration, action)
            if records is not None:
                tally.calls.append(records)

    def rows(self, device: torch.device) -> DeviceRows:
        """Return where tensors of a device are measured."""
        rows = self._devices.get(device)
        if rows is None:
            with self._lock:
                rows = self._devices.setdefault(device, DeviceRows(device))
        return rows

    def small(self, tensor: Tensor, source: Source) -> LaterMoments | None:
        """Put a small tensor aside, to be measured with others; None if it is not small."""
        return self._small.add(tensor, powers=source.powers, smallest=source.smallest)

    def end(self, iteration: int) -> None:
        """End the iteration under way, or this one if there is none: merge and log.

        Raises:
            MissingRankError: A rank did not come to merge.
        """
        with self._lock:
            iteration = iteration if self.iteration is None else self.iteration
            tallies = self._begin_anew()
            groups = self._merging.groups(iteration)
            alone = [tally for (*_, group, _), tally in tallies.items() if group not in groups]
            unmerged = sum(key[2] is not None for key in tallies) - (len(tallies) - len(alone))
            if unmerged:
                self._tell_once(
                    ("", ""),
                    f"{unmerged} tensors of iteration {iteration} were logged without the other ranks: no rule of the "
                    "configuration includes that iteration, or the process group is gone",
                )
            if not groups:
                if alone:
                    self._unread.append(alone)
                self._write_read(wait=len(self._unread) > UNREAD)
                return
            self._write_read(wait=True)
            self._write(alone)
            for group in groups:
                members = [tally for (*_, of, _), tally in tallies.items() if of is group]
                self._look(members)
                self._log(members, self._merging.merge(members, group, iteration))

    def flush(self) -> None:
        """Log what was measured so far, and wait for it."""
        with self._lock:
            if self.iteration is not None:
                self.end(self.iteration)
            self._write_read(wait=True)

    def flush_alone(self) -> None:
        """Log what needs no other rank: they may be gone."""
        with self._lock:
            tallies = self._begin_anew()
            lost = sum(key[2] is not None for key in tallies)
            if lost:
                self._messages.warning(
                    f"the statistics of {lost} tensors were not merged over ranks and are lost; "
                    "call end_debug() on every rank before the process ends"
                )
            self._write_read(wait=True)
            self._write([tally for key, tally in tallies.items() if key[2] is None])

    def _begin_anew(self) -> dict[Key, Tally]:
        tallies, self._tallies, self.iteration = self._tallies, {}, None
        for rows in self._devices.values():
            rows.send()
        self._small.measure_all()
        return tallies

    def _write_read(self, *, wait: bool) -> None:
        """Log the iterations whose values have come, in order."""
        while self._unread and (wait or all(tally.ready for tally in self._unread[0])):
            self._write(self._unread.popleft())

    def _write(self, tallies: list[Tally]) -> None:
        self._look(tallies)
        self._log(tallies, [tally.merged() for tally in tallies])

    def _look(self, tallies: Iterable[Tally]) -> None:
        """Look for NaN and Inf in what has come from a device."""
        for tally in tallies:
            for first, *_ in tally.calls:
                if isinstance(first, LaterMoments) and first.place is not None:
                    self._watchman.look(first.moments(), first.place, ("warn",), None)

    def _log(self, tallies: Iterable[Tally], merged: Iterable[dict[str, Any]]) -> None:
        records: list[Record] = []
        for tally, of_it in zip(tallies, merged, strict=True):
            moments = of_it.get(MOMENTS)
            if moments is None:
                continue
            if moments.nans or moments.infs:
                self._tell_once(
                    (tally.layer, tally.tensor),
                    f"{tally.tensor!r} of layer {tally.layer!r} has {moments.nans:.0f} NaN and {moments.infs:.0f} Inf "
                    f"(iteration {tally.iteration}{_on(tally.bad_ranks)}); its other statistics are of the finite "
                    "elements",
                )
            records += tally.records(of_it)
        self._sinks.write(records)

    def _tell_once(self, subject: tuple[str, str], message: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._messages.warning(message)


def _on(ranks: list[int]) -> str:
    return f", on rank {', '.join(map(str, ranks))}" if ranks else ""
