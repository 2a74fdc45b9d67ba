"""Whose turn it is on a worker: its tasks run one after the other, in whichever threads they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from pipesight.pipeline.mailbox import Mailboxes, Packet
from pipesight.schedule.worker_orders import Task

__all__ = ["NOTHING", "Turns"]

NOTHING = Packet([], torch.device("cpu"))
"""Says that something has happened."""


class Turns:
    """Passes the turn from each task of a worker to the next.

    Args:
        orders: The tasks of each worker, in their order.
        mailboxes: Those of the pass, which end the waiting when it fails.
    """

    def __init__(self, orders: Sequence[Sequence[Task]], mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._next = {a: b for order in orders for a, b in itertools.pairwise(order)}
        mailboxes.add(("turn", task) for order in orders for task in order)
        for order in orders:
            if order:
                mailboxes.put(("turn", order[0]), NOTHING, 0)

    def take(self, task: Task) -> None:
        """Wait for the turn of a task."""
        self._mailboxes.get(("turn", task), 0)

    def give(self, task: Task) -> None:
        """End the turn of a task."""
        if (following := self._next.get(task)) is not None:
            self._mailboxes.put(("turn", following), NOTHING, 0)
