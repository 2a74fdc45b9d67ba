"""The kinds of operations that a step of a job consists of, by the names that traces of operations have for them.

A worker runs its operations in streams: one for computing, and one for each kind of message or collective; the
collectives after the last backward follow each other. Who takes part in a communication depends on its kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["KINDS", "OperationKind", "Role", "codes_of", "collectives", "computing", "number_of"]

Role: TypeAlias = Literal["compute", "before", "after", "message"]
"""Runs in the compute stream; a collective before the first forward; one after the last backward; a message."""

Peers: TypeAlias = Literal["none", "replicas", "ends", "widest", "named", "message"]
"""Who synchronises: nobody; a stage's replicas; the first and the last stage of a replica; as many as the recording
agrees with, of all workers, those of a replica, or one; those with the same number for ``chunk``; a sender and its
receiver."""


@dataclass(frozen=True, slots=True)
class OperationKind:
    """What operations of one kind do."""

    name: str
    """As traces have it."""
    role: Role
    """What it waits for, and what waits for it."""
    peers: Peers = "none"
    """Who takes part."""

    @property
    def is_communication(self) -> bool:
        """Whether it may have peers that it waits for."""
        return self.role != "compute" or self.peers != "none"


KINDS = (
    OperationKind("forward-compute", "compute"),
    OperationKind("backward-compute", "compute"),
    OperationKind("forward-send", "message", "message"),
    OperationKind("forward-recv", "message", "message"),
    OperationKind("backward-send", "message", "message"),
    OperationKind("backward-recv", "message", "message"),
    OperationKind("params-all-gather", "before", "replicas"),
    OperationKind("grads-reduce-scatter", "after", "replicas"),
    OperationKind("layernorm-grads-all-reduce", "after"),
    OperationKind("embedding-grads-all-reduce", "after", "ends"),
    OperationKind("optimizer-clip-main-grad", "after", "widest"),
    OperationKind("optimizer", "compute"),
    OperationKind("gc", "compute"),
    # Of our own recordings; ranks make these calls in the thread that computes.
    OperationKind("recompute", "compute"),
    OperationKind("weight-gradients", "compute"),
    OperationKind("loss", "compute"),
    OperationKind("data-loading", "compute"),
    OperationKind("saving", "compute"),
    OperationKind("host", "compute"),
    OperationKind("collectives", "compute", "named"),
)
"""All kinds; operations have the numbers of theirs."""

_NUMBERS = {kind.name: number for number, kind in enumerate(KINDS)}


def number_of(name: str) -> int:
    """Return the number of a kind."""
    return _NUMBERS[name]


def codes_of(role: Role) -> list[int]:
    """Return the numbers of the kinds with this role."""
    return [number for number, kind in enumerate(KINDS) if kind.role == role]


def computing() -> list[int]:
    """Return the numbers of the kinds that a worker runs alone."""
    return [number for number, kind in enumerate(KINDS) if not kind.is_communication]


def collectives() -> list[int]:
    """Return the numbers of the kinds that several workers may run together, without messages."""
    return [n for n, kind in enumerate(KINDS) if kind.is_communication and kind.role != "message"]
