"""Merge what several ranks have measured: which process groups there are, and the merge itself."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, get_args

import torch.distributed as dist

from pipesight.context import Phase
from pipesight.stats.config import Config
from pipesight.stats.measurements import TensorMeasurements, merge_all
from pipesight.stats.moments import FIELDS, Moments
from pipesight.stats.moments.moments import merge_each
from pipesight.stats.moments.quantity import MOMENTS, Source
from pipesight.stats.nonfinite import Place
from pipesight.stats.rank_exchange import RankExchange

__all__ = ["RankMerging"]

Rows = list[list[float]]

PLACE = "place"  # beside the keys of sources
PHASES = get_args(Phase)
_NONFINITE = [FIELDS.index(name) for name in ("nans", "infs")]


class RankMerging:
    """The process groups that statistics are merged over.

    The ``config`` decides at which iterations there is anything to merge; all ranks must have the same one.
    """

    def __init__(self, config: Config, *, timeout: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self._of_layers: dict[str, dist.ProcessGroup | None] = {}
        self._homes: dict[str | None, dist.ProcessGroup] = {}  # of watched layers, and of all others
        self.once = False
        """Whether, of the ranks that have a value, only the first gets it."""
        self._timeout = timeout
        self._exchanges: dict[dist.ProcessGroup, RankExchange] = {}
        self._apart = False  # some call went without the default group
        self._together = False  # some call went with it
        self._steps = {
            rule.steps
            for section in config.sections
            for feature in section.features
            if section.enabled and feature.enabled
            for rule in feature.rules()
        }

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group that the user has set; None for all ranks."""
        return self._group

    def set_group(self, group: dist.ProcessGroup | None, layer: str | None = None) -> None:
        """Merge over a group, for all layers or one; ``ValueError`` if this rank is not in it."""
        if group is not None and _initialized():
            _check_member(group)
        if layer is None:
            self._group = group
        else:
            self._of_layers[layer] = group

    def set_as(self, other: RankMerging) -> None:
        """Merge over the groups that were set there."""
        self._group = other._group
        self._of_layers.update(other._of_layers)

    def adopt(self, group: dist.ProcessGroup, layers: Iterable[str]) -> None:
        """Merge these layers over a group, and all others too if it is the first; groups that were set go first.

        All ranks of the group must do that, and take part from now on, whatever they measure.
        """
        self._homes.setdefault(None, group)
        self._homes.update(dict.fromkeys(layers, group))

    def group_for(
        self, given: dist.ProcessGroup | None, layer: str | None = None, *, skip: bool = False
    ) -> dist.ProcessGroup | None:
        """Return the group that a call merges over; ``None`` where there is one rank.

        Raises:
            ValueError: This rank is not in it.
        """
        if not _initialized():
            return None
        if skip:
            self._apart = True
            return None
        if given is None and self._of_layers:
            given = self._of_layers.get(layer or "")
        if given is None and self._group is None and self._homes:
            return self._enter(self._homes.get(layer, self._homes[None]))
        if given is None:
            self._together = True
        else:
            self._apart = True
        return self._enter(self._group if given is None else given)

    def _enter(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        group = dist.group.WORLD if group is None else group
        assert group is not None
        if group not in self._exchanges:
            _check_member(group)
            self._exchanges[group] = RankExchange(group, timeout=self._timeout)
        return group if len(self._exchanges[group].ranks) > 1 else None

    def groups(self, iteration: int) -> list[dist.ProcessGroup]:
        """Return the groups that exchange at the end of an iteration, in the same order on all ranks.

        A rank takes part whether it has measured anything or not: others may have. Only one whose calls all went
        elsewhere, or skipped the reduction, stays out of the exchange over the default group.
        """
        if not _initialized():
            self._exchanges.clear()
            return []
        if not any(steps.includes(iteration) for steps in self._steps):
            return []
        if self._group is None and self._homes:
            for home in self._homes.values():
                self._enter(home)
        elif self._together or not self._apart:
            self._enter(self._group)
        several = [exchange for exchange in self._exchanges.values() if len(exchange.ranks) > 1]
        return [e.group for e in sorted(several, key=lambda exchange: (exchange.ranks, exchange.group.group_name))]

    def close(self) -> None:
        """Let go of the groups."""
        self._group = None
        self._of_layers.clear()
        self._homes.clear()
        self._exchanges.clear()

    def merge(
        self, entries: list[TensorMeasurements], group: dist.ProcessGroup, iteration: int
    ) -> list[dict[str, Any]]:
        """Exchange with the other ranks, and return one record a source for each entry; none if nobody has one.

        Entries are told which ranks have NaN or Inf.

        Raises:
            MissingRankError: A rank did not come.
        """
        wanted: dict[str, tuple[int, Source]] = {}
        mine: dict[str, list[float]] = {}
        places: dict[str, tuple[TensorMeasurements, list[tuple[int, list[float]]]]] = {}
        for i, (entry, merged) in enumerate(zip(entries, merge_all(entries), strict=True)):
            labels = ",".join(quantity.label for quantity in entry.action.quantities)
            for source in entry.action.sources:
                name = "\0".join((entry.layer, entry.tensor, labels, source.key))
                wanted[name] = (i, source)
                if source.key in merged:
                    mine[name] = list(merged[source.key].row())
            name = "\0".join((entry.layer, entry.tensor, labels, PLACE))
            places[name] = (entry, [])
            if entry.first is not None:
                mine[name] = _numbers(*entry.first)
        everyone = self._exchanges[group].all(list(mine), list(mine.values()), iteration=iteration)
        rows: dict[str, Rows] = {name: [] for name in wanted}
        ranks = self._exchanges[group].ranks
        for rank, (their_names, their_rows) in zip(ranks, everyone, strict=True):
            for name, row in zip(their_names, their_rows, strict=True):
                if name in places:
                    places[name][1].append((rank, row))
                if name not in rows:
                    continue
                if self.once and not rows[name] and rank != dist.get_rank():
                    del rows[name], wanted[name]  # it is theirs
                    continue
                rows[name].append(row)
                i, source = wanted[name]
                if source.key == MOMENTS and any(row[place] for place in _NONFINITE):
                    entries[i].bad_ranks.append(rank)
        for entry, of_ranks in places.values():
            if of_ranks:
                _take_first(entry, of_ranks)
        results: list[dict[str, Any]] = [{} for _ in entries]
        of_moments = [name for name, (_, source) in wanted.items() if source.key == MOMENTS and rows[name]]
        merged_rows = merge_each([rows[name] for name in of_moments]).tolist()
        for name, row in zip(of_moments, merged_rows, strict=True):
            results[wanted[name][0]][MOMENTS] = Moments.from_row(row)
        for name, (i, source) in wanted.items():
            if source.key != MOMENTS and rows[name]:
                results[i][source.key] = reduce(lambda a, b: a.merge(b), map(source.from_row, rows[name]))
        return results


def _numbers(order: int, place: Place) -> list[float]:
    """Return what is sent of where a tensor was first bad."""
    phase = -1 if place.phase is None else PHASES.index(place.phase)
    return [order, *(-1 if number is None else number for number in (place.partition, place.microbatch)), phase]


def _take_first(entry: TensorMeasurements, of_ranks: list[tuple[int, list[float]]]) -> None:
    """Take the place from the rank whose micro-batch was first, of those that have NaN or Inf in a tensor."""
    rank, row = min(of_ranks, key=lambda of_rank: (of_rank[1][2], of_rank[0]))
    order, *numbers = map(int, row)
    partition, microbatch, phase = (None if number < 0 else number for number in numbers)
    word = None if phase is None else PHASES[phase]
    entry.first = order, Place(entry.layer, entry.tensor, entry.iteration, partition, microbatch, word)
    entry.bad_ranks.sort(key=lambda bad: (bad != rank, bad))


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_member(group: Any) -> None:
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(
            f"the reduction group must contain this rank (rank: {dist.get_rank()}); pass the group that this rank is in"
        )
