"""``torchgpipe.batchnorm``, for pipesight: deferred batch normalisation that counts micro-batches itself."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipesight import context, is_recomputing
from pipesight._torch.module_internals import BatchNorm
from pipesight.pipeline import batchnorm
from pipesight.pipeline.batchnorm import Moments, measure, merge

__all__ = ["DeferredBatchNorm"]

M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(batchnorm.DeferredBatchNorm):
    """Normalises each micro-batch alone, and updates the running statistics after ``chunks`` of them.

    In a ``GPipe``, the pipeline says which micro-batch is the last of a mini-batch, and ``chunks`` is not needed.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        self._adopt(_AnyBatchNorm(num_features, eps, momentum, affine), chunks)

    def _adopt(self, plain: BatchNorm, chunks: int) -> None:
        batchnorm.DeferredBatchNorm.__init__(self, plain)
        self.chunks = chunks
        """After how many micro-batches the running statistics are updated, outside of a ``GPipe``."""
        self.tracked = 0
        """Micro-batches since the last update."""
        self._sum: Moments | None = None

    @property
    def sum(self) -> Tensor:
        """The sum of what has been tracked since the last update, per channel."""
        return torch.zeros(self.num_features) if self._sum is None else self._sum.mean * self._sum.count

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` with its own statistics, and track them."""
        if not self.training or context.current() is not None:
            return super().forward(input)
        self._check_input_dim(input)
        if not is_recomputing():
            self._sum = merge(self._sum, measure(input.detach()))
            self.tracked += 1
            if self.tracked >= self.chunks:
                self._update(self._sum)
                self._sum, self.tracked = None, 0
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M:
        """Return ``module`` with its batch norms, or itself if it is one, deferred; parameters and buffers are kept.

        Layers that track no statistics, ``nn.SyncBatchNorm`` and classes with their own ``forward`` stay as they are,
        and so do those that are deferred with these ``chunks``.
        """
        deferred: dict[nn.Module, DeferredBatchNorm] = {}

        def replace(layer: nn.Module | None) -> nn.Module | None:
            if not isinstance(layer, BatchNorm) or not layer.track_running_stats:
                return layer
            known = isinstance(layer, batchnorm.DeferredBatchNorm)
            if getattr(layer, "chunks", None) == chunks or not (known or type(layer).forward is BatchNorm.forward):
                return layer
            if layer not in deferred:
                deferred[layer] = cls.__new__(cls)
                deferred[layer]._adopt(layer, chunks)
            return deferred[layer]

        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                parent._modules[name] = replace(child)
        return cast(M, replace(module))


class _AnyBatchNorm(BatchNorm):
    """A batch norm of any number of dimensions, as it is not said which."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
