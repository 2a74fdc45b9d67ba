"""What a scalar loss is made of, read off its graph: means and sums, and what they are divided by.

Autograd keeps what a mean was divided by: of a cross entropy, the number of targets that are not ignored, or their
weight. So the loss of a model can be split into its parts without knowing the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["LossPart", "loss_parts"]

Number: TypeAlias = Tensor | float


@dataclass(frozen=True, slots=True)
class LossPart:
    """A part of a loss that is a sum of such parts: ``scale / divisor * reduction(tensor)``."""

    kind: Literal["mean", "sum", "parameter", "other"]
    """How it reduces a tensor; ``other`` is anything but a mean or a sum over samples."""
    count: Number = 0.0
    """What a mean divides by."""
    shape: tuple[int, ...] = ()
    """Of the tensor."""
    divisor: Number | None = None
    """What it is divided by, if it is."""
    scale: Number = 1.0
    contrasts: bool = False
    """Whether samples are told from each other: the class of sample k is k."""
    what: str = ""
    """The operation, for messages."""
    node: Any = None
    """That of a cross entropy."""

    @property
    def is_plain_mean(self) -> bool:
        """Whether it is a mean cross entropy without weights of classes, and nothing is done to it."""
        plain = self.kind == "mean" and self.divisor is None and isinstance(self.scale, float) and not self.contrasts
        return plain and self.node is not None and self.node._saved_weight is None

    def value(self) -> Tensor:
        """Return the mean of a cross entropy, without scale and divisor."""
        node = self.node
        ignored = node._saved_ignore_index
        return nn.functional.nll_loss(
            node._saved_self.detach(),
            node._saved_target,
            node._saved_weight,
            ignore_index=ignored - 2**64 if ignored >= 2**63 else ignored,
        )

    def scale_gradient(self, factor: float) -> None:
        """Multiply the gradient of this part, in every backward."""
        self.node.register_prehook(lambda gradients: tuple(None if g is None else g * factor for g in gradients))


_SAME = {"ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "Neg", "Expand", "T"}
_LOSSES = {"MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "BinaryCrossEntropy"}
_LOSSES |= {"BinaryCrossEntropyWithLogits"}
_MEAN, _SUM = 1, 2  # torch's reductions


def loss_parts(loss: Tensor) -> list[LossPart]:
    """Return the parts of a scalar that has a graph."""
    try:
        return list(_parts(loss.grad_fn, 1.0, None))
    except RuntimeError as error:  # what it saved is not there: after a backward, or inside a checkpoint
        return [LossPart("other", what=str(error).partition("\n")[0])]


def _parts(node: Any, scale: Number, divisor: Number | None) -> Iterator[LossPart]:
    name = _name(node)
    inputs = [after for after, _ in node.next_functions if after is not None]
    if name in ("Add", "Sub"):
        alpha = float(getattr(node, "_saved_alpha", 1)) * (1.0 if name == "Add" else -1.0)
        for (after, _), factor in zip(node.next_functions, (1.0, alpha), strict=False):
            if after is not None:
                yield from _parts(after, scale * factor, divisor)
    elif name in _SAME and len(inputs) == 1:
        yield from _parts(inputs[0], -scale if name == "Neg" else scale, divisor)
    elif name in ("Mul", "Div") and len(inputs) == 1 and (number := _operand(node, name)) is not None:
        if name == "Mul":
            yield from _parts(inputs[0], scale * number, divisor)
        else:
            yield from _parts(inputs[0], scale, number if divisor is None else divisor * number)
    elif name in ("Mean", "Sum") and len(inputs) == 1:
        shape = tuple(int(size) for size in node._saved_self_sym_sizes)
        if not shape:
            yield from _parts(inputs[0], scale, divisor)
        elif _name(inputs[0]) == "Stack" and len(shape) == 1:  # of losses
            for after in (after for after, _ in inputs[0].next_functions if after is not None):
                yield from _parts(after, scale / shape[0] if name == "Mean" else scale, divisor)
        elif name == "Mean" and _name(inputs[0]) == "Mean":  # one dimension after the other
            yield from _parts(inputs[0], scale, divisor)
        elif (origin := _origin(inputs[0])) != "samples":
            yield LossPart(origin, what=name)
        else:
            count = float(math.prod(shape))
            yield LossPart("mean" if name == "Mean" else "sum", count, shape, divisor, scale, what=name)
    elif name in ("NllLoss", "NllLoss2D") and node._saved_reduction in (_MEAN, _SUM):
        target = node._saved_target
        kind: Literal["mean", "sum"] = "mean" if node._saved_reduction == _MEAN else "sum"
        contrasts = name == "NllLoss" and _is_range(target, node._saved_self.shape)
        yield LossPart(
            kind, node._saved_total_weight, tuple(target.shape), divisor, scale, contrasts, "CrossEntropy", node
        )
    elif name in _LOSSES and node._saved_reduction in (_MEAN, _SUM):
        shape = tuple(node._saved_self.shape)
        kind = "mean" if node._saved_reduction == _MEAN else "sum"
        yield LossPart(kind, float(math.prod(shape)), shape, divisor, scale, what=name)
    else:
        yield LossPart("parameter" if _is_parameter(node) else "other", what=name)


def _name(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])


def _operand(node: Any, name: str) -> Number | None:
    """Return the constant of a product or a quotient; None if it is no scalar, or the dividend."""
    number = getattr(node, "_saved_other", None)
    if number is None and name == "Mul":
        number = getattr(node, "_saved_self", None)
    if isinstance(number, (int, float)):
        return float(number)
    if isinstance(number, Tensor) and number.numel() == 1 and (name == "Mul" or node.next_functions[0][0] is not None):
        return number.detach().reshape(())
    return None


_ELEMENTWISE = _SAME | {"Add", "Sub", "Mul", "Div", "Pow", "Log", "Exp", "Sqrt", "Abs", "Mean", "Sum"}


def _origin(node: Any) -> Literal["samples", "parameter", "other"]:
    """Return what a mean or a sum is over; ``other`` if samples were already reduced."""
    waiting, ends = [node], []
    for _ in range(50):
        if not waiting:
            break
        node = waiting.pop()
        name = _name(node)
        if name in ("Mean", "Sum"):
            dims = getattr(node, "_saved_dim", (0,))
            if any(int(dim) in (0, 2**64 - len(node._saved_self_sym_sizes)) for dim in dims):
                return "other"
        if name in _ELEMENTWISE:
            waiting += [after for after, _ in node.next_functions if after is not None]
        else:
            ends.append(_is_parameter(node))
    return "parameter" if ends and all(ends) and not waiting else "samples"


def _is_parameter(node: Any) -> bool:
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _is_range(target: Tensor, shape: torch.Size) -> bool:
    """Whether the class of sample k is k, of as many classes as there are samples; even one, which is no class else."""
    if target.dim() != 1 or len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        return False
    return bool(torch.equal(target, torch.arange(len(target), dtype=target.dtype, device=target.device)))
