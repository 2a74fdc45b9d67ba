"""When a rank fails or hangs, the others find out which one and why, and stop waiting for it.

A rank that fails writes a note for the others (`rank_notes`) and closes its connections. Ranks that wait for it get an
error at once, wherever they wait: in the pipeline, in a collective of a layer, or in one of the user's between steps.
They read the note and raise `RankFailedError` with the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pipesight.context import Where
from pipesight.distributed import diagnosis
from pipesight.distributed.diagnosis import Answers, LivenessPort, is_gone
from pipesight.distributed.join_job import wait_for_gloo_at_exit
from pipesight.distributed.rank_notes import ANSWERS, RankNotes, State, store_outlives_ranks
from pipesight.distributed.symptoms import collective_of, is_late, is_symptom, seconds_waited
from pipesight.pipeline.workers import place_of

__all__ = ["RankFailedError", "RankMonitor"]

_PATIENCE = 1.0  # seconds for a note to appear, after a connection broke
_STORE = 15.0  # seconds for the store to answer
_NO_TAG = 1_000_003  # of nothing that is ever sent: a real message must not meet a receiver of another size
_COURTESY = 0.3  # seconds for the rank that failed to print its error first


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


class RankFailedError(RuntimeError):
    """Another rank failed, died, or hangs."""


class RankMonitor:
    """Watches the other ranks of one pipeline, and answers their questions about this one.

    Args:
        groups: The process groups of the pipeline, the one with all ranks first.
        where: The context of this rank.
        timeout: Seconds after which a rank that keeps others waiting counts as hanging, if the user chose any.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], where: Where, timeout: float | None) -> None:
        self._groups, self._where, self._timeout = groups, where, timeout
        self._ranks, self._rank = dist.get_process_group_ranks(groups[0]), dist.get_rank()
        self._port = LivenessPort()
        self._notes = RankNotes(groups[0].group_name, self._rank, self._ranks, self._port.address())
        self._main = threading.get_ident()
        self.calls = Calls()
        self.waits_for: str | None = None
        """What this rank waits for, if it waits in a collective."""
        self._symptom: str | None = None  # what it waited for until a connection broke
        self._lost = False  # the store
        self._rounds = 0  # of the thread that answers
        self._keeper: dict[str, Any] | None = None  # where the first rank is, which may keep the store
        self._ended = threading.Event()
        self._interval = 0.5 if timeout is None else min(0.5, max(0.1, timeout / 10))
        _tell_uncaught(self)
        self._thread = threading.Thread(target=_answer, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.name = "pipesight-monitor"
        self._thread.start()
        wait_for_gloo_at_exit()
        # At exit at the latest.
        weakref.finalize(self, _leave, self._ended, self._thread, self._port, self._notes, self.calls)

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
        self.waits_for = waited_for
        try:
            yield
        except Exception as error:
            if isinstance(error, RankFailedError) or not is_symptom(error):
                raise
            raise self.explain(error, waited_for) from None
        finally:
            self.waits_for = None

    def explain(self, error: BaseException, waited_for: str | None = None) -> RankFailedError:
        """Return the error that names the rank behind a transport error."""
        notes = getattr(error, "__notes__", [])
        waited_for = waited_for or f"other ranks {notes[0] if notes else self._place()}"
        self._symptom = waited_for
        hurry = is_late(error)
        self._lost = not self._store_answers()
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

    def _store_answers(self) -> bool:
        """Return whether the store answers the other thread: the rank that hosts it may have died, or hang."""
        before, until = self._rounds, time.monotonic() + _STORE
        while self._thread.is_alive() and self._rounds == before and time.monotonic() < until:
            time.sleep(0.02)
        return self._rounds != before

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
            states: dict[int, State] = {self._rank: self._state()}
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
            known = Answers(self._rank, waited_for, self.calls.begun, self.calls.last, states, silent, gone)
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
        what = "does not answer" if self._keeper is not None and not is_gone(self._keeper) else "died"
        return f"rank 0 {what}, and with it the store: rank {self._rank} waited for {waited_for}"

    def _place(self) -> str:
        """Return the partition, layer, micro-batch and phase that this rank is in."""
        where = self._where
        if where.phase is None:
            return "outside the pipeline" if not self.calls.inside else "between tasks of the pipeline"
        return place_of(where, where.layer)

    def _state(self, question: int = 0) -> State:
        frame = sys._current_frames().get(self._main)
        collective = collective_of(frame)
        place = self._place()
        waits = self._symptom
        if waits is None and collective is not None:
            waits = self.waits_for or f"other ranks in {collective}, {place}"
        if frame is not None:
            code = frame.f_code
            place += f", at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        calls = {"calls": self.calls.begun, "in_call": self.calls.inside}
        return {"waits": waits, "where": place, **calls, "left": False, "question": question}

    def _answer_if_asked(self) -> None:
        if self._keeper is None and not store_outlives_ranks():
            self._keeper = self._notes.address_of(0)
        if not self._ended.is_set() and (number := self._notes.asked()) > 0:
            self._notes.answer(self._state(number))


def _answer(monitor: weakref.ref[RankMonitor], ended: threading.Event) -> None:
    while not ended.is_set():
        mine = monitor()
        if mine is None:
            return
        try:
            mine._answer_if_asked()
        except Exception:
            return  # the store is gone
        mine._rounds += 1
        interval = mine._interval
        del mine
        ended.wait(interval)


def _leave(
    ended: threading.Event, thread: threading.Thread, port: LivenessPort, notes: RankNotes, calls: Calls
) -> None:
    """End the thread that answers, and tell the remaining ranks that this one has exited.

    A thread that comes back from a call of the store while Python shuts down aborts the process, although all went
    well. So wait for the store, which may be slow, before the note that would have to wait for it, too.
    """
    ended.set()
    if thread is not threading.current_thread():
        thread.join(timeout=_STORE)
    if thread is threading.current_thread() or not thread.is_alive():
        notes.leave(calls.begun)
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
