"""What was measured in the current iteration. When that ends, it is merged and logged.

keep --> TensorMeasurements per (layer, tensor, group)
              |  end of the iteration
              v
    merged over calls, then over ranks --> sinks
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight import context
from pipesight.stats.actions import Action
from pipesight.stats.measurements import TensorMeasurements, add_all, add_rows
from pipesight.stats.message_log import MessageLog
from pipesight.stats.moments.cuda_moments import DeviceRows
from pipesight.stats.moments.cuda_readback import Calls, SentRows
from pipesight.stats.moments.moments import LaterMoments
from pipesight.stats.moments.quantity import MOMENTS, Source
from pipesight.stats.moments.small_tensor_buffer import SmallRows
from pipesight.stats.nonfinite import EARLY, Bad, Layers, Spot, in_order
from pipesight.stats.nonfinite_reporter import NonfiniteReporter
from pipesight.stats.rank_merging import RankMerging
from pipesight.stats.sinks import Records, Sinks
from pipesight.stats.watched_tensor import Series, Take, Tap

__all__ = ["IterationBuffer"]

UNREAD = 4  # iterations whose values may be on their way from a device

Key = tuple[str, str, dist.ProcessGroup | None, Action]


class IterationBuffer:
    """The measurements of one iteration, by layer, tensor and group. Thread-safe.

    Attributes:
        iteration: The current one; ``None`` if nothing was measured since the last one ended.
        entries: What was measured in it. Each iteration has a dict of its own.
        layers: The layers of the watched models.
        numbers: Count the tensors.
        devices: Where tensors of each GPU are measured.
        at_once: Layers and tensors that change in place, so that they cannot wait to be measured with others.
    """

    def __init__(self, merging: RankMerging, sinks: Sinks, messages: MessageLog, reporter: NonfiniteReporter) -> None:
        self.iteration: int | None = None
        self.layers = Layers()
        self.at_once: set[tuple[str, str]] = set()
        self.numbers = itertools.count()
        self._standing: dict[Tap, Take] = {}  # of which nothing remains to be looked up, in iterations that log them
        self._begun = 0  # the iteration that takes those
        self._merging, self._sinks, self._messages, self._reporter = merging, sinks, messages, reporter
        self._lock = threading.RLock()
        self.entries: dict[Key, TensorMeasurements] = {}
        self._unread: deque[tuple[int, dict[Key, TensorMeasurements], list[SentRows]]] = deque()
        self.devices: dict[int, DeviceRows] = {}
        self._small = SmallRows()
        self._told_of_ranks = False

    def turn_to(self, iteration: int) -> None:
        """Begin an iteration, if it is not the one under way: some loops pass iterations and never call ``step``."""
        with self._lock:
            self._turn_to_begun()
            if iteration != self.iteration:
                if self.iteration is not None:
                    self.end(self.iteration)
                self.iteration = iteration

    def _turn_to_begun(self) -> None:
        """Be at the iteration that tensors were measured in of which nothing had to be looked up, if there are any."""
        if self.iteration is None and self._standing:
            alone = any(tap.series.calls for tap in self._standing if tap.series is not None)
            if alone or not all(rows.is_empty for rows in self.devices.values()):
                self.iteration = self._begun

    def spot(self, *, early: bool = False) -> Spot:
        """Return when and where the calling thread is; early for a weight that the step has yet to change."""
        where, number = context.current(), next(self.numbers)
        if where is None:
            return number - EARLY if early else number, None, None, None
        return number, where.partition, where.microbatch, where.phase

    def keep(
        self,
        layer: str,
        tensor: str,
        iteration: int,
        action: Action,
        group: dist.ProcessGroup | None,
        records: Sequence[Any] | None,
        spot: Spot,
    ) -> None:
        """Add what was measured in a call; ``None`` if other ranks of the group measure the same elements."""
        entry = self.entry(layer, tensor, iteration, action, group)
        if records is not None:
            entry.calls.append((records, spot))

    def entry(
        self, layer: str, tensor: str, iteration: int, action: Action, group: dist.ProcessGroup | None
    ) -> TensorMeasurements:
        """Return where the calls of a tensor are kept until the iteration ends."""
        key = (layer, tensor, group, action)
        with self._lock:
            if iteration != self.iteration:
                self.turn_to(iteration)
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = TensorMeasurements(layer, tensor, iteration, action)
            return entry

    def look(self, bad: Bad, actions: Collection[str], tensor: Tensor) -> None:
        """Have a tensor with NaN or Inf dumped, or raise, as the actions say.

        Raises:
            NonfiniteError: The actions include ``"raise"``.
        """
        with self._lock:
            for device, rows in self.devices.items():
                rows.hand_out()
                torch.cuda.synchronize(device)  # others may have been measured on other streams
            self._collect()
            known = [found for entry in self.entries.values() if (found := entry.bad(self.layers)) is not None]
            first = in_order([*known, bad], self.layers)[0]
        self._reporter.look(bad, first, actions, tensor)

    def rows(self, device: int) -> DeviceRows:
        """Return where tensors of a GPU are measured."""
        rows = self.devices.get(device)
        if rows is None:
            with self._lock:
                rows = self.devices.setdefault(device, DeviceRows(torch.device("cuda", device), self.numbers))
        return rows

    def small(self, tensor: Tensor, source: Source) -> LaterMoments | None:
        """Put a small tensor aside, to be measured with others; None if it is not small."""
        return self._small.add(tensor, powers=source.powers, smallest=source.smallest, magnitudes=source.magnitudes)

    def end(self, iteration: int) -> None:
        """End the iteration under way, or this one if there is none: merge and log.

        Raises:
            MissingRankError: A rank did not come to merge.
        """
        with self._lock:
            self._reporter.speak()
            self._turn_to_begun()
            iteration = iteration if self.iteration is None else self.iteration
            entries, sent = self._begin_anew()
            begun = self._begun if self._standing else iteration
            groups = self._merging.groups(iteration)
            alone = {key: entry for key, entry in entries.items() if key[2] not in groups}
            unmerged = sum(key[2] is not None for key in entries) - (len(entries) - len(alone))
            if unmerged and not self._told_of_ranks:
                self._told_of_ranks = True
                self._messages.warning(
                    f"{unmerged} tensors of iteration {iteration} were logged without the other ranks: no rule of the "
                    "configuration includes that iteration, or the process group is gone"
                )
            if not groups:
                if alone or sent:
                    self._unread.append((begun, alone, sent))
                self._write_read(wait=len(self._unread) > UNREAD)
                return
            self._write_read(wait=True)
            _hand_out(sent, begun, entries)
            alone = {key: entry for key, entry in entries.items() if key[2] not in groups}
            found = self._look(entries.values())
            self._log(alone.values())
            for group in groups:
                members = [entry for (*_, of, _), entry in entries.items() if of is group]
                records = Records(iteration)
                for entry, merged in zip(members, self._merging.merge(members, group, iteration), strict=True):
                    if MOMENTS in merged:
                        entry.add_to(records, merged)
                self._sinks.write(records)
            if entries:
                self._reporter.end(iteration, found)

    def flush(self) -> None:
        """Log what was measured so far, and wait for it."""
        with self._lock:
            self._turn_to_begun()
            if self.iteration is not None:
                self.end(self.iteration)
            self._write_read(wait=True)

    def read(self) -> None:
        """Log the iterations that have ended, and wait for their values."""
        with self._lock:
            self._write_read(wait=True)

    def flush_alone(self) -> None:
        """Log what needs no other rank: they may be gone."""
        with self._lock:
            entries, sent = self._begin_anew()
            _hand_out(sent, self._begun, entries)
            lost = sum(key[2] is not None for key in entries)
            if lost:
                self._messages.warning(
                    f"the statistics of {lost} tensors were not merged over ranks and are lost; "
                    "call end_debug() on every rank before the process ends"
                )
            self._write_read(wait=True)
            found = self._look(entries.values())  # what is bad is logged even if other ranks may have more of it
            rest = [entry for key, entry in entries.items() if key[2] is None or entry.first is not None]
            self._log(rest)
            if entries:
                self._reporter.end(next(iter(entries.values())).iteration, found)

    def prepare_anew(self) -> None:
        """Have everything looked up again for each tensor, its iteration too."""
        with self._lock:
            for rows in self.devices.values():
                rows.hand_out()
            self._collect()
            for tap in self._standing:
                tap.take = tap.entries = None
            self._standing.clear()

    def series(self, tap: Tap) -> Series:
        """Return what a tensor is in all iterations that do the same with it."""
        assert tap.action is not None
        with self._lock:
            if tap.series is None or tap.series.action is not tap.action:
                tap.series = Series(tap.layer, tap.tensor, tap.action)
            return tap.series

    def stand(self, tap: Tap, take: Take) -> Series:
        """Have a tensor taken as it comes from now on, in all iterations that do the same with it."""
        with self._lock:
            series = self.series(tap)
            tap.take = self._standing[tap] = take
            self._begun = tap.step
            return series

    def begin(self, iteration: int) -> None:
        """Look up what an iteration does with the tensors that are taken as they come: for all, before the first."""
        with self._lock:
            self._begun = iteration
            for tap, take in self._standing.items():
                actions, series = tap.actions, tap.series
                same = actions is not None and series is not None and actions.at(iteration) is series.action
                tap.take = take if same else None

    def _collect(self) -> None:
        """Keep what was measured alone of tensors that are taken as they come."""
        for tap in self._standing:
            if (series := tap.series) is not None and series.calls:
                calls = _calls_of(series, self._begun, self.entries)
                count = len(series.calls)
                calls += series.calls[:count]
                del series.calls[:count]  # other threads may have added more

    def _begin_anew(self) -> tuple[dict[Key, TensorMeasurements], list[SentRows]]:
        sent = [on_its_way for rows in self.devices.values() if (on_its_way := rows.send()) is not None]
        self._small.measure_all()
        self._collect()
        entries, self.entries, self.iteration = self.entries, {}, None
        changed = [key for key, entry in entries.items() if entry.changed] if self.devices else []
        if changed:
            _hand_out(sent, self._begun, entries)
            changed = [key for key, entry in entries.items() if entry.changed]
        for key in changed:
            entry = entries.pop(key)
            self.at_once.add((entry.layer, entry.tensor))
            for tap in [tap for tap in self._standing if (tap.layer, tap.tensor) == (entry.layer, entry.tensor)]:
                del self._standing[tap]
                tap.take = tap.series = tap.entries = None
            self._messages.warning(
                f"{entry.tensor!r} of layer {entry.layer!r} is not logged in iteration {entry.iteration}: it was "
                "changed in place before it was measured; from now on it is measured at once"
            )
        return entries, sent

    def measure_waiting(self, *, here: bool) -> None:
        """Measure the tensors that wait for others, before they can change: on the current stream, or on all."""
        for rows in self.devices.values():
            (rows.flush_here if here else rows.flush)()

    def _write_read(self, *, wait: bool) -> None:
        """Log the iterations whose values have come, in order."""
        while self._unread and (wait or all(rows.ready() for rows in self._unread[0][2])):
            self._write(*self._unread.popleft())

    def _write(self, iteration: int, entries: dict[Key, TensorMeasurements], sent: list[SentRows]) -> None:
        if any(rows.has_bad() for rows in sent):
            _hand_out(sent, iteration, entries)
        merged = [rows.merged() for rows in sent]
        known = {key[3] for key, entry in entries.items() if entry.calls} if merged else set()
        if known and any(series.action in known for all_series, _ in merged for series in all_series):
            _hand_out(sent, iteration, entries)  # some calls of a tensor were measured alone
            merged = []
        found = self._look(entries.values())
        records = Records(iteration)
        for all_series, of_them in merged:
            add_rows(records, all_series, of_them)
        self._sinks.write(records)
        self._log(entries.values())
        self._reporter.end(iteration, found)

    def _look(self, entries: Iterable[TensorMeasurements]) -> list[Bad]:
        """Return the tensors with NaN or Inf, in the order of computation, and let their entries know their place."""
        bad_entries = [(bad, entry) for entry in entries if (bad := entry.bad(self.layers)) is not None]
        if not bad_entries:
            return []
        found = in_order([bad for bad, _ in bad_entries], self.layers)
        orders = {id(bad): order for order, bad in enumerate(found)}
        for bad, entry in bad_entries:
            entry.first = orders[id(bad)], bad.place
        return found

    def _log(self, entries: Iterable[TensorMeasurements]) -> None:
        for records in add_all(entries):
            self._sinks.write(records)


def _calls_of(series: Series, iteration: int, entries: dict[Key, TensorMeasurements]) -> Calls:
    """Return the calls of a tensor among entries."""
    key = (series.layer, series.tensor, None, series.action)
    entry = entries.get(key)
    if entry is None:
        entry = entries[key] = TensorMeasurements(series.layer, series.tensor, iteration, series.action)
    return entry.calls


def _hand_out(sent: Iterable[SentRows], iteration: int, entries: dict[Key, TensorMeasurements]) -> None:
    """Add rows to the calls of their tensors, one by one."""
    for rows in sent:
        rows.hand_out(lambda series: _calls_of(series, iteration, entries))
