"""Batch normalisation whose running statistics are those of the whole mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipesight import context
from pipesight._torch.module_internals import BatchNorm

__all__ = ["DeferredBatchNorm", "Moments", "measure", "merge"]


class DeferredBatchNorm(BatchNorm):
    """Normalises each micro-batch alone, but updates the running statistics once per mini-batch.

    The moments of the micro-batches are merged (Chan et al.), so that ``running_mean`` and the unbiased
    ``running_var`` come out as those of a plain layer that saw the mini-batch whole. Outside of a pipeline it is a
    plain layer.
    """

    def __init__(self, plain: BatchNorm) -> None:
        # Parameters, buffers, hooks and settings stay the very objects they were.
        self.__dict__.update(plain.__dict__)
        self.plain_class: type[BatchNorm] = plain.plain_class if isinstance(plain, DeferredBatchNorm) else type(plain)
        self._place = (0, 0)  # mini-batch and micro-batch of the last call
        self._calls = 0  # in that micro-batch; a layer may be called several times in one forward
        self._moments: dict[int, Moments] = {}

    def _check_input_dim(self, input: Tensor) -> None:
        self.plain_class._check_input_dim(self, input)

    def extra_repr(self) -> str:
        """Describe the plain layer, and that it is deferred."""
        return f"{super().extra_repr()}, deferred={self.plain_class.__name__}"  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` with its own statistics and remember them."""
        where = context.current()
        if where is None or not self.training or not self.track_running_stats:
            return super().forward(input)
        self._check_input_dim(input)
        if where.phase == "forward":
            if self._place[0] != where.serial:
                self._moments.clear()
            if self._place != (where.serial, where.microbatch):
                self._place, self._calls = (where.serial, where.microbatch), 0
            self._calls += 1
            merged = merge(self._moments.get(self._calls), measure(input.detach()))
            if merged is not None:
                self._moments[self._calls] = merged
            if where.microbatch == where.microbatches - 1:
                self._update(self._moments.pop(self._calls, None))
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)

    def _update(self, moments: Moments | None) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if moments is None or self.running_mean is None or self.running_var is None:
            return
        # Without a momentum it is the plain average over all mini-batches.
        factor = 1.0 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
        variance = moments.squares / max(1, moments.count - 1)
        with torch.no_grad():
            self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(variance.to(self.running_var.dtype), factor)

    @classmethod
    def convert(cls, module: nn.Module) -> None:
        """Replace every ``nn.BatchNorm1d``, ``2d`` and ``3d`` inside ``module``.

        ``nn.SyncBatchNorm`` and classes with a ``forward`` of their own stay as they are.
        """
        converted: dict[nn.Module, DeferredBatchNorm] = {}
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if (
                    isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
                    and type(child).forward is BatchNorm.forward
                ):
                    parent._modules[name] = converted.setdefault(child, cls(child))


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the values of each channel."""

    count: int
    mean: Tensor
    squares: Tensor  # the sum of squared distances from the mean


def measure(input: Tensor) -> Moments | None:
    """Return the moments of a micro-batch, ``None`` if it is empty."""
    dims = [d for d in range(input.dim()) if d != 1]
    count = input.numel() // max(1, input.size(1))
    if count == 0:
        return None
    # In half precision the sums would overflow; batch_norm itself keeps float32 statistics too.
    variance, mean = torch.var_mean(input.to(torch.promote_types(input.dtype, torch.float32)), dims, correction=0)
    return Moments(count, mean, variance * count)


def merge(a: Moments | None, b: Moments | None) -> Moments | None:
    """Return the moments of two micro-batches together."""
    if a is None or b is None:
        return b if a is None else a
    total = a.count + b.count
    delta = b.mean - a.mean
    squares = a.squares + b.squares + delta.square() * (a.count * b.count / total)
    return Moments(total, a.mean + delta * (b.count / total), squares)
