"""Join the job that ``torchrun`` started."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

__all__ = ["init_process_group"]


def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    """Do what ``torch.distributed.init_process_group`` does, and choose the device of this rank.

    With ``torchrun --max-restarts``, the ranks of another attempt find each other: torch itself may take them for those
    of the attempt before, whose addresses are still in the store.

    Args:
        backend: ``"nccl"`` where there are GPUs, ``"gloo"`` elsewhere, by default.
        **kwargs: As for torch, such as ``timeout``.
    """
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None or "store" in kwargs or "init_method" in kwargs:
        dist.init_process_group(backend, **kwargs)
        return
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **kwargs)
