"""What a program adds to a checkpoint: one value of all ranks, so it must be the same on each."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight.distributed.agreement import Agreement, Message

__all__ = ["agree_on_extra", "same"]


def agree_on_extra(agreement: Agreement, call: Message, extra: Any) -> None:
    """Make a call of all ranks, with ``extra``; raise on every rank if it differs."""
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
                "extra must be the same on all ranks, since a checkpoint has one "
                f"(on rank {first}: {_short(other)}, on rank {dist.get_rank()}: {_short(extra)}); broadcast it "
                "from one rank, or keep what belongs to a rank in a file of that rank"
            )
        agreement.settle({"call": f"extra of {call['call']}"}, error)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal; tensors and arrays are by their numbers, NaN is equal to itself."""
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
