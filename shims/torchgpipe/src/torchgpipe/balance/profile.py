"""``torchgpipe.balance.profile``, for pipesight: the parts that programs build their own profilers from."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from torchgpipe.microbatch import Batch

__all__ = ["detach", "layerwise_sandbox"]


def layerwise_sandbox(module: nn.Sequential, device: torch.device | str) -> Iterator[nn.Module]:
    """Yield a copy of each layer, on ``device`` and in training mode; ``module`` stays as it is."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def detach(batch: Batch) -> None:
    """Cut the tensors of ``batch`` off their graph, in place; they keep ``requires_grad``."""
    for index, tensor in enumerate(batch):
        batch[index] = tensor.detach().requires_grad_(tensor.requires_grad)
