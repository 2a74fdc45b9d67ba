"""What the losses of micro-batches are means over, known before they are computed: what of the targets is not ignored.

Plans tell it for the values that they were made for. Later batches have others, for which a plan of their own would be
slow to make; so the argument is looked for whose values explain the counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesight._torch.loss_graph import LossPart
from pipesight.distributed.model_plan import Plan
from pipesight.pipeline.calls import SplitCall
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.loss_merging import plain_numbers, weigh_means

__all__ = ["TargetCounts", "Weighing", "weighed_apart"]


@dataclass(slots=True)
class Weighing:
    """How the losses of the micro-batches of one replica make up that of the batch."""

    weights: Sequence[float]
    """What each counts."""
    sums: bool = False
    """Whether they are added."""
    counts: Sequence[Sequence[float]] = ()
    """How many targets each of the means that a loss adds has in each micro-batch, if that is known."""
    apart: bool = False
    """Whether each of these means is weighed by its own, as one weight does not fit all."""

    @classmethod
    def by_counts(cls, counts: Sequence[Sequence[float]], sizes: Sequence[float], replicas: int) -> Weighing:
        """Return how to weigh means over so many targets, given the samples of micro-batches."""
        if not counts:
            return cls(sizes)
        if len(counts) == 1 or (replicas == 1 and all(_in_proportion(mine, counts[0]) for mine in counts)):
            return cls(counts[0], counts=counts)
        return cls(sizes, counts=counts, apart=True)

    @property
    def totals(self) -> list[float]:
        """What the batch of this replica counts, and its targets for each mean, for others to add."""
        return [sum(self.weights), *map(sum, self.counts)]

    def factors(self, totals: Sequence[float]) -> list[list[tuple[float, float]]]:
        """Return the targets of each mean, and what it is multiplied by before its loss is weighed; by micro-batch.

        ``totals`` are those of all replicas.
        """
        if not self.apart:
            return []
        samples, *targets = totals
        shares = [
            [count / total if total else 1.0 for count in mine]
            for mine, total in zip(self.counts, targets, strict=True)
        ]
        return [
            [(mine[i], share[i] * samples / weight) for mine, share in zip(self.counts, shares, strict=True)]
            for i, weight in enumerate(self.weights)
        ]


def weighed_apart(parts: Sequence[LossPart], factors: Sequence[tuple[float, float]]) -> Tensor | None:
    """Weigh each mean that a loss adds by its own targets; return what the loss is then.

    ``None`` if it is made of something else than was found out before.
    """
    if len(parts) != len(factors) or len({id(part.node) for part in parts}) < len(parts):
        return None
    (found,) = plain_numbers([parts])
    if any(part.kind != "mean" or part.node is None for part in found):
        return None
    if any(not math.isclose(part.count, count) for part, (count, _) in zip(found, factors, strict=True)):
        return None
    return weigh_means(found, [factor for _, factor in factors])


def _in_proportion(one: Sequence[float], other: Sequence[float]) -> bool:
    if bool(sum(one)) is not bool(sum(other)):
        return False
    return all(math.isclose(a * sum(other), b * sum(one), rel_tol=1e-9) for a, b in zip(one, other, strict=True))


class TargetCounts:
    """Counts the targets of micro-batches; of a pipeline with ``replicas``, whose batches may have others."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._explained: list[_Targets] = []
        self._even: dict[int, tuple[Plan, list[float]]] = {}  # by id of the plan: the counts where nothing is ignored

    def find(self, split: SplitCall, plans: Sequence[Plan], anew: Callable[[], list[Plan]]) -> list[list[float]]:
        """Return how many targets each mean that losses add has in each micro-batch.

        Nothing if that is not known, or if samples count as much. ``anew`` makes plans for the values of this call.
        """
        ignored = {value for plan in plans for _, value in plan.means}
        values = {value for value in ignored if value is not None}
        if not ignored:
            return []
        if None in ignored or _holds(split.calls, values):
            counts = [targets.counts(split) for targets in self._explained]
            if len(counts) == len(plans[0].means) and None not in counts:
                return [mine for mine in counts if mine is not None]
            columns = _columns(anew())
            found = [_Targets.find(split, column, values) for column in columns]
            self._explained = [targets for targets in found if targets is not None] if None not in found else []
            return columns
        if self._replicas == 1:
            return []  # every sample has as many targets as any other
        if any(id(plan) not in self._even for plan in plans):
            self._even = {
                id(plan): (plan, [count for count, _ in now.means]) for plan, now in zip(plans, anew(), strict=True)
            }
        rows = [self._even[id(plan)][1] for plan in plans]
        return _transposed(rows)


@dataclass(frozen=True, slots=True)
class _Targets:
    """The argument whose values say what a loss is a mean over."""

    name: str
    shifted: bool
    """Whether the first of each sample is not predicted, as in causal language models."""
    ignored: int

    @classmethod
    def find(cls, split: SplitCall, counts: list[float], ignored: set[int]) -> _Targets | None:
        """Return the argument that explains the counts of all micro-batches, if there is just one."""
        names = [name for name, value in split.arguments[0].items() if _is_integer(value)]
        ways = [cls(name, shifted, value) for name in names for shifted in (False, True) for value in ignored]
        fitting = [way for way in ways if way.counts(split) == counts]
        return fitting[0] if len(fitting) == 1 else None

    def counts(self, split: SplitCall) -> list[float] | None:
        """Return how many targets each micro-batch has; ``None`` if the argument is not there."""
        found = [arguments.get(self.name) for arguments in split.arguments]
        if not all(map(_is_integer, found)):
            return None
        kept = [t[..., 1:] if self.shifted else t for t in found if t is not None]
        return torch.stack([(t != self.ignored).sum() for t in kept]).double().tolist()


def _columns(plans: Sequence[Plan]) -> list[list[float]]:
    return _transposed([[count for count, _ in plan.means] for plan in plans])


def _transposed(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the counts of each mean; nothing if micro-batches have other means."""
    return [list(column) for column in zip(*rows, strict=True)] if len(set(map(len, rows))) == 1 else []


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() > 0


def _holds(calls: Any, values: set[int]) -> bool:
    integers = [t for t in flatten(calls).tensors if t.dtype in (torch.int64, torch.int32)]
    return any(bool((t == value).any()) for t in integers for value in values)
