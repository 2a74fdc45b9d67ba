"""Check that the weighted losses of micro-batches, and their gradients, add up to those of the whole batch.

Weights that do not fit a loss are a silent error: training goes on with wrong gradients. So at the first step, the
second, the fourth and so on, the last rank keeps the outputs of micro-batches and evaluates the loss on all of them
together. It keeps at most 1 GiB of outputs, but at least two micro-batches.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipesight.distributed.loss_weights import LossWeights
from pipesight.distributed.shapes import Flow
from pipesight.pipeline.microbatch import Form, as_tuple, form_of, gather

__all__ = ["Evidence", "LossCheck", "collect"]

_MEMORY = 2**30  # bytes of outputs


@dataclass(slots=True)
class Evidence:
    """What a step keeps for the check, of its first micro-batches."""

    count: int
    """Of how many."""
    outputs: dict[int, tuple[Form, list[Tensor]]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    """As ``loss_fn`` returned them."""
    gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Of the outputs, with the weight and the scale of a step in them."""


def collect(flows: Sequence[Flow]) -> Evidence:
    """Return an empty record for a step to fill."""
    size = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in flows[0].cuts[-1].output)
    return Evidence(min(len(flows), max(2, _MEMORY // max(1, size))))


class LossCheck:
    """Decides which calls to check, and checks them."""

    def __init__(self, loss_weights: LossWeights, replicas: int) -> None:
        self._loss_weights, self._replicas = loss_weights, replicas
        self._passed: dict[str, int] = {}  # calls since the last change of the loss
        self._identity: Any = None
        self._impossible = False

    def due(self, call: str, microbatches: int) -> bool:
        """Return whether this call is to be checked. For the last rank."""
        loss_weights = self._loss_weights
        if self._impossible or loss_weights.given == "samples":
            return False
        if microbatches == 1 and (self._replicas == 1 or loss_weights.takes_output):
            return False  # there is nothing to compare
        if self._identity != loss_weights.identity:
            self._identity = loss_weights.identity
            self._passed.clear()
        number = self._passed.get(call, 0)
        if number and loss_weights.exact:  # what torch does does not depend on the batch
            return False
        return (number + 1) & number == 0

    def passed(self, call: str) -> None:
        """Note that a call passed the check, or was not checked."""
        self._passed[call] = self._passed.get(call, 0) + 1

    def verify(self, evidence: Evidence, targets: Sequence[Any], weights: Sequence[float], factor: float) -> bool:
        """Raise ``ValueError`` if micro-batches do not add up; return whether the check was possible.

        ``factor`` is what a step multiplies the loss by, apart from the weight.
        """
        try:
            with _kept_buffers(self._loss_weights.loss_fn):
                return self._verify(evidence, targets[: evidence.count], weights[: evidence.count], factor)
        except _SumError as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # the loss may not take so many samples, and so much memory may not be there
            self._give_up(f"could not be called on several micro-batches at once ({type(error).__name__}: {error})")
            return True

    def _verify(self, evidence: Evidence, targets: Sequence[Any], weights: Sequence[float], factor: float) -> bool:
        count, loss_weights = len(targets), self._loss_weights
        form = evidence.outputs[0][0]
        outputs = [evidence.outputs[i][1] for i in range(count)]
        target = form_of(targets[0])(gather([as_tuple(t, "target") for t in targets]))
        losses = [evidence.losses[i].double().item() for i in range(count)]
        if count == 1:  # halves of it stand for the micro-batches of replicas
            outputs, targets, losses, weights = self._halves(form, outputs[0], target)
        total = sum(weights)
        if not (total or loss_weights.sums) or not any(t.numel() for output in outputs for t in output):
            return False  # a replica may have no samples
        learns = bool(evidence.gradients) and count > 1
        together = [t.requires_grad_() if learns and t.is_floating_point() else t for t in gather(outputs)]
        with torch.set_grad_enabled(learns):
            loss = loss_weights.loss_fn(form(together), target)
        found = loss.double().item()
        if not math.isfinite(found):
            return False
        pairs = list(zip(losses, weights, strict=True))
        mean = sum(losses) if loss_weights.sums else sum(loss * weight for loss, weight in pairs if weight) / total
        off = 0.0
        if learns and loss.requires_grad:
            places = [k for k, t in enumerate(together) if t.requires_grad]
            whole = loss * (factor if loss_weights.sums else factor * total)
            expected = torch.autograd.grad(whole, [together[k] for k in places], allow_unused=True)
            parts = [[evidence.gradients[i][k] for i in range(count)] for k in places]
            off = _difference(expected, parts, [[output[k] for output in outputs] for k in places])
        eps, tolerance = _rounding(loss, together, [found, *losses])
        if abs(found - mean) <= tolerance and off <= max(1e-3, 3 * eps):
            return True
        with torch.no_grad():
            again = loss_weights.loss_fn(form(outputs[0]), targets[0]).double().item()
        if abs(again - losses[0]) > tolerance:
            self._give_up("returns a different number each time")
            return True
        raise _SumError(self._explanation(found, mean, off, losses, tolerance))

    def _halves(
        self, form: Form, output: list[Tensor], target: Any
    ) -> tuple[list[list[Tensor]], list[Any], list[float], list[float]]:
        tensors = as_tuple(target, "target")
        size = tensors[0].size(0)
        parts = [slice(0, size // 2), slice(size // 2, None)]
        outputs = [[t[part] for t in output] for part in parts]
        targets = [form_of(target)([t[part] for t in tensors]) for part in parts]
        weights = self._loss_weights.by_target(targets, [size // 2, size - size // 2])
        with torch.no_grad():
            losses = [
                self._loss_weights.loss_fn(form(mine), theirs).double().item()
                for mine, theirs in zip(outputs, targets, strict=True)
            ]
        return outputs, targets, losses, weights

    def _give_up(self, why: str) -> None:
        self._impossible = True
        warnings.warn(
            f"loss_fn {why}, so it cannot be checked whether the losses of micro-batches add up to that of the batch; "
            "to average them by samples without a check, use loss_weight='samples'",
            RuntimeWarning,
            stacklevel=2,
        )

    def _explanation(self, found: float, mean: float, off: float, losses: list[float], tolerance: float) -> str:
        loss_weights = self._loss_weights
        which = "the sum" if loss_weights.sums else "the weighted mean" if loss_weights.takes_output else "the mean"
        text = (
            f"loss_fn on {len(losses)} micro-batches together is {found:.6g}, but {which} of their losses is {mean:.6g}"
        )
        if off:
            text += f", and the gradients differ by {off:.1%}"
        if not loss_weights.sums and abs(found - sum(losses)) <= tolerance * len(losses):
            return f"{text}; it is a sum over samples, so pass DistributedPipeline loss_weight='sum'"
        return (
            f"{text}; pass DistributedPipeline what loss_fn averages over: for one that ignores targets of -100, "
            "loss_weight=lambda output, target: (target != -100).sum(); or, to average by samples anyway, "
            "loss_weight='samples'"
        )


class _SumError(Exception):
    pass


def _rounding(loss: Tensor, outputs: Sequence[Tensor], losses: Sequence[float]) -> tuple[float, float]:
    """Return the precision of the numbers, and how much losses that should be equal may differ."""
    floats = [t.detach() for t in (loss, *outputs) if t.is_floating_point()]
    eps = max([torch.finfo(t.dtype).eps for t in floats], default=1e-12)
    size = max(abs(x) for x in losses if math.isfinite(x))
    size += max([t.abs().mean().item() / 8 for t in floats[1:]], default=0.0)  # a sum of these may cancel out
    return eps, (64 if eps < 1e-4 else 4) * eps * size


def _difference(
    expected: Sequence[Tensor | None], parts: Sequence[Sequence[Tensor | None]], outputs: Sequence[Sequence[Tensor]]
) -> float:
    """Return the relative difference between the gradients of micro-batches and those of the whole batch."""
    apart = size = 0.0
    for whole, mine, places in zip(expected, parts, outputs, strict=True):
        start = 0
        for part, place in zip(mine, places, strict=True):
            stop = start + place.size(0)
            right = torch.zeros_like(place).double() if whole is None else whole[start:stop].double()
            apart += (right if part is None else right - part.double()).square().sum().item()
            size += right.square().sum().item()
            start = stop
    return math.sqrt(apart / size) if size and math.isfinite(apart) and math.isfinite(size) else 0.0


@contextlib.contextmanager
def _kept_buffers(loss_fn: Any) -> Iterator[None]:
    """Restore the buffers of a loss module after the block."""
    buffers = list(loss_fn.buffers()) if isinstance(loss_fn, nn.Module) else []
    saved = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, saved, strict=True):
                buffer.copy_(before)
