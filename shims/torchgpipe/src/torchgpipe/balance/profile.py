"""``torchgpipe.balance.profile``, for pipesight: what layers cost, and the parts that programs build profilers from."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from pipesight.pipeline.profiling import Device, profile_size, profile_time
from torchgpipe.microbatch import Batch, TensorOrTensors

__all__ = ["detach", "layerwise_sandbox", "profile_sizes", "profile_times"]


def profile_times(module: nn.Sequential, sample: TensorOrTensors, timeout: float, device: Device) -> list[int]:
    """Return the microseconds that forward and backward of each layer take, the median of several runs."""
    return [round(seconds * 1e6) for seconds in profile_time(module, sample, timeout=timeout, device=device)]


def profile_sizes(
    module: nn.Sequential, input: TensorOrTensors, chunks: int, param_scale: float, device: Device
) -> list[int]:
    """Return the bytes that each layer keeps for a micro-batch, and ``param_scale`` times those of its parameters."""
    sizes = profile_size(module, input, chunks=chunks, param_scale=param_scale, device=device)
    return [int(size) for size in sizes]


def layerwise_sandbox(module: nn.Sequential, device: torch.device | str) -> Iterator[nn.Module]:
    """Yield a copy of each layer, on ``device`` and in training mode; ``module`` stays as it is."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def detach(batch: Batch) -> None:
    """Cut the tensors of ``batch`` off their graph, in place; they keep ``requires_grad``."""
    for index, tensor in enumerate(batch):
        batch[index] = tensor.detach().requires_grad_(tensor.requires_grad)
