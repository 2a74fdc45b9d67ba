"""Checkpoints of a run: sharded, under the keys of the plain model, and whole or not there.

::

    FOLDER/step-00000100/            complete: a checkpoint of torch.distributed.checkpoint
    FOLDER/step-00000200/
    FOLDER/.step-00000300.partial/   being written; a run that is killed now resumes from 200

A checkpoint gets its name when all ranks have written, and all at once. Since its keys are those of the plain model,
another number of partitions or ranks can load it, and so can the plain model::

    torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id="FOLDER/step-00000200")
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer

__all__ = ["complete", "latest", "load", "save"]

_NAME = re.compile(r"step-(\d+)")
# By name, not by number, so that any rank can hold any part.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the latest last."""
    found = [(int(match[1]), path) for path in Path(folder).glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Return the name of the latest checkpoint that can be read; ``None`` if there is none at all.

    Raises:
        ValueError: There are some, but all are cut off.
    """
    broken: dict[Path, str] = {}
    for path in reversed(complete(folder)):
        if (why := _damage(path)) is None:
            for other, reason in broken.items():
                warnings.warn(f"{other} is cut off ({reason}); going on from {path.name} instead", stacklevel=2)
            return path.name
        broken[path] = why
    if broken:
        told = "; ".join(f"{path.name}: {why}" for path, why in broken.items())
        raise ValueError(f"no checkpoint in {folder} is whole ({told}); to begin anew, remove them")
    return None


def _damage(path: Path) -> str | None:
    """Say what is missing of a checkpoint; a disk that was full, or a copy that broke off, may have cut it."""
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        return f".metadata cannot be read: {type(error).__name__}"
    sizes: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else 0
        if found < size:
            return f"{name} has {found} of {size} bytes"
    return None


def save(
    folder: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    *,
    step: int,
    keep: int,
    group: dist.ProcessGroup,
) -> Path:
    """Write a checkpoint, on all ranks of ``group`` together; return where it is."""
    target = Path(folder) / f"step-{step:08d}"
    partial = target.with_name(f".{target.name}.partial")
    first = dist.get_rank() == dist.get_process_group_ranks(group)[0]
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group)
    with _calm():
        save_shards(_state(module, optimizer, pickle.dumps(extra)), checkpoint_id=partial, process_group=group)
    dist.barrier(group)
    if first:
        _put_in_place(partial, target)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier(group)
    return target


def load(path: Path, module: nn.Module, optimizer: Optimizer | None, *, group: dist.ProcessGroup) -> Any:
    """Read a checkpoint into the module and the optimizer, on all ranks of ``group`` together; return its extra."""
    state = _state(module, optimizer, b"")
    with _calm():
        load_shards(state, checkpoint_id=path, process_group=group)
        module.load_state_dict(state["model"])
        if optimizer is not None:
            set_optimizer_state_dict(module, optimizer, state["optimizer"], options=_OPTIONS)
    return pickle.loads(state["extra"]["pickled"])


def _state(module: nn.Module, optimizer: Optimizer | None, extra: bytes) -> dict[str, Any]:
    state: dict[str, Any] = {"model": module.state_dict(), "extra": {"pickled": extra}}
    if optimizer is not None:
        with torch.enable_grad():
            state["optimizer"] = get_optimizer_state_dict(module, optimizer, options=_OPTIONS)
    return state


def _put_in_place(partial: Path, target: Path) -> None:
    """Give a checkpoint its name, once all that it consists of is on the disk."""
    for path in [*partial.iterdir(), partial]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if target.exists():  # a run that was set back saves the same step again
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(target)


@contextmanager
def _calm() -> Iterator[None]:
    """Keep torch from warning about its own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        yield
