"""When a rank fails or hangs, the others find out which one and why, and stop waiting for it.

A rank that fails writes a note for the others (`rank_notes`) and closes its connections. Ranks that wait for it get an
error at once, wherever they wait: in the pipeline, in a collective of a layer, or in one of the user's between steps.
They read the note and raise `RankFailedError` with the cause.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pipesight._gloo_exit import wait_for_gloo_at_exit
from pipesight.context import Where
from pipesight.distributed import diagnosis
from pipesight.distributed.diagnosis import Answers, LivenessPort
from pipesight.distributed.rank_notes import ANSWERS, RankNotes, State, store_outlives_ranks
from pipesight.distributed.rank_presence import RankPresence
from pipesight.distributed.symptoms import is_late, is_symptom, seconds_waited

__all__ = ["RankFailedError", "RankMonitor"]

_PATIENCE = 1.0  # seconds for a note to appear, after a connection broke
_STORE = 15.0  # seconds for the store to answer
_NO_TAG = 1_000_003  # of nothing that is ever sent: a real message must not meet a receiver of another size
_COURTESY = 0.3  # seconds for the rank that failed to print its error first


class RankFailedError(RuntimeError):
    """Another rank failed, died, or hangs."""


class RankMonitor:
    """Watches the other ranks of one pipeline, and answers their questions about this one.

    ``groups`` begin with the one that has all ranks. ``timeout`` is in seconds, if the user chose any: a rank that
    keeps others waiting for longer counts as hanging.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], where: Where, timeout: float | None) -> None:
        self._groups, self._timeout = groups, timeout
        self._ranks, self._rank = dist.get_process_group_ranks(groups[0]), dist.get_rank()
        port = LivenessPort()
        self._notes = RankNotes(groups[0].group_name, self._rank, self._ranks, port.address())
        interval = 0.5 if timeout is None else min(0.5, max(0.1, timeout / 10))
        self.presence = RankPresence(self._notes, where, interval)
        self._lost = False  # the store
        _tell_uncaught(self)
        wait_for_gloo_at_exit()
        weakref.finalize(self, _leave, self.presence, port)  # at exit at the latest

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank fails, and end their wait for it."""
        self._note(error)
        self._break()

    def _note(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        self._notes.write_failure(f"rank {self._rank} failed: {text}", error)

    def _break(self) -> None:
        """Close the connections, with a wait that times out at once: gloo has no other way."""
        for group in self._groups:
            for peer in range(dist.get_world_size(group)):
                with contextlib.suppress(Exception):
                    if peer == dist.get_rank(group):
                        continue
                    if "gloo" in str(dist.get_backend(group)):
                        work = dist.irecv(torch.empty(1), group=group, tag=_NO_TAG, group_src=peer)
                        if work is not None:
                            work.wait(timedelta(milliseconds=1))
                    else:
                        group.abort()

    @contextlib.contextmanager
    def explaining(self, waited_for: str) -> Iterator[None]:
        """Turn transport errors in a block that waits for other ranks into `RankFailedError`."""
        self.presence.waits_for = waited_for
        try:
            yield
        except Exception as error:
            if isinstance(error, RankFailedError) or not is_symptom(error):
                raise
            raise self.explain(error, waited_for) from None
        finally:
            self.presence.waits_for = None

    def explain(self, error: BaseException, waited_for: str | None = None) -> RankFailedError:
        """Return the error that names the rank behind a transport error."""
        notes = getattr(error, "__notes__", [])
        waited_for = waited_for or f"other ranks {notes[0] if notes else self.presence.place()}"
        self.presence.symptom = waited_for
        hurry = is_late(error)
        self._lost = not self.presence.store_answers(_STORE)
        note = None if self._lost else self._read(0.0 if hurry else _PATIENCE)
        if note is None and not self._lost:
            self._diagnose(error, waited_for, hurry)
            note = self._read(_PATIENCE)
        self._break()
        if note is None:
            return RankFailedError(self._store_gone(waited_for))
        self._notes.confirm()
        if note["rank"] != self._rank and note["traceback"]:
            time.sleep(_COURTESY)
        return RankFailedError(note["text"])

    def _read(self, patience: float) -> dict[str, Any] | None:
        """Return the note of a failure, if there is one and the store answers."""
        try:
            return self._notes.read_failure(patience)
        except Exception:
            self._lost = True
            return None

    def _diagnose(self, error: BaseException, waited_for: str, hurry: bool) -> None:
        """Ask all ranks where they are, and write a note that names the cause, unless another rank has."""
        with contextlib.suppress(Exception):
            number = self._notes.ask()
            states: dict[int, State] = {self._rank: self.presence.state()}
            silent, gone = [rank for rank in self._ranks if rank not in states], set[int]()
            until = time.monotonic() + ANSWERS
            while not self._notes.has_failure() and time.monotonic() < until:
                # First: a rank that exited left its note before its process ended.
                gone = {rank for rank in silent if self._notes.is_gone(rank)}
                answers = {rank: state for rank in silent if (state := self._notes.answer_of(rank, number)) is not None}
                states |= answers
                silent = [rank for rank in silent if rank not in answers]
                gone &= set(silent)
                if len(gone) == len(silent):
                    break
                time.sleep(0.05)
            calls = self.presence.calls
            known = Answers(self._rank, waited_for, calls.begun, calls.last, states, silent, gone)
            text = (
                diagnosis.late(known, seconds_waited(error) or self._timeout)
                if hurry
                else diagnosis.broken(known, str(error))
            )
            self._notes.write_failure(text)

    def _store_gone(self, waited_for: str) -> str:
        if store_outlives_ranks():
            host = os.environ.get("MASTER_ADDR", "?")
            return f"waited for {waited_for}, but the store on {host} is gone; see the log there for the cause"
        what = "does not answer" if self.presence.store_is_kept() else "died"
        return f"rank 0 {what}, and with it the store: rank {self._rank} waited for {waited_for}"


def _leave(presence: RankPresence, port: LivenessPort) -> None:
    presence.leave(_STORE)
    port.close()


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _tell_uncaught(monitor: RankMonitor) -> None:
    """If an exception outside the pipeline ends the program, write a note, or add its cause if that is another rank."""
    before: Hook = sys.excepthook
    reference = weakref.ref(monitor)

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        mine = reference()
        if mine is None or isinstance(error, RankFailedError):
            before(kind, error, trace)
        elif is_symptom(error):
            text = f"{RankFailedError.__name__}: {mine.explain(error)}"
            if text not in getattr(error, "__notes__", []):
                error.add_note(text)
            before(kind, error, trace)
        else:
            before(kind, error, trace)
            sys.stderr.flush()
            mine._note(error)

    sys.excepthook = report
