"""Messages that all ranks exchange before each step, so that all do the same, or all raise the same error.

The first rank knows the batch, the last one the target, and any of them may find an error. Each sends one small message
to all, so that no rank waits for another that has already failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipesight._padded_gather import PaddedGather
from pipesight._plurals import plural
from pipesight.distributed.failures import RankMonitor

__all__ = ["LAYERS", "Agreement", "DisagreementError", "differences"]

Message = dict[str, Any]

LAYERS = "the layers of the model"
"""The argument whose value is a fingerprint; it also changes with the balance."""

_EVERYONE = "all ranks to make the same call"


class DisagreementError(RuntimeError):
    """The ranks made different calls, passed different arguments, or one of them reported an error."""


class Agreement:
    """Exchanges messages among all ranks of the mesh.

    The ``group`` is of all of them, on gloo; the ``monitor`` explains what is wrong if they do not all answer.
    """

    _SIZE = 512  # bytes, enough for most messages; longer ones take a second exchange

    def __init__(self, group: dist.ProcessGroup, monitor: RankMonitor) -> None:
        self.group, self._monitor = group, monitor
        self._all_gather = PaddedGather(group)
        self.ranks = self._all_gather.ranks

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
        """Return the messages of all ranks; raise on every rank if one reports an error or makes another call."""
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
            who = _few([f"{_named(ranks)}: {call}" for call, ranks in _by_value(calls).items()])
            raise DisagreementError(f"all ranks must make the same calls in the same order ({who})")
        if differing := differences({rank: answer.get("arguments", {}) for rank, answer in messages.items()}):
            raise DisagreementError(f"all ranks must give {message['call']} the same arguments ({differing})")
        return messages

    def _gather(self, content: bytes, size: int) -> list[bytes]:
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._monitor.presence.waits_for = _EVERYONE
        try:
            rows = self._all_gather(sent, size)
        except RuntimeError as error:
            raise self._monitor.explain(error, _EVERYONE) from None
        self._monitor.presence.waits_for = None
        return [row.numpy().tobytes() for row in rows]


def differences(arguments: Mapping[int, Mapping[str, Any]]) -> str:
    """Return which arguments differ between ranks, in words; an empty string if none does."""
    found: list[str] = []
    for name in next(iter(arguments.values())):
        groups = _by_value({rank: given[name] for rank, given in arguments.items()})
        if len(groups) > 1 and not (name == LAYERS and any(text.startswith("balance:") for text in found)):
            # A fingerprint means nothing to a reader.
            values = ["some", *["others"] * (len(groups) - 1)] if name == LAYERS else list(groups)
            found.append(
                f"{name}: " + _few([f"{v} on {_named(r)}" for v, r in zip(values, groups.values(), strict=True)])
            )
    return "; ".join(found)


def _by_value(values: Mapping[int, Any]) -> dict[str, list[int]]:
    """Return the ranks by value, which is given as text."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(str(value), []).append(rank)
    return groups


def _named(ranks: list[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {_few([str(rank) for rank in ranks])}"


def _few(parts: list[str]) -> str:
    """Return the first parts, and how many more there are."""
    more = len(parts) - _NAMED
    return ", ".join(parts) if more <= 0 else f"{', '.join(parts[:_NAMED])} and {more} more"


_NAMED = 4  # ranks, or values, before the rest is counted only

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError)
}
