"""Which of several ranks reports the first bad tensor: the one that the data came to first.

Ranks leave what they found in the store of ``torch.distributed``, and speak when all had time to, a step later::

    rank 0    step 7: finds a bad gradient     step 8: rank 1 was first, says nothing
    rank 1    step 7: finds a bad activation   step 8: reports it, "on rank 1 first, of 2 ranks"
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import torch.distributed as dist

from pipesight._torch.distributed import default_store

__all__ = ["Claims"]

_sessions = itertools.count()  # ranks open sessions in the same order


class Claims:
    """What ranks found, by iteration; the least one wins.

    Args:
        patience: Seconds to wait for the other ranks at the end.
    """

    def __init__(self, *, patience: float = 2.0) -> None:
        self._key = f"pipesight/nonfinite/{next(_sessions)}"
        self._patience = patience
        self._made: dict[int, str] = {}
        self._closed = False

    def make(self, iteration: int, key: tuple[int, ...]) -> bool:
        """Leave what this rank found; tell whether there is anybody to compare it with."""
        store = _store()
        if store is None:
            return False
        mine = json.dumps([*key, dist.get_rank()])
        name = f"{self._key}/{iteration}"
        try:
            store.add(f"{name}/ranks", 1)
            held = store.compare_set(name, "", mine).decode()
            while json.loads(mine) < json.loads(held):
                held = store.compare_set(name, held, mine).decode()
        except (RuntimeError, ValueError, NotImplementedError):  # the rank that kept the store is gone
            return False
        self._made[iteration] = mine
        return True

    def were_made(self, iteration: int) -> bool:
        """Whether any rank has found something in an iteration."""
        store = _store()
        try:
            return store is not None and bool(store.check([f"{self._key}/{iteration}"]))
        except RuntimeError:
            return False

    def settle(self, iteration: int) -> int:
        """Return on how many ranks there was something, if this one was first; 0 if another was."""
        mine = self._made.pop(iteration)
        store = _store()
        try:
            if store is None:
                return 1
            name = f"{self._key}/{iteration}"
            return int(store.add(f"{name}/ranks", 0)) if store.get(name).decode() == mine else 0
        except RuntimeError:
            return 1

    def close(self) -> None:
        """Say that this rank has found everything; wait for those who have not, if it matters."""
        store = _store()
        if store is None or self._closed:
            return
        self._closed = True
        try:
            came = int(store.add(f"{self._key}/closed", 1))
            late = time.monotonic() + self._patience
            while self._made and came < dist.get_world_size() and time.monotonic() < late:
                time.sleep(0.02)
                came = int(store.add(f"{self._key}/closed", 0))
        except RuntimeError:
            return


def _store() -> Any:
    """The store that all ranks share, if there are several."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return default_store()
