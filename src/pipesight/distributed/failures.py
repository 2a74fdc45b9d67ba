"""When a rank fails or hangs, the others find out which one and why, and stop waiting for it.

The ranks share notes in the store of the process group::

    failure          the note of the first rank that failed: all ranks raise it
    told/RANK        this rank has read it
    question         how often a rank has asked all others where they are, after a timeout or a broken connection
    state/RANK       the answer of each
    left/RANK        how many calls a rank made that has exited since
    address/RANK     where to check whether the process is alive

A rank that fails writes its note and closes its connections. Ranks that wait for it get an error at once, wherever they
wait: in the pipeline, in a collective of a layer, or in one of the user's between steps. They read the note and raise
`RankFailedError` with the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
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

from pipesight._torch.process_group import default_store
from pipesight.context import Where
from pipesight.distributed import diagnosis
from pipesight.distributed.diagnosis import Answers, LivenessPort, is_gone
from pipesight.distributed.process_group import wait_for_gloo_at_exit
from pipesight.distributed.symptoms import collective_of, is_late, is_symptom, seconds_waited

__all__ = ["RankFailedError", "RankMonitor"]

_PATIENCE = 1.0  # seconds for a note to appear, after a connection broke
_ANSWERS = 5.0  # seconds for ranks to answer
_STORE = 15.0  # and for the store
_LINGERS = 5.0  # seconds that the rank with the store waits for others to read a note
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
        self._store: Any = dist.distributed_c10d.PrefixStore(f"pipesight/{groups[0].group_name}", _own_client())
        self._main = threading.get_ident()
        self.calls = Calls()
        self.waits_for: str | None = None
        """What this rank waits for, if it waits in a collective."""
        self._symptom: str | None = None  # what it waited for until a connection broke
        self._lost = False  # the store
        self._rounds = 0  # of the thread that answers
        self._keeper: dict[str, Any] | None = None  # where the first rank is, which may keep the store
        self._port = LivenessPort()
        self._store.set(f"address/{self._rank}", json.dumps(self._port.address()))
        self._ended = threading.Event()
        self._interval = 0.5 if timeout is None else min(0.5, max(0.1, timeout / 10))
        _tell_uncaught(self)
        self._thread = threading.Thread(target=_answer, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.name = "pipesight-monitor"
        self._thread.start()
        wait_for_gloo_at_exit()
        kept = (self._ended, self._thread, self._port, self._store, self._rank, self._ranks, self.calls)
        weakref.finalize(self, _leave, *kept)  # at exit at the latest

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank fails, and end their wait for it."""
        self._note(error)
        self._break()

    def _note(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        self._post(f"rank {self._rank} failed: {text}", error)

    def _post(self, text: str, error: BaseException | None = None) -> None:
        lines = traceback.format_exception(error) if error is not None else []
        note = json.dumps({"rank": self._rank, "text": text, "traceback": "".join(lines)[-20_000:]})
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.compare_set("failure", "", note)

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
        with contextlib.suppress(Exception):
            self._store.set(f"told/{self._rank}", "")
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
        """Return the note of a failure; wait a while for it, and longer if a rank is about to write one."""
        until = latest = time.monotonic() + patience
        try:
            asked = self._store.add("question", 0) if patience else 0
            while True:
                if self._store.check(["failure"]):
                    note: dict[str, Any] = json.loads(self._store.get("failure"))
                    return note
                if time.monotonic() > until:
                    return None
                if patience and self._store.add("question", 0) > asked:
                    until = latest + _ANSWERS
                time.sleep(0.02)
        except Exception:
            self._lost = True
            return None

    def _diagnose(self, error: BaseException, waited_for: str, hurry: bool) -> None:
        """Ask all ranks where they are, and write a note that names the cause, unless another rank has."""
        with contextlib.suppress(Exception):
            number = self._store.add("question", 1)
            states: dict[int, Any] = {self._rank: self._state()}
            silent, gone = [rank for rank in self._ranks if rank not in states], set[int]()
            until = time.monotonic() + _ANSWERS
            while not self._store.check(["failure"]) and time.monotonic() < until:
                # First: a rank that exited left its note before its process ended.
                gone = {rank for rank in silent if is_gone(json.loads(self._store.get(f"address/{rank}")))}
                answers = {rank: answer for rank in silent if (answer := self._answer_of(rank, number)) is not None}
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
            self._post(text)

    def _store_gone(self, waited_for: str) -> str:
        if _outlives_ranks():
            host = os.environ.get("MASTER_ADDR", "?")
            return f"waited for {waited_for}, but the store on {host} is gone; see the log there for the cause"
        what = "does not answer" if self._keeper is not None and not is_gone(self._keeper) else "died"
        return f"rank 0 {what}, and with it the store: rank {self._rank} waited for {waited_for}"

    def _answer_of(self, rank: int, number: int) -> dict[str, Any] | None:
        for key in (f"left/{rank}", f"state/{rank}"):
            if self._store.check([key]):
                state: dict[str, Any] = json.loads(self._store.get(key))
                if state["left"] or state["question"] >= number:
                    return state
        return None

    def _place(self) -> str:
        """Return the partition, layer, micro-batch and phase that this rank is in."""
        where = self._where
        if where.phase is None:
            return "outside the pipeline" if not self.calls.inside else "between tasks of the pipeline"
        layer = "" if where.layer is None else f", layer '{where.layer}'"
        return f"in partition {where.partition}{layer}, micro-batch {where.microbatch}, {where.phase}"

    def _state(self, question: int = 0) -> dict[str, Any]:
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
        if self._keeper is None and not _outlives_ranks() and self._store.check(["address/0"]):
            self._keeper = json.loads(self._store.get("address/0"))
        if (number := self._store.add("question", 0)) > 0:
            self._store.set(f"state/{self._rank}", json.dumps(self._state(number)))


def _own_client() -> Any:
    """Return a client of the default store that can be used while the main thread waits for the store."""
    store: Any = default_store()
    try:
        return store.clone()
    except Exception:  # not before torch 2.8, nor for every kind
        return store


def _outlives_ranks() -> bool:
    """Return whether torchrun hosts the store, and not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
    ended: threading.Event,
    thread: threading.Thread,
    port: LivenessPort,
    store: Any,
    rank: int,
    ranks: Sequence[int],
    calls: Calls,
) -> None:
    """Leave a note for the remaining ranks; if this rank hosts the store, let them read it first."""
    ended.set()
    if thread is not threading.current_thread():
        thread.join(timeout=1)  # at work while Python ends, it could crash it
    with contextlib.suppress(Exception):
        if _outlives_ranks():
            left = {"waits": None, "calls": calls.begun, "in_call": False, "left": True, "question": 0}
            store.set(f"left/{rank}", json.dumps(left))
        elif rank == 0 and store.check(["failure"]):
            _wait_for_readers(store, [other for other in ranks if other != rank])
    port.close()


def _wait_for_readers(store: Any, ranks: Sequence[int]) -> None:
    until = time.monotonic() + _LINGERS
    while ranks and time.monotonic() < until:
        unread = [rank for rank in ranks if not store.check([f"told/{rank}"])]
        ranks = [rank for rank in unread if not is_gone(json.loads(store.get(f"address/{rank}")))]
        time.sleep(0.02)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _tell_uncaught(monitor: RankMonitor) -> None:
    """Also write a note if an exception outside the pipeline ends the program, or name the cause of it."""
    before: Hook = sys.excepthook
    reference = weakref.ref(monitor)

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
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

    sys.excepthook = told
