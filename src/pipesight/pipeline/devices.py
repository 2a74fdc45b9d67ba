"""The devices of a pipeline's partitions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["choose_devices"]


def choose_devices(devices: Iterable[torch.device | str | int] | None, partitions: int) -> list[torch.device]:
    """Return one device per partition: those given, all GPUs, or the CPU."""
    if isinstance(devices, str | int | torch.device):
        kind, one = type(devices).__name__, devices if isinstance(devices, int) else str(devices)
        raise TypeError(
            f"devices must be a list, but got the {'string' if kind == 'str' else kind} {one!r}: "
            f"devices={[one]} * {partitions}"
        )
    if devices is not None:
        chosen = [torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in devices]
    elif torch.cuda.is_available():
        chosen = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        chosen = [torch.device("cpu")] * partitions
    if len(chosen) < partitions:
        raise IndexError(
            f"too few devices to hold the partitions (devices: {len(chosen)}, partitions: {partitions}); one device "
            f"can hold several: devices={[str(chosen[0]) if chosen else 'cpu']} * {partitions}"
        )
    # "cuda" means the current device, which is another thing in another thread.
    return [
        torch.device("cuda", torch.cuda.current_device()) if d.type == "cuda" and d.index is None else d
        for d in chosen[:partitions]
    ]
