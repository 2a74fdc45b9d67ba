"""What the ranks of a pipeline write into the store of the process group, to find out which of them failed.

::

    failure          the note of the first rank that failed: all ranks raise it
    told/RANK        this rank has read it
    question         how often a rank has asked all others where they are, after a timeout or a broken connection
    state/RANK       the answer of each
    left/RANK        how many calls a rank made that has exited since
    address/RANK     where to check whether the process is alive
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from pipesight._torch.default_store import default_store
from pipesight.distributed.diagnosis import is_gone

__all__ = ["ANSWERS", "RankNotes", "State", "store_outlives_ranks"]

ANSWERS = 5.0
"""Seconds for ranks to answer a question."""
_LINGERS = 5.0  # seconds that the rank with the store waits for others to read a note

State: TypeAlias = dict[str, Any]
"""What a rank is doing: what it waits for, where it is, how many calls it has made, whether it has exited."""


class RankNotes:
    """Reads and writes the notes. If the store is gone, reading raises.

    The ``address`` is where others can check whether this process is alive.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], address: Any) -> None:
        self._rank, self._ranks = rank, ranks
        self._store: Any = dist.distributed_c10d.PrefixStore(f"pipesight/{name}", _own_client())
        self._store.set(f"address/{rank}", json.dumps(address))

    def write_failure(self, text: str, error: BaseException | None = None) -> None:
        """Tell all ranks what failed, unless one already has."""
        lines = traceback.format_exception(error) if error is not None else []
        note = json.dumps({"rank": self._rank, "text": text, "traceback": "".join(lines)[-20_000:]})
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.compare_set("failure", "", note)

    def has_failure(self) -> bool:
        """Return whether a rank has written a failure."""
        return bool(self._store.check(["failure"]))

    def read_failure(self, patience: float) -> dict[str, Any] | None:
        """Return the note of a failure; wait a while for it, and longer if a rank is about to write one."""
        until = latest = time.monotonic() + patience
        asked = self.asked() if patience else 0
        while True:
            if self.has_failure():
                note: dict[str, Any] = json.loads(self._store.get("failure"))
                return note
            if time.monotonic() > until:
                return None
            if patience and self.asked() > asked:
                until = latest + ANSWERS
            time.sleep(0.02)

    def confirm(self) -> None:
        """Say that this rank has read the failure."""
        with contextlib.suppress(Exception):
            self._store.set(f"told/{self._rank}", "")

    def ask(self) -> int:
        """Ask all ranks where they are; return the number of the question."""
        return int(self._store.add("question", 1))

    def asked(self) -> int:
        """Return the number of the latest question, 0 if there was none."""
        return int(self._store.add("question", 0))

    def answer(self, state: State) -> None:
        """Answer a question."""
        self._store.set(f"state/{self._rank}", json.dumps(state))

    def answer_of(self, rank: int, number: int) -> State | None:
        """Return what a rank has answered to this question or a later one, or left when it exited."""
        for key in (f"left/{rank}", f"state/{rank}"):
            if self._store.check([key]):
                state: State = json.loads(self._store.get(key))
                if state["left"] or state["question"] >= number:
                    return state
        return None

    def address_of(self, rank: int) -> dict[str, Any] | None:
        """Return where to check whether a rank is alive, once it has said so."""
        key = f"address/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def is_gone(self, rank: int) -> bool:
        """Return whether the process of a rank has ended; wait for its address if need be."""
        return is_gone(json.loads(self._store.get(f"address/{rank}")))

    def leave(self, calls: int) -> None:
        """Leave a note for the remaining ranks; if this rank hosts the store, let them read that of a failure first."""
        with contextlib.suppress(Exception):
            if store_outlives_ranks():
                left = {"waits": None, "calls": calls, "in_call": False, "left": True, "question": 0}
                self._store.set(f"left/{self._rank}", json.dumps(left))
            elif self._rank == 0 and self.has_failure():
                self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        ranks = [rank for rank in self._ranks if rank != self._rank]
        until = time.monotonic() + _LINGERS
        while ranks and time.monotonic() < until:
            unread = [rank for rank in ranks if not self._store.check([f"told/{rank}"])]
            ranks = [rank for rank in unread if not self.is_gone(rank)]
            time.sleep(0.02)


def store_outlives_ranks() -> bool:
    """Return whether torchrun hosts the store, and not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_client() -> Any:
    """Return a client of the default store that can be used while the main thread waits for the store."""
    store: Any = default_store()
    try:
        return store.clone()
    except Exception:  # not before torch 2.8, nor for every kind
        return store
