"""What stages of torch send to each other: which micro-batch it is of, and how long a rank waits for it.

A stage makes the operations, a schedule posts them and waits for them later::

    get_fwd_recv_ops(i) -> P2POp(irecv, tensor, peer)     known by its tensor, until it is posted
    dist.irecv(tensor, ...) -> Work                       known by its Work, until it is waited for
    Work.wait()
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from pipesight._patches import Patches
from pipesight.context import Where

__all__ = ["RankMessages"]

_MAKERS = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops")


class _Message(NamedTuple):
    stage: Any
    microbatch: int
    peer: int
    tensor: Any  # kept, so that no other has its ID


class RankMessages:
    """Follows the messages of the pass under way."""

    def __init__(self) -> None:
        self.here: Callable[[], Where] | None = None
        """During a pass, returns the place of the calling thread."""
        self._made: defaultdict[int, list[_Message]] = defaultdict(list)
        self._posted: dict[int, tuple[Any, _Message]] = {}

    def attach(self, patches: Patches, stage_class: Any) -> None:
        """Start to follow messages."""
        for name in _MAKERS:
            patches.wrap(stage_class, name, self._making)
        patches.wrap(dist.distributed_c10d, "isend", partial(self._post, False))
        patches.wrap(dist.distributed_c10d, "irecv", partial(self._post, True))
        patches.wrap(dist.Work, "wait", self._waiting)

    def end_pass(self) -> None:
        """Forget what was never posted or waited for."""
        self.here = None
        self._made.clear()
        self._posted.clear()

    def _making(self, original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any) -> Any:
        ops = original(stage, *args, **kwargs)
        if self.here is not None:
            (i,) = (*args, *kwargs.values())
            for op in ops:
                self._made[id(op.tensor)].append(_Message(stage, i, op.peer, op.tensor))
        return ops

    def _post(self, receives: bool, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = self._made.get(id(args[0])) if args else None
        if self.here is None or not made:
            return original(*args, **kwargs)
        where = self.here()
        message = made.pop(0)
        if not made:
            del self._made[id(message.tensor)]
        _enter(where, message)
        try:
            work = original(*args, **kwargs)
        finally:
            where.peer = None
        if receives and work is not None and message.tensor.device.type == "cpu":  # on a GPU, a wait only queues
            self._posted[id(work)] = work, message
        return work

    def _waiting(self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        _, message = self._posted.pop(id(work), (None, None))
        if self.here is None or message is None or not (where := self.here()).observers.members:
            return original(work, *args, **kwargs)
        _enter(where, message)
        details = (f"rank {message.peer}", f"rank {dist.get_rank()}", message.tensor.nbytes)
        where.observers.transfer_started(where, *details)
        try:
            return original(work, *args, **kwargs)
        finally:
            where.peer = None
            where.observers.transfer_ended(where, *details)


def _enter(where: Where, message: _Message) -> None:
    """Set the context to a micro-batch that is received from, or sent to, another rank."""
    stage = message.stage
    where.partition, where.microbatch, where.device, where.peer = (
        stage.stage_index,
        message.microbatch,
        stage.device,
        message.peer,
    )
