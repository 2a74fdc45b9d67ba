"""Join the job that ``torchrun`` started."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

__all__ = ["init_process_group"]

_PATIENCE = timedelta(minutes=10)  # for all ranks to join


def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    """Do what ``torch.distributed.init_process_group`` does, and choose the device of this rank.

    With ``torchrun --max-restarts``, restarted ranks find each other; torch itself may connect them to addresses of
    the previous attempt, which are still in the store.

    Args:
        backend: ``"nccl"`` where there are GPUs, ``"gloo"`` elsewhere, by default.
        **kwargs: As for torch, such as ``timeout``.
    """
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ or "store" in kwargs or "init_method" in kwargs:
        dist.init_process_group(backend, **kwargs)
        return
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore(_attempt(PrefixStore("pipesight/attempts", store), rank, size), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **kwargs)


def _attempt(store: Store, rank: int, size: int, patience: timedelta = _PATIENCE) -> str:
    """Return a name that all ranks of this attempt share, and no earlier attempt had.

    torchrun counts restarts per node, so the ranks of one attempt may have different counts. The first rank makes up
    the name. Every other rank asks under a key of its own, because the store may hold an answer to an earlier attempt,
    and confirms the answer, because the question may be from an earlier attempt, too::

        rank 1   ask/1 = a question         ──>  rank 0   answer/QUESTION = the attempt
                 ATTEMPT/1 = got it         <──
    """
    mine = uuid.uuid4().hex
    if rank != 0:
        store.set(f"ask/{rank}", mine)
        store.wait([f"answer/{mine}"], patience)
        attempt = store.get(f"answer/{mine}").decode()
        store.set(f"{attempt}/{rank}", "got it")
        return attempt
    missing = set(range(1, size))
    answered: set[str] = set()
    until = time.monotonic() + patience.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"ask/{other}"]) and (question := store.get(f"ask/{other}").decode()) not in answered:
                store.set(f"answer/{question}", mine)
                answered.add(question)
        missing = {other for other in missing if not store.check([f"{mine}/{other}"])}
        if time.monotonic() > until:
            raise TimeoutError(
                f"not all ranks joined within {patience.total_seconds():g} s (missing: {sorted(missing)})"
            )
        time.sleep(0.01)
    return mine
