"""Checkpoints on disk: sharded, under the keys of the plain model, and either complete or not visible.

::

    FOLDER/step-00000100/            complete: a checkpoint of torch.distributed.checkpoint
    FOLDER/step-00000200/
    FOLDER/.step-00000300.partial/   being written; a run that is killed now resumes from 200

A checkpoint is renamed to its final name once all ranks have written. Its keys are those of the plain model, so another
number of partitions or ranks can load it, and so can the plain model::

    torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id="FOLDER/step-00000200")
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer

from pipesight._logger import own_logger
from pipesight.distributed.agreement import Agreement, Message

__all__ = ["Preemption", "agree_on_extra", "complete", "latest", "load", "same", "save"]

logger = own_logger(__name__)

_NAME = re.compile(r"step-(\d+)")
# By name, not by number, so that any rank can hold any part.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the latest last."""
    found = [(int(match[1]), path) for path in Path(folder).glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Return the name of the latest checkpoint; ``None`` without any, ``ValueError`` if all are incomplete."""
    broken: dict[Path, str] = {}
    for path in reversed(complete(folder)):
        if (why := _damage(path)) is None:
            for other, reason in broken.items():
                warnings.warn(f"{other} is incomplete ({reason}); resuming from {path.name} instead", stacklevel=2)
            return path.name
        broken[path] = why
    if broken:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in broken.items())
        raise ValueError(f"no checkpoint in {folder} is complete ({reasons}); remove them to start from scratch")
    return None


def _damage(path: Path) -> str | None:
    """Return what is missing from a checkpoint, cut off by a full disk or an interrupted copy; else ``None``."""
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
    """Write a checkpoint, on all ranks of ``group`` together; return its path."""
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
    """Rename a checkpoint to its final name, once all its files are on disk."""
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
    """Silence torch's warnings about its own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        yield


def agree_on_extra(agreement: Agreement, call: Message, extra: Any) -> None:
    """Agree with all ranks on a call and its ``extra``; raise on every rank if that differs."""
    pickled = pickle.dumps(extra)
    digest = hashlib.blake2b(pickled, digest_size=16).hexdigest()
    messages = agreement.settle({**call, "extra": digest})
    if len({message["extra"] for message in messages.values()}) > 1:  # equal values may be pickled in several ways
        first = agreement.ranks[0]
        theirs = [pickled]
        dist.broadcast_object_list(theirs, first, group=agreement.group, device=torch.device("cpu"))
        other = pickle.loads(theirs[0])
        error: Exception | None = None
        if not same(other, pickle.loads(pickled)):
            error = ValueError(
                "extra must be the same on all ranks, because a checkpoint holds only one "
                f"(on rank {first}: {_short(other)}, on rank {dist.get_rank()}: {_short(extra)}); broadcast it "
                "from one rank, or save what belongs to one rank in a file of its own"
            )
        agreement.settle({"call": f"extra of {call['call']}"}, error)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; tensors and arrays by their values, with NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
    if hasattr(one, "__dict__") and "__eq__" not in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}:
        return same(vars(one), vars(other))
    return pickle.dumps(one) == pickle.dumps(other) or _equal(one, other)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # it does not know, as arrays
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Preemption:
    """Notes SIGTERM, which precedes a preemption; all ranks then save a checkpoint at the next step and exit.

    The ranks share it before each step, so it is enough that one of them receives the signal.
    """

    def __init__(self) -> None:
        self.asked = False
        """Whether this rank has received the signal."""
        self._save: Callable[[], Path] | None = None

    def on_sigterm(self, save: Callable[[], Path]) -> None:
        """Install the signal handler; ``save`` writes the checkpoint and returns its path."""
        self._save = save
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: Any) -> None:
        self.asked = True

    def leave(self) -> None:
        """Save, and exit with code 143; do nothing if `on_sigterm` was not called."""
        if self._save is None:
            return
        path = self._save()
        logger.warning("received SIGTERM: saved %s and exiting", path)
        sys.exit(128 + signal.SIGTERM)
