"""How much the loss of each micro-batch counts, so that a step gives the gradients of the whole batch.

Most losses are a mean. Their micro-batches are weighed by what the mean is over::

    loss of the batch = sum(weight[i] * loss[i]) / sum(weight)

which is samples, unless the loss ignores some (``ignore_index``), or counts some more than others (``weight``). All
weights, those of other replicas too, must be known before the first backward, so they come from the target; of the
output, only the shape is known by then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipesight._nested import tensors_in
from pipesight._torch.module_internals import uncompiled
from pipesight.distributed.shapes import Cut
from pipesight.pipeline.loss_merging import LossWeight, check_loss_weight

__all__ = ["LossFunction", "LossMeans", "LossWeights", "Mean"]

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]

_F = nn.functional


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of one of torch's losses."""

    function: Callable[..., Tensor] | None = None
    """``cross_entropy`` or ``nll_loss``, the ones whose mean is over other than samples."""
    reduction: str = "mean"
    ignore_index: int = -100
    weight: Tensor | None = None


class LossWeights:
    """Weighs the micro-batches of a batch."""

    def __init__(self, loss_fn: LossFunction, loss_weight: LossWeight | None) -> None:
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of output and target, but got {type(loss_fn).__name__}")
        check_loss_weight(loss_weight, "output and target")
        self.loss_fn = loss_fn
        self.given = loss_weight

    @property
    def takes_output(self) -> bool:
        """Whether the weights come from a function of the user's."""
        return callable(self.given)

    @property
    def sums(self) -> bool:
        """Whether losses are summed, not averaged."""
        return self.given == "sum" or (self.given is None and _settings_of(self.loss_fn).reduction == "sum")

    @property
    def exact(self) -> bool:
        """Whether this is one of torch's losses, whose mean is known."""
        return self.given is None and _settings_of(self.loss_fn).function is not None

    @property
    def identity(self) -> tuple[Any, ...]:
        """A value that changes when the loss does."""
        now = _settings_of(self.loss_fn)
        return id(self.loss_fn), now.function, now.reduction, now.ignore_index, now.weight is None

    def by_target(self, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
        """Return the weights of micro-batches that follow from targets and numbers of samples."""
        settings = _settings_of(self.loss_fn)
        if self.sums:
            return [1.0] * len(targets)
        if self.given is None and settings.function is not None and all(isinstance(t, Tensor) for t in targets):
            counted = [_counted(settings, target) for target in targets]
            return [float(number) for number in torch.stack(counted).tolist()]
        return [float(size) for size in sizes]

    def by_function(self, targets: Sequence[Any], cuts: Sequence[Cut]) -> list[float]:
        """Return the weights of micro-batches that the user's function gives."""
        weights = []
        for target, cut in zip(targets, cuts, strict=True):
            output = cut.form([meta.empty(torch.device("meta")) for meta in cut.output])
            try:
                assert callable(self.given)
                found = self.given(output, target)
                if isinstance(found, Tensor) and found.is_meta:
                    raise TypeError("loss_weight depends on the values of the output")
                weight = float(found)
            except Exception as error:
                error.add_note(
                    "in loss_weight, which is called before the step with an output that has a shape but no values: "
                    "weights must be known before the first backward; use only the target and the output's shape"
                )
                raise
            if not (weight >= 0 and math.isfinite(weight)):
                raise ValueError(f"loss_weight must return a finite, non-negative number, but returned {weight}")
            weights.append(weight)
        return weights


def _mean_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Mean | None:
    """Return what a call of torch's ``cross_entropy`` or ``nll_loss`` divides by, and which targets it ignores.

    ``None`` for other functions, for sums, and for a target without values.
    """
    if func is not _F.cross_entropy and func is not _F.nll_loss:
        return None
    target = args[1] if len(args) > 1 else kwargs.get("target")
    named = dict(zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), args[2:], strict=False))
    settings = _settings_of(functools.partial(func, **named, **{k: v for k, v in kwargs.items() if k in _SETTINGS}))
    if settings.function is None or not isinstance(target, Tensor) or target.is_meta:
        return None
    if settings.weight is not None and settings.weight.is_meta:
        return None
    counted, is_weighed = float(_counted(settings, target)), settings.weight is not None
    return counted, None if is_weighed else settings.ignore_index


Mean: TypeAlias = tuple[float, int | None]
"""What a mean is over, and which targets it ignores, if it ignores some by their number."""


class LossMeans:
    """What the losses of a model are means over, noted while it computes them without values.

    A mean is a cross entropy, or a sum divided by a number that follows from the arguments, such as that of a mask.
    """

    def __init__(self) -> None:
        # By id, of tensors that are kept alive: the means that are added there; none for sums.
        self._found: dict[int, tuple[Tensor, tuple[Mean, ...]]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Note what a call returns, if it is a mean, or made of one: scaled, converted, added to other losses."""
        if not isinstance(output, Tensor) or output.numel() != 1:
            return
        name, mean = getattr(func, "__name__", "").strip("_"), _mean_of(func, args, kwargs)
        means: tuple[Mean, ...] = () if mean is None else (mean,)
        if mean is None and self._found and name in _KEEPING:
            made_of = [self._found[id(t)][1] for t in tensors_in((args, kwargs)) if id(t) in self._found]
            if not made_of or (len(set(made_of)) > 1 and (name not in _ADDING or () in made_of)):
                return
            means = sum(made_of, ()) if name in _ADDING else made_of[0]
            if not means and name in _DIVIDING and id(args[0]) in self._found and (found := _number(args[1:])):
                means = (found,)
        elif mean is None and name != "sum" and kwargs.get("reduction") != "sum":
            return
        self._found[id(output)] = output, means

    def of(self, loss: Any) -> tuple[Mean, ...]:
        """Return of how many targets the means are that a loss adds, and which these ignore, as far as was noted."""
        return self._found[id(loss)][1] if id(loss) in self._found else ()


def _number(values: Sequence[Any]) -> Mean | None:
    """Return what something is divided by, if that is known."""
    number = values[0] if values else None
    if isinstance(number, Tensor):
        return None if number.is_meta or number.numel() != 1 else (float(number), None)
    return (float(number), None) if isinstance(number, (int, float)) else None


_DIVIDING = {"div", "truediv", "itruediv", "true_divide"}
_ADDING = {"add", "radd", "iadd", "sub", "isub", "stack"}
_KEEPING = {*_ADDING, "mul", "rmul", "imul", "div", "truediv", "itruediv", "neg", "clone"}
_KEEPING |= {"true_divide", "to", "float", "double", "view", "reshape", "squeeze", "unsqueeze", "mean", "sum"}
_SETTINGS = ("weight", "size_average", "ignore_index", "reduce", "reduction")


def _counted(settings: _Settings, target: Tensor) -> Tensor:
    """Return what torch divides by, for a mean of ``cross_entropy`` or ``nll_loss``."""
    if target.is_floating_point():  # probabilities of classes; these are the second dimension
        return torch.tensor(target.numel() / max(1, target.size(1) if target.dim() > 1 else 1), dtype=torch.float64)
    kept = target[target != settings.ignore_index]
    if settings.weight is None:
        return torch.tensor(kept.numel(), dtype=torch.float64)
    return settings.weight.detach().to(target.device, torch.float64)[kept].sum().cpu()


def _settings_of(loss_fn: Any) -> _Settings:
    """Read a loss: a function of torch's, a module, or a partial; anything else is a mean over samples, or a sum."""
    given: dict[str, Any] = {}
    positional = False
    while isinstance(loss_fn, functools.partial):
        given, positional, loss_fn = {**loss_fn.keywords, **given}, positional or bool(loss_fn.args), loss_fn.func
    loss_fn = uncompiled(loss_fn)
    reduction = str(given.get("reduction", getattr(loss_fn, "reduction", "mean")))
    if isinstance(loss_fn, nn.Module):
        for kind, function in ((nn.CrossEntropyLoss, _F.cross_entropy), (nn.NLLLoss, _F.nll_loss)):
            if isinstance(loss_fn, kind) and type(loss_fn).forward is kind.forward and reduction == "mean":
                return _Settings(function, reduction, loss_fn.ignore_index, loss_fn.weight)
    elif loss_fn is _F.cross_entropy or loss_fn is _F.nll_loss:
        outdated = given.get("size_average") is not None or given.get("reduce") is not None
        if reduction == "mean" and not outdated and not positional:
            return _Settings(loss_fn, reduction, given.get("ignore_index", -100), given.get("weight"))
    return _Settings(reduction=reduction)
