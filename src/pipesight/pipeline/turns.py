"""Whose turn it is on a worker, and which thread takes it: a worker's tasks run one after the other, in any thread.

A thread that runs the model has to stay with its micro-batch until the end of its forward. Everything else is run by
whichever thread is free. One that ends a task goes on with the next that is ready, so a thread is woken up only for
what no other goes on with: woken threads that share a core with the one that woke them, while another core is idle,
cost more than anything else here.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from pipesight.pipeline.mailbox import Mailboxes, Packet
from pipesight.schedule.task_orders import F
from pipesight.schedule.worker_orders import Task

__all__ = ["Turns"]

_WAKE = Packet([], torch.device("cpu"))


class Turns:
    """Gives each task of a worker its turn, and a thread.

    Args:
        orders: The tasks of each worker, in their order.
        homes: The worker of each partition.
        threads: Those that run them, by their identifiers.
        mailboxes: Those of the pass, which end the waiting when it fails.
        flying: How many micro-batches may be in the middle of their forward at once, each with a thread of its own.
            The other threads are enough for everything else.
        alone: Micro-batches whose forwards never wait for a turn, and are not counted.
        needs: For how many things a task waits besides its turn, until `supply` says that they are there.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Task]],
        homes: Sequence[int],
        threads: Iterable[int | None],
        mailboxes: Mailboxes,
        *,
        flying: int,
        alone: Collection[int] = (),
        needs: Mapping[Task, int] = MappingProxyType({}),
    ) -> None:
        self._orders, self._homes, self._mailboxes = orders, homes, mailboxes
        self._flying, self._alone = flying, alone
        self._lock = threading.Lock()
        self._at = [0] * len(orders)
        self._left = sum(map(len, orders))
        self._needs = dict(needs)
        self._open: list[Task] = []  # any free thread can begin these
        self._travellers: dict[Task, int] = {}  # the threads that wait for the turn of their forward
        self._free: list[int] = []  # the threads that wait for anything, the last one to do so at the end
        self._given: dict[int, Task | None] = {}  # what a thread was woken up for
        mailboxes.add(("thread", thread) for thread in threads)
        for d in range(len(orders)):
            self._offer(d)

    def supply(self, tasks: Iterable[tuple[Task, int]]) -> None:
        """Take what is there from what these tasks need; tasks that are in no order are passed over.

        The calling thread is about to `end` its task, and goes on with one of these, if it can: another thread that was
        woken up for it now would take the core of one that this thread wakes up when it ends.
        """
        with self._lock:
            for task, count in tasks:
                if task in self._needs:
                    self._needs[task] -= count
                    if not self._needs[task] and self._is_due(task):
                        self._open.append(task)

    def next(self) -> Task | None:
        """Return a task for the calling thread, which is free: the first of a micro-batch, or any that is no forward.

        Wait for one; return None when all are done.
        """
        self._mailboxes.check()
        with self._lock:
            task = self._pick()
            self._wake()
            if task is not None or not self._left:
                return task
            me = threading.get_ident()
            self._free.append(me)
        return self._wait(me)

    def end(self, task: Task) -> None:
        """End the turn of a task. The calling thread is free, and calls `next` at once."""
        self._mailboxes.check()
        with self._lock:
            self._advance(task)

    def go_on(self, task: Task, following: Task) -> None:
        """End the turn of a forward, and wait for that of the next one of its micro-batch."""
        self._mailboxes.check()
        me = threading.get_ident()
        with self._lock:
            self._advance(task)
            waits = not self._is_due(following)
            if waits:
                self._travellers[following] = me
            self._wake()
        if waits:
            self._wait(me)

    # With the lock held.

    def _is_due(self, task: Task) -> bool:
        d = self._homes[task[2]]
        order, at = self._orders[d], self._at[d]
        return at < len(order) and order[at] == task

    def _advance(self, task: Task) -> None:
        kind, i, j = task
        d = self._homes[j]
        self._at[d] += 1
        self._left -= 1
        if kind == F and j == len(self._homes) - 1 and i not in self._alone:
            self._flying += 1
        self._offer(d)
        if not self._left:
            while self._free:
                self._give(self._free.pop(), None)

    def _offer(self, d: int) -> None:
        """Let a thread begin what is due on a worker, if nothing is missing."""
        order, at = self._orders[d], self._at[d]
        if at == len(order):
            return
        task = order[at]
        if task[0] == F and task[2]:
            traveller = self._travellers.pop(task, None)
            if traveller is not None:
                self._give(traveller, task)
        elif not self._needs.get(task):
            self._open.append(task)

    def _pick(self) -> Task | None:
        for k, (kind, i, _) in reversed([*enumerate(self._open)]):
            if kind != F or i in self._alone:
                return self._open.pop(k)
            if self._flying:
                self._flying -= 1
                return self._open.pop(k)
        return None

    def _wake(self) -> None:
        """Wake up free threads for what is open."""
        while self._free and self._open and (task := self._pick()) is not None:
            self._give(self._free.pop(), task)

    def _give(self, thread: int, task: Task | None) -> None:
        self._given[thread] = task
        self._mailboxes.put(("thread", thread), _WAKE, 0)

    # Without it.

    def _wait(self, thread: int) -> Task | None:
        self._mailboxes.get(("thread", thread), 0)
        return self._given.pop(thread)
