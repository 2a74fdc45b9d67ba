"""How much the losses of micro-batches count, so that together they are the loss of the batch.

Models compute their loss themselves, mostly as a mean::

    loss of the batch = sum(count[i] * loss[i]) / sum(count)

What the mean of a micro-batch is over (samples, or targets that are not ignored) is read off the graph of the loss, or,
where there is none, noted while it is computed. What is no such mean is averaged by samples, with a warning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pipesight._torch.loss_graph import LossPart, loss_parts
from pipesight._user_warnings import warn_user
from pipesight.pipeline.calls import SplitCall
from pipesight.pipeline.loss_watch import LossWatch
from pipesight.pipeline.outputs import Weigh, Weights, weigh_by_samples

__all__ = ["LossMerging", "LossWeight", "check_loss_weight", "plain_numbers", "shares_of", "weigh_means", "weights_of"]

LossWeight: TypeAlias = Callable[..., Any] | Literal["samples", "sum"]


def check_loss_weight(given: Any, arguments: str) -> None:
    """Raise ``ValueError`` if this is not a way to weigh losses."""
    if not (given is None or callable(given) or given in ("samples", "sum")):
        raise ValueError(f"loss_weight must be 'samples', 'sum' or a function of {arguments}, but got {given!r}")


class LossMerging:
    """Weighs the losses of the micro-batches of a call, and remembers what it has warned of.

    Args:
        given: The user's choice, if any: ``samples``, ``sum``, or a function that is called as the model is, with the
            arguments of a micro-batch, and returns what its loss is a mean over.
        strict: Raise where averaging may not give the loss of the whole batch, instead of a warning.
    """

    def __init__(self, given: LossWeight | None = None, *, strict: bool = False) -> None:
        check_loss_weight(given, "the model's arguments")
        self.given = given
        self._strict = strict
        self._warned: set[str] = set()
        self._ratios: set[str] = set()
        """Losses that were divided by numbers that depend on the micro-batch."""
        self._lossless: set[frozenset[str]] = set()
        """The arguments of calls that returned no loss."""

    def is_doubtful(self, name: str) -> bool:
        """Tell whether this loss need not be that of the whole batch: the user was warned of it, or has chosen."""
        return self.given is not None or name in self._warned

    def watches(self, call: SplitCall) -> list[LossWatch]:
        """Return what to run the micro-batches of a call without graphs under; nothing if no loss is expected."""
        if self.given is not None or len(call.sizes) == 1 or frozenset(call.arguments[0]) in self._lossless:
            return []
        return [LossWatch() for _ in call.sizes]

    def weigher(self, call: SplitCall, watches: Sequence[LossWatch] = ()) -> Weigh:
        """Return what weighs the losses of a call.

        ``watches`` are those under which the micro-batches ran, where they have no graphs.
        """
        self._lossless.add(frozenset(call.arguments[0]))
        if self.given == "samples":
            return weigh_by_samples
        if self.given == "sum":
            return lambda name, losses, sizes: Weights([1.0] * len(losses))
        if callable(self.given):
            known = self.known_shares(call)
            return lambda name, losses, sizes: Weights(known) if known else weigh_by_samples(name, losses, sizes)
        return lambda name, losses, sizes: self._weigh(name, losses, call, watches)

    def known_shares(self, call: SplitCall) -> list[float]:
        """Return the weights that the user's function gives; none if all are 0."""
        assert callable(self.given)
        return shares_of(weights_of(self.given, call))

    def count_of(self, part: LossPart, call: SplitCall) -> float | None:
        """Return what a part of a loss, of plain numbers, is probably a mean over: 1 for a sum, None if it is no such.

        `weigh_parts`, which knows all micro-batches, is sure.
        """
        if part.kind == "mean":
            return float(part.count)
        if part.kind != "sum":
            return None
        return 1.0 if part.divisor is None or part.divisor in _scalars(call) else float(part.divisor)

    def _weigh(self, name: str, losses: Sequence[Tensor], call: SplitCall, watches: Sequence[LossWatch]) -> Weights:
        """Return the weights that follow from what the losses are made of."""
        self._lossless.discard(frozenset(call.arguments[0]))
        if _equal(losses):
            return weigh_by_samples(name, losses, call.sizes)
        if all(loss.grad_fn is not None for loss in losses):
            parts = [loss_parts(loss) for loss in losses]
        elif watches:
            parts = [watch.parts(loss) for watch, loss in zip(watches, losses, strict=True)]
        else:
            parts = [[LossPart("other", what="what has no graph")]] * len(losses)
        return self.weigh_parts(name, parts, losses, call, apart=True)

    def weigh_parts(
        self,
        name: str,
        parts: Sequence[Sequence[LossPart]],
        losses: Sequence[Tensor],
        call: SplitCall,
        *,
        apart: bool = False,
    ) -> Weights:
        """Return the weights of micro-batches, given what the loss of each is made of.

        With ``apart``, the gradients of parts may be scaled, where one weight does not fit all of them.
        """
        by_samples = weigh_by_samples(name, losses, call.sizes)
        if len({tuple((part.what, part.divisor is None) for part in mine) for mine in parts}) > 1:
            self._warn(name, "is computed differently in different micro-batches")
            return by_samples
        columns: list[Sequence[LossPart]] = list(zip(*plain_numbers(parts), strict=True))
        if any(part.kind == "sum" and part.divisor != column[0].divisor for column in columns for part in column):
            self._ratios.add(name)
        columns = [self._without_items(name, column, losses) for column in columns]
        counts = [[part.count for part in column] for column in columns]
        found = [_meaning(column, counts, call, name in self._ratios) for column in columns]
        means = [shares for shares in found if isinstance(shares, list)]
        kinds = {meaning for meaning in found if isinstance(meaning, str)}
        odd = next((column[0].what for column, meaning in zip(columns, found, strict=True) if meaning == "odd"), "")
        if "unclear" in kinds:
            raise ValueError(
                f"{name!r} is a sum divided by the same number in each micro-batch, which is either what a mean is "
                "over or a constant; say which: loss_weight='samples' averages the losses of micro-batches, "
                "loss_weight='sum' adds them"
            )
        if any(_contrasts(column) for column in columns):
            self._warn(name, "compares the samples of a micro-batch with each other, and not with those of others")
        elif any(not _close(shares, means[0]) for shares in means[1:]):
            if (
                apart
                and len(means) == len(columns)
                and all(part.node is not None for column in columns for part in column)
            ):
                return _weighed_apart(columns, means, by_samples.shares)
            self._warn(name, "adds means over different numbers of items")
            return by_samples
        elif odd or ("add" in kinds and (means or "any" in kinds)):
            self._warn(
                name, f"has a part that is no mean over samples (of {odd})" if odd else "adds a sum to other parts"
            )
        if means:
            return Weights(means[0]) if means[0] else by_samples
        return Weights([1.0] * len(losses)) if kinds == {"add"} else by_samples

    def _without_items(self, name: str, column: Sequence[LossPart], losses: Sequence[Tensor]) -> Sequence[LossPart]:
        """Return the parts of losses with a divisor of 0 where it was only kept from being 0."""
        divisors = [part.divisor for part in column]
        if column[0].kind != "sum" or _even(divisors) or 1.0 not in divisors:
            return column
        empty = [part.divisor == 1 and not loss.item() for part, loss in zip(column, losses, strict=True)]
        if any(empty) and not self._strict:
            self._warn(name, "is 0 and divided by 1 in a micro-batch, which is taken for one that has no items")
        return [replace(part, divisor=0.0) if none else part for part, none in zip(column, empty, strict=True)]

    def _warn(self, name: str, why: str) -> None:
        if self._strict:
            raise ValueError(
                f"{name!r} {why}, so that the losses of micro-batches do not give that of the whole batch; pass "
                "loss_weight='samples' to average them by samples anyway, 'sum' to add them, or lambda output, target: "
                "... that returns what the loss of a micro-batch is a mean over"
            )
        if name not in self._warned:
            self._warned.add(name)
            warn_user(
                f"{name!r} {why}: it is averaged over micro-batches, which may not give that of the whole batch; pass "
                "loss_weight='samples' if this is what you want, 'sum' to add them, or a function of the model's "
                "arguments that returns what the loss of a micro-batch is a mean over"
            )


def _weighed_apart(
    columns: Sequence[Sequence[LossPart]], means: Sequence[Sequence[float]], shares: Sequence[float]
) -> Weights:
    """Return the weights of losses that add cross entropies over different targets: each is weighed by its own.

    The gradient of each is scaled where it enters the graph, so that weights by samples are right for all.
    """
    losses = []
    for i, share in enumerate(shares):
        factors = [(own[i] / share if own else 1.0) if share else 0.0 for own in means]
        losses.append(weigh_means([column[i] for column in columns], factors))
    return Weights(shares, losses)


def weigh_means(parts: Sequence[LossPart], factors: Sequence[float]) -> Tensor:
    """Multiply each of the cross entropies that a loss adds, also in its gradient; return the loss that this makes."""
    values = []
    for part, factor in zip(parts, factors, strict=True):
        part.scale_gradient(factor)
        if factor:  # the mean of nothing is NaN
            values.append(part.value() * (part.scale * factor / (1.0 if part.divisor is None else part.divisor)))
    return torch.stack(values).sum() if values else torch.zeros(())


_Meaning: TypeAlias = list[float] | Literal["add", "any", "odd", "unclear"]
"""The weights of a mean (none if it is over nothing), or: a sum, independent of the batch, neither, or a sum that is
divided by the same number in all micro-batches, which may be what a mean is over."""


def _meaning(column: Sequence[LossPart], counts: Sequence[Sequence[Any]], call: SplitCall, is_ratio: bool) -> _Meaning:
    """Return what the same part of the losses of all micro-batches means for their weights."""
    kind, divisors = column[0].kind, [part.divisor for part in column]
    if kind in ("parameter", "other"):
        return "any" if kind == "parameter" else "odd"
    if kind == "mean":
        return shares_of([part.count for part in column]) if _even(divisors) else "odd"
    if divisors[0] is None:
        return "add"
    if not _even(divisors) or is_ratio:
        return shares_of(divisors)
    if divisors[0] in _scalars(call):
        return "add"
    if any(_close(divisors, known) for known in (call.sizes, *counts)) or all(map(_is_over_samples, column)):
        return shares_of(divisors)
    return "unclear"


def _contrasts(column: Sequence[LossPart]) -> bool:
    """Whether a part tells samples from each other; a micro-batch of one sample does not show it."""
    return any(part.contrasts for part in column) and all(
        part.contrasts or math.prod(part.shape) == 1 for part in column
    )


def _is_over_samples(part: LossPart) -> bool:
    """Whether a sum is divided by the number of samples, or of things that each sample has: the sizes of dimensions."""
    first, *others = part.shape or (1,)
    sizes = {math.prod(some) for k in range(len(others) + 1) for some in itertools.combinations(others, k)}
    return any(_near(part.divisor, first * size) for size in sizes)


def plain_numbers(parts: Sequence[Sequence[LossPart]]) -> list[list[LossPart]]:
    """Return parts whose numbers are read from their devices, all at once; scales that differ are in the divisors."""
    numbers = [number for mine in parts for part in mine for number in (part.count, part.divisor, part.scale)]
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    read: dict[int, Any] = {}
    for device in {t.device for t in tensors}:
        here = [t for t in tensors if t.device == device]
        read |= dict(zip(map(id, here), torch.stack([t.detach().double() for t in here]).tolist(), strict=True))

    def plain(part: LossPart) -> LossPart:
        numbers: list[Any] = [part.count, part.divisor, part.scale]
        count, divisor, scale = (read.get(id(number), number) for number in numbers)
        return replace(part, count=count, divisor=divisor, scale=scale)

    found = [[plain(part) for part in mine] for mine in parts]
    for k in range(len(found[0])):
        if not _even([mine[k].scale for mine in found]):
            for mine in found:
                mine[k] = replace(mine[k], divisor=_ratio(mine[k].divisor, mine[k].scale))
    return found


def _ratio(divisor: Any, scale: Any) -> float:
    whole = 1.0 if divisor is None else divisor
    return float(whole / scale) if scale else math.inf


def weights_of(function: Callable[..., Any], call: SplitCall) -> list[float]:
    """Return what a function of the user's says the losses of micro-batches are means over."""
    weights = []
    for i in range(len(call.sizes)):
        try:
            weights.append(float(call.call_with(function, i)))
        except Exception as error:
            error.add_note("in loss_weight, which is called as the model is, with the arguments of a micro-batch")
            raise
    if bad := [weight for weight in weights if not (weight >= 0 and math.isfinite(weight))]:
        raise ValueError(f"loss_weight must return a finite, non-negative number, but returned {bad[0]}")
    return weights


def _scalars(call: SplitCall) -> set[float]:
    """Return the numbers that the caller passed, such as ``num_items_in_batch``."""
    found: set[float] = set()
    for value in call.arguments[0].values():
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            found.add(float(value))
    return found


def shares_of(numbers: Sequence[Any]) -> list[float]:
    """Return numbers that add up to 1; none if all are 0."""
    total = math.fsum(numbers)
    return [number / total for number in numbers] if total and math.isfinite(total) else []


def _even(numbers: Sequence[Any]) -> bool:
    return all(number is None for number in numbers) or _close(numbers, [numbers[0]] * len(numbers))


def _close(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(_near(a, b) for a, b in zip(one, other, strict=True))


def _near(one: Any, other: Any) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _equal(losses: Sequence[Tensor]) -> bool:
    return all(loss is losses[0] for loss in losses)
