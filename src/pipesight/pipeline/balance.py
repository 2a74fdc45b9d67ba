"""Choose the balance of a model by the time or memory that each layer takes."""

from __future__ import annotations

import inspect
from typing import Any, get_overloads, overload

from torch import Tensor, nn

from pipesight.pipeline.partition import non_sequential
from pipesight.pipeline.profiling import Device, Sample, profile_size, profile_time
from pipesight.schedule.balancing import balance_cost, check_partitions

__all__ = ["balance_by_size", "balance_by_time"]


@overload
def balance_by_time(
    model: nn.Sequential, sample: Sample, partitions: int, *, timeout: float = 1.0, device: Device = None
) -> list[int]: ...
@overload
def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Sample, *, timeout: float = 1.0, device: Device = None
) -> list[int]: ...
def balance_by_time(*args: Any, timeout: float = 1.0, device: Device = None, **kwargs: Any) -> list[int]:
    """Balance a model by the time that the forward and backward of each layer take in train mode.

    Example::

        microbatch = torch.rand(16, 3, 96, 96)
        balance = balance_by_time(layers, microbatch, partitions=2)

    The model and the random number generators are left as they were. Hooks of a layer run on its copy.

    Args:
        *args: ``model, sample, partitions`` or, as in torchgpipe 0.0.7, ``partitions, module, sample``.
        timeout: Seconds to spend in all, about; more where a layer takes long, since each is warmed up and then timed
            at least three times.
        device: Where to run; by default the current CUDA device, or the CPU where there is none.
        **kwargs: Any of ``model`` (or ``module``), ``sample`` and ``partitions`` by name.
    """
    model, sample, partitions = _arguments(args, kwargs, options="timeout, device")
    return balance_cost(profile_time(model, sample, timeout=timeout, device=device), partitions)


@overload
def balance_by_size(
    model: nn.Sequential,
    sample: Sample,
    partitions: int,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[int]: ...
@overload
def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Sample,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[int]: ...
def balance_by_size(
    *args: Any, chunks: int = 1, param_scale: float = 2.0, device: Device = None, **kwargs: Any
) -> list[int]:
    """Balance a model by the bytes that each layer keeps during training.

    Example::

        batch = torch.rand(64, 3, 96, 96)
        balance = balance_by_size(layers, batch, partitions=2, chunks=4, param_scale=4)  # with Adam

    The model and the random number generators are left as they were. Bytes are counted, not read off an
    allocator, and so are exact on every device::

        bytes of a layer = kept for one micro-batch + param_scale * bytes of its parameters

    Kept are the dense tensors saved for the backward, the outputs (even one that the next layer does not save)
    and the stashed skips; memory they share counts once. Not among them are parameters and buffers, nor the
    input and popped skips, which count as output or stash of the layer they come from.

    Args:
        *args: ``model, sample, partitions`` or, as in torchgpipe 0.0.7, ``partitions, module, input``.
        chunks: Number of micro-batches that ``sample`` will be cut into; the first one is run.
        param_scale: 2 for a parameter and its gradient, plus what the optimizer keeps: 1 for SGD with
            momentum, 2 for Adam.
        device: Where to run; by default the current CUDA device, or the CPU where there is none.
        **kwargs: Any of ``model`` (or ``module``), ``sample`` (or ``input``) and ``partitions`` by name.
    """
    model, sample, partitions = _arguments(args, kwargs, options="chunks, param_scale, device")
    costs = profile_size(model, sample, chunks=chunks, param_scale=param_scale, device=device)
    return balance_cost(costs, partitions)


for _function in (balance_by_time, balance_by_size):  # what help() and editors show
    _function.__signature__ = inspect.signature(get_overloads(_function)[0])  # type: ignore[union-attr]

_GUIDE_ORDER = inspect.signature(lambda model, sample, partitions: None)
_TORCHGPIPE_ORDER = inspect.signature(lambda partitions, model, sample: None)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *, options: str) -> tuple[nn.Sequential, Sample, int]:
    """Recognise the order of the arguments, and check them before anything runs."""
    got = [type(value).__name__ for value in args] + [f"{name}={type(v).__name__}" for name, v in kwargs.items()]
    for theirs, ours in (("module", "model"), ("input", "sample")):  # names in torchgpipe
        if theirs in kwargs and ours not in kwargs:
            kwargs[ours] = kwargs.pop(theirs)
    if unknown := [name for name in kwargs if name not in _GUIDE_ORDER.parameters]:
        raise TypeError(f"unexpected argument {', '.join(unknown)}; expected model, sample, partitions, {options}")
    first, second = (*args, None, None)[:2]
    order = _TORCHGPIPE_ORDER if isinstance(first, int) or isinstance(second, nn.Module) else _GUIDE_ORDER
    found = order.bind(*args, **kwargs).arguments
    model, sample, partitions = found["model"], found["sample"], found["partitions"]
    if not isinstance(model, nn.Module) or isinstance(partitions, Tensor | tuple | nn.Module):
        raise TypeError(f"expected (model, sample, partitions), but got ({', '.join(got)})")
    if not isinstance(model, nn.Sequential):
        raise non_sequential(model)
    for item in sample if isinstance(sample, tuple) else (sample,):
        if not isinstance(item, Tensor):
            where = " in a tuple" if isinstance(sample, tuple) else ""
            raise TypeError(f"expected Tensor or tuple of Tensors, but got {type(item).__name__}{where}")
    check_partitions(len(model), partitions)
    return model, sample, partitions
