"""The losses of a step's micro-batches: each is computed as soon as its output is there, and weighed before it is known
what the others are.

What a loss counts is read off its own graph, as in `loss_merging`: the number of targets that a mean is over. How many
there are in all is known only at the end, so a backward starts from the share of a first guess, that all micro-batches
are like the first. At the end, what was wrong with the guess is the same factor for all, or the step is refused::

    gradients = factor * sum(guess[i] * gradient[i])        factor = share[i] / guess[i], for every i
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipesight._nested import tensors_in
from pipesight._torch.loss_graph import LossPart, loss_parts
from pipesight.pipeline.batch_dims import BatchDims
from pipesight.pipeline.calls import SplitCall
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.loss_merging import LossMerging, plain_numbers, shares_of
from pipesight.pipeline.outputs import weigh_by_samples

__all__ = ["TARGET", "LossOf", "StepLosses"]

TARGET = "target"
"""What a target is called among the arguments of a step."""


def _take_loss(output: Any) -> Any:
    """Return the loss that a model computes: its output, if that is one number, or what the output calls ``loss``."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise TypeError(
            f"the model returns {type(output).__name__}, which has no loss; give the model what it computes the loss "
            "from, such as labels=, or say what the loss is: loss=lambda output: ... in the constructor of the pipeline"
        )
    return loss


class LossOf:
    """Computes the loss of a micro-batch of its output.

    ``loss`` takes the output, and returns the loss that the model has computed; ``loss_fn``, instead, takes output and
    target.
    """

    def __init__(self, loss: Callable[[Any], Any] | None, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        if loss is not None and loss_fn is not None:
            raise TypeError(
                "give either loss, which takes the model's output, or loss_fn, which takes output and target"
            )
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of output and target, but got {type(loss_fn).__name__}")
        if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
            raise ValueError(
                f"loss_fn must have no parameters (got: {type(loss_fn).__name__}), since those of the pipeline are the "
                "model's; make it a module of the model, which then returns its loss"
            )
        self._loss = _take_loss if loss is None else loss
        self._loss_fn = loss_fn

    @property
    def takes_target(self) -> bool:
        """Whether it needs a target beside the output."""
        return self._loss_fn is not None

    @property
    def sums(self) -> bool:
        """Whether it says itself that it is a sum."""
        return str(getattr(self._loss_fn, "reduction", "mean")) == "sum"

    def apart(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], Any]:
        """Return the arguments of the model among those of a step, and the target."""
        inputs, more = list(args), dict(kwargs)
        if TARGET in more:
            return inputs, more, more.pop(TARGET)
        if len(inputs) + len(more) < 2 or not inputs:
            raise TypeError(
                "step needs the arguments of the model and then the target, which loss_fn takes: "
                "pipe.step(input, target)"
            )
        return inputs, more, inputs.pop()

    def of_call(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Call a model; return its loss. If there is a target, it is among the arguments."""
        if not self.takes_target:
            return self(model(*args, **kwargs), None)
        more = {name: value for name, value in kwargs.items() if name != TARGET}
        return self(model(*args, **more), kwargs[TARGET])

    def check_target(self, call: SplitCall, target: Any, dims: BatchDims) -> None:
        """Raise if a target was not cut with the inputs, and the user does not say that it must not be."""
        rule, exact = dims.rule(TARGET)
        if len(call.sizes) == 1 or (exact and rule is None):
            return
        dim = rule if isinstance(rule, int) else 0
        for (_, kwargs), size in zip(call.calls, call.sizes, strict=True):
            found = [*tensors_in(kwargs[TARGET])]
            if not exact and (not found or any(t.dim() <= dim or t.size(dim) != size for t in found)):
                shapes = ", ".join(str(list(t.shape)) for t in tensors_in(target)) or type(target).__name__
                raise ValueError(
                    "the target must have as many samples as the input, to be cut into micro-batches with it (target: "
                    f"{shapes}); give it its batch dimension, or say where that is: batch_dim={{'target': ...}}, None "
                    "if each micro-batch needs all of it"
                )

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss."""
        found = self._loss(output) if self._loss_fn is None else self._loss_fn(output, target)
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            name = "loss" if self._loss_fn is None else "loss_fn"
            raise TypeError(f"{name} must return one number, as a tensor, but returned {what}")
        return found


class StepLosses:
    """Those of one step.

    ``scale`` is what gradients are multiplied by, against underflow.
    """

    def __init__(
        self, loss_of: LossOf, merging: LossMerging, call: SplitCall, targets: Sequence[Any], scale: float = 1.0
    ) -> None:
        self._loss_of, self._merging, self._call, self._targets, self._scale = loss_of, merging, call, targets, scale
        self._m = len(call.sizes)
        self._values: list[Tensor | None] = [None] * self._m
        self._parts: list[list[LossPart]] = [[] for _ in range(self._m)]
        self._counts: list[float | None] = [None] * self._m
        self._guesses: list[float | Tensor] = [0.0] * self._m
        # What all micro-batches count together, if they are like the first; on its device, if that is not known here:
        self._expected: float | Tensor | None = None
        self._guessing = threading.Lock()
        self._given = merging.given if merging.given is not None or not loss_of.sums else "sum"
        self._known = self._known_shares()

    def compute(self, i: int, output: Any) -> Tensor:
        """Return the loss of a micro-batch."""
        loss = self._loss_of(output, self._targets[i] if self._targets else None)
        if callable(self._given) and self._targets:
            self._counts[i] = self._count_given(output, self._targets[i])
        return loss

    def targets_of(self, i: int) -> list[Tensor]:
        """Return the tensors in the target of a micro-batch."""
        return list(tensors_in(self._targets[i])) if self._targets else []

    def start(self, i: int, loss: Tensor) -> Tensor | None:
        """Return the gradient that the backward of a micro-batch starts from; None if it counts nothing.

        One that counts nothing may be NaN, as the mean of nothing is.
        """
        self._values[i] = loss.detach().clone()  # some losses are views of memory as large as what they are a mean of
        if self._known:
            self._guesses[i] = self._known[i]
        elif (there := self._guess_there(i, loss)) is not None:
            return there
        else:
            if self._counts[i] is None:
                self._counts[i] = self._read(i, loss)
            with self._guessing:
                count = self._counts[i]
                assert count is not None
                if self._expected is None and count:
                    self._expected = count * self._m
                self._guesses[i] = count / float(self._expected) if self._expected is not None else 0.0
        guess = self._guesses[i]
        assert isinstance(guess, float)
        return torch.full_like(loss, guess * self._scale) if guess else None

    def _guess_there(self, i: int, loss: Tensor) -> Tensor | None:
        """Return the same for a mean cross entropy, without waiting for the device to say what it is a mean over.

        One over nothing is differentiated, too: the gradients of targets that are ignored are 0, and no NaN.
        """
        if self._counts[i] is not None or loss.grad_fn is None:
            return None
        parts = loss_parts(loss)
        if len(parts) > 1 or not parts[0].is_plain_mean or not isinstance(count := parts[0].count, Tensor):
            return None
        self._parts[i] = [replace(part, node=None) for part in parts]
        count = count.detach().double()
        with self._guessing:
            if self._expected is None:
                self._expected = torch.where(count > 0, count, math.prod(parts[0].shape)) * self._m
            guess = self._guesses[i] = count / self._expected
        return (guess * self._scale).to(loss.dtype).expand_as(loss)

    def finish(self) -> tuple[Tensor, float | Tensor]:
        """Return the batch's loss and the factor of the gradients; ``ValueError`` if none makes these right."""
        values = [value for value in self._values if value is not None]
        if self._are_there():
            return self._finish_there(values)
        guesses = self._guesses_here()
        shares = self._shares(values, guesses)
        factors = [share / guess for share, guess in zip(shares, guesses, strict=True) if guess]
        missed = any(share and not guess for share, guess in zip(shares, guesses, strict=True))
        if missed or any(not math.isclose(factor, factors[0], rel_tol=1e-5) for factor in factors[1:]):
            raise ValueError(
                f"the losses of micro-batches count {_numbers(shares)} by what they are means or sums over, but were "
                f"weighed {_numbers(guesses)} before the others were known; say what that of a micro-batch is "
                f"a mean over: loss_weight={self._signature}: ...; or use loss_weight='samples' or 'sum'"
            )
        # A rounding error of the guess is no reason to go over all gradients again.
        factor = factors[0] if factors and not math.isclose(factors[0], 1, rel_tol=1e-12) else 1.0
        wide = torch.float32 if values[0].dtype in (torch.float16, torch.bfloat16) else values[0].dtype
        kept = [value.to(wide).reshape(()) * share for value, share in zip(values, shares, strict=True) if share]
        loss = torch.stack(kept).sum() if kept else torch.stack([v.to(wide).reshape(()) for v in values]).mean()
        return loss.to(values[0].dtype), factor

    def _are_there(self) -> bool:
        """Whether all is known on a GPU that need not be waited for: the losses are mean cross entropies of a kind."""
        scales = [part.scale for parts in self._parts for part in parts]
        return all(isinstance(guess, Tensor) and guess.is_cuda for guess in self._guesses) and all(
            isinstance(scale, float) and math.isclose(scale, scales[0], rel_tol=1e-5) for scale in scales
        )

    def _finish_there(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Do what `finish` does, on the GPU: each loss counts what it was guessed to, so that one factor fits all."""
        losses = torch.stack([value.reshape(()) for value in values]).double()
        guesses = torch.stack([guess for guess in self._guesses if isinstance(guess, Tensor)])
        total = guesses.sum()
        loss = torch.where(guesses > 0, losses * (guesses / total), 0.0).sum()
        loss = torch.where(total > 0, loss, losses.mean())
        return loss.to(values[0].dtype), torch.where(total > 0, 1 / total, 1.0)

    @property
    def _signature(self) -> str:
        return "lambda output, target" if self._targets else "lambda *args, **kwargs"

    def _known_shares(self) -> list[float]:
        """Return the shares of micro-batches that are known before the losses; none if they are not."""
        by_samples = list(weigh_by_samples("loss", [], self._call.sizes).shares)
        if self._m == 1:
            return [1.0]
        if self._given == "samples":
            return by_samples
        if self._given == "sum":
            return [1.0] * self._m
        if callable(self._given) and not self._targets:
            return self._merging.known_shares(self._call) or by_samples
        return []

    def _count_given(self, output: Any, target: Any) -> float:
        """Return what the user says that the loss of a micro-batch is a mean over."""
        assert callable(self._given)
        flat = flatten(output)
        shape = flat.rebuild([torch.empty_like(tensor, device="meta") for tensor in flat.tensors])
        try:
            found = self._given(shape, target)
            if isinstance(found, Tensor) and found.is_meta:
                raise TypeError("loss_weight depends on the values of the output")
            count = float(found)
        except Exception as error:
            error.add_note("in loss_weight, which gets an output that has a shape but no values, and a target")
            raise
        if not (count >= 0 and math.isfinite(count)):
            raise ValueError(f"loss_weight must return a finite, non-negative number, but returned {count}")
        return count

    def _read(self, i: int, loss: Tensor) -> float:
        """Return what a loss is a mean over, read off its graph; the samples where there is no such thing."""
        parts = loss_parts(loss) if loss.grad_fn is not None else [LossPart("other", what="what has no graph")]
        parts = self._parts[i] = [replace(part, node=None) for part in plain_numbers([parts])[0]]
        if any(part.kind == "sum" and part.divisor == 1 for part in parts) and not loss.item():
            return 0.0  # a sum over no items, divided by 1 lest it be by 0
        counts = [self._merging.count_of(part, self._call) for part in parts]
        return next((count for count in counts if count is not None), float(self._call.sizes[i]))

    def _guesses_here(self) -> list[float]:
        tensors = [guess for guess in self._guesses if isinstance(guess, Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else [])
        return [next(read) if isinstance(guess, Tensor) else guess for guess in self._guesses]

    def _shares(self, losses: Sequence[Tensor], guesses: list[float]) -> list[float]:
        if self._known:
            return self._known
        if not any(guesses):
            return guesses
        if callable(self._given):
            counts = [count for count in self._counts if count is not None]
            return shares_of(counts) or [0.0] * self._m
        shares = self._merging.weigh_parts("loss", self._parts, losses, self._call).shares
        return list(shares)


def _numbers(weights: Sequence[float]) -> str:
    some = [f"{weight:.4g}" for weight in weights[:8]]
    return f"[{', '.join(some)}{', ...' if len(weights) > 8 else ''}]"
