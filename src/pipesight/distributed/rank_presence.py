"""What this rank is doing, told to other ranks that ask, by a thread."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from pipesight.context import Where
from pipesight.distributed.diagnosis import is_gone
from pipesight.distributed.rank_notes import RankNotes, State, store_outlives_ranks
from pipesight.distributed.symptoms import collective_of
from pipesight.pipeline.workers import place_of

__all__ = ["RankPresence"]


@dataclasses.dataclass(slots=True)
class Calls:
    """Counts the calls of a pipeline on this rank."""

    begun: int = 0
    last: str = ""
    inside: bool = False

    @contextlib.contextmanager
    def running(self, call: str, number: int) -> Iterator[None]:
        """Count a call that runs in this block."""
        self.begun, self.last, self.inside = number, call, True
        try:
            yield
        finally:
            self.inside = False


class RankPresence:
    """Where this rank is in a pipeline, and the thread that answers those who ask.

    The thread refers to no process group: where it held the last reference to one, it would free it, perhaps while
    Python shuts down, which aborts the process.
    """

    def __init__(self, notes: RankNotes, where: Where, interval: float) -> None:
        self.calls = Calls()
        self.waits_for: str | None = None
        """What this rank waits for, if it waits in a collective."""
        self.symptom: str | None = None
        """What it waited for until a connection broke."""
        self._notes, self._where, self._interval = notes, where, interval
        self._main = threading.get_ident()
        self._rounds = 0  # of the thread
        self._keeper: dict[str, Any] | None = None  # where the first rank is, which may keep the store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="pipesight-monitor", daemon=True)
        self._thread.start()

    def leave(self, patience: float) -> None:
        """End the thread, and tell the remaining ranks that this one has exited.

        A thread that comes back from a call of the store while Python shuts down aborts the process, although all went
        well. So wait for the store, which may be slow, before the note that would have to wait for it, too.
        """
        self._ended.set()
        self._thread.join(patience)
        if not self._thread.is_alive():
            self._notes.leave(self.calls.begun)

    def store_answers(self, patience: float) -> bool:
        """Return whether the store answers the thread: the rank that hosts it may have died, or hang."""
        before, until = self._rounds, time.monotonic() + patience
        while self._thread.is_alive() and self._rounds == before and time.monotonic() < until:
            time.sleep(0.02)
        return self._rounds != before

    def store_is_kept(self) -> bool:
        """Return whether the rank that keeps the store is known to be alive."""
        return self._keeper is not None and not is_gone(self._keeper)

    def place(self) -> str:
        """Return the partition, layer, micro-batch and phase that this rank is in."""
        where = self._where
        if where.phase is None:
            return "outside the pipeline" if not self.calls.inside else "between tasks of the pipeline"
        return place_of(where, where.layer)

    def state(self, question: int = 0) -> State:
        """Return what this rank is doing, as the answer to a question."""
        frame = sys._current_frames().get(self._main)
        collective = collective_of(frame)
        place = self.place()
        waits = self.symptom
        if waits is None and collective is not None:
            waits = self.waits_for or f"other ranks in {collective}, {place}"
        if frame is not None:
            code = frame.f_code
            place += f", at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        calls = {"calls": self.calls.begun, "in_call": self.calls.inside}
        return {"waits": waits, "where": place, **calls, "left": False, "question": question}

    # In the thread.

    def _answer(self) -> None:
        while not self._ended.is_set():
            try:
                self._answer_if_asked()
            except Exception:
                return  # the store is gone
            self._rounds += 1
            self._ended.wait(self._interval)

    def _answer_if_asked(self) -> None:
        if self._keeper is None and not store_outlives_ranks():
            self._keeper = self._notes.address_of(0)
        if not self._ended.is_set() and (number := self._notes.asked()) > 0:
            self._notes.answer(self.state(number))
