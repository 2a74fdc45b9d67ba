"""``torchgpipe.gpipe``, for pipesight: `GPipe`, and its parts for programs that cut a model themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import nn

from pipesight import GPipe
from pipesight.pipeline.devices import choose_devices
from pipesight.pipeline.gpipe import balance_recipe
from pipesight.pipeline.microbatch import TensorOrTensors
from pipesight.pipeline.partition import split
from pipesight.pipeline.partition import verify_sequential as verify_module
from pipesight.schedule.argument_checks import check_balance

__all__ = [
    "BalanceError",
    "GPipe",
    "NamedModules",
    "TensorOrTensors",
    "recommend_auto_balance",
    "split_module",
    "verify_module",
]

NamedModules = OrderedDict[str, nn.Module]


class BalanceError(ValueError):
    """A balance that does not fit the model."""


def recommend_auto_balance(message: str) -> str:
    """Return ``message`` with code that finds a balance."""
    return message + balance_recipe()


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: Iterable[torch.device | str | int]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Move the layers of ``module`` into partitions; return these, the balance, and the devices they are on.

    Raises:
        BalanceError: The balance is not that of ``module``.
        IndexError: There are fewer devices than partitions.
    """
    try:
        sizes = check_balance(balance, len(module))
    except ValueError as error:
        raise BalanceError(str(error)) from None
    used = choose_devices(devices, len(sizes))
    return nn.ModuleList(split(module, sizes, used, deferred_batch_norm=False)), sizes, used
