"""What the ranks tell each other before each step, so that all do the same, or all raise the same error.

The first rank knows the batch, the last one the target, and any of them may find something wrong. Each sends one small
message to all; so every rank knows the whole, and the others do not wait for one that has given up.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight.distributed.failures import Watch

__all__ = ["Agreement", "DisagreementError"]

Message = dict[str, Any]

_EVERYONE = "all ranks to make the same call"


class DisagreementError(RuntimeError):
    """The ranks do not call the same thing, or one of them cannot do it."""


class Agreement:
    """Exchanges messages among all ranks of the mesh.

    Args:
        group: All of them, on gloo.
        watch: Says what is wrong if they do not all come.
    """

    _SIZE = 512  # what most messages fit in; longer ones take a second exchange

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self.group, self._watch = group, watch
        self.ranks = dist.get_process_group_ranks(group)
        self._lent: list[Tensor] = []  # else a thread of gloo's may be the last to let go, at exit

    def exchange(self, message: Message) -> dict[int, Message]:
        """Return the messages of all ranks, by rank."""
        text = json.dumps(message).encode()
        header = len(text).to_bytes(8, "little") + text[: self._SIZE - 8]
        parts = self._gather(header, self._SIZE)
        sizes = [int.from_bytes(part[:8], "little") for part in parts]
        texts = [part[8 : 8 + size] for part, size in zip(parts, sizes, strict=True)]
        if max(sizes) > self._SIZE - 8:
            texts = [part[:size] for part, size in zip(self._gather(text, max(sizes)), sizes, strict=True)]
        return {rank: json.loads(part) for rank, part in zip(self.ranks, texts, strict=True)}

    def settle(self, message: Message, error: Exception | None = None) -> dict[int, Message]:
        """Return the messages of all ranks; raise on every rank if one brings an error, or calls something else."""
        if error is not None:
            notes = getattr(error, "__notes__", [])
            message["error"] = [type(error).__name__, "\n".join([str(error), *notes])]
        messages = self.exchange(message)
        wrong = {rank: answer["error"] for rank, answer in messages.items() if answer.get("error")}
        if error is not None:
            raise error
        if wrong:
            rank, (name, text) = next(iter(wrong.items()))
            raise _KINDS.get(name, DisagreementError)(f"{text}\non rank {rank}")
        calls = {rank: answer["call"] for rank, answer in messages.items()}
        if len(set(calls.values())) > 1:
            who = ", ".join(f"rank {rank}: {call}" for rank, call in calls.items())
            raise DisagreementError(f"all ranks must make the same calls in the same order ({who})")
        return messages

    def _gather(self, content: bytes, size: int) -> list[bytes]:
        sent = torch.zeros(size, dtype=torch.uint8, device="cpu")
        sent[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        received = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in self.ranks]
        self._lent = [sent, *received]
        self._watch.waits_for = _EVERYONE
        try:
            dist.all_gather(received, sent, group=self.group)
        except RuntimeError as error:
            raise self._watch.explain(error, _EVERYONE) from None
        self._watch.waits_for = None
        return [part.numpy().tobytes() for part in received]


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError)
}
