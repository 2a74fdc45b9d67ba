"""When a rank fails or hangs: the others learn which one, and why, and do not wait for it.

The store of the process group is the notice board::

    failure          what the first rank that failed wrote: everyone raises that
    question         a rank has waited too long and asks where all of them are
    state/RANK       the answer of each
    left/RANK        how many calls a rank made that has ended since, as Python ends

A rank that fails writes its note and closes its connections. Those who wait for it get an error at once, look at the
board, and raise `RankFailedError` with the cause.
"""

from __future__ import annotations

import atexit
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

from pipesight.context import Where
from pipesight.distributed.ending import wait_at_exit

__all__ = ["RankFailedError", "Watch"]

_PATIENCE = 1.0  # seconds for a note to appear, after a connection broke
_NO_TAG = 1_000_003  # of nothing that is ever sent: a real message must not meet a receiver of another size
_COURTESY = 0.3  # seconds in which the rank with the cause prints it first


_RULE = "every rank must call step, eval_step and predict as often as the others; give each the same number of batches"


@dataclasses.dataclass(slots=True)
class Calls:
    """The calls of a pipeline that a rank has begun."""

    begun: int = 0
    last: str = ""


class RankFailedError(RuntimeError):
    """Another rank failed, is gone, or hangs."""


class Watch:
    """What one pipeline knows of the other ranks.

    Args:
        groups: Those that it uses, the one with all ranks first.
        where: The place of this rank.
        timeout: Seconds after which a rank that keeps others waiting counts as hanging, if the user chose any.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], where: Where, timeout: float | None) -> None:
        self._groups, self._where, self._timeout = groups, where, timeout
        self._ranks = dist.get_process_group_ranks(groups[0])
        self._store: Any = dist.distributed_c10d.PrefixStore(
            f"pipesight/{groups[0].group_name}", dist.distributed_c10d._get_default_store()
        )
        self._main = threading.get_ident()
        self.calls = Calls()
        self.waits_for: str | None = None
        """What this rank waits for, if it does."""
        self._ended = threading.Event()
        self._interval = 0.5 if timeout is None else min(0.5, max(0.1, timeout / 10))
        _tell_uncaught(self)
        thread = threading.Thread(target=_answer, args=(weakref.ref(self), self._ended), daemon=True)
        thread.name = "pipesight-watch"
        thread.start()
        wait_at_exit()
        # A thread at work while Python ends could crash it.
        atexit.register(_end, self._ended, thread, self._store, f"left/{dist.get_rank()}", self.calls)

    def fail(self, error: BaseException) -> None:
        """Let the others know that this rank fails, and do not let them wait."""
        self._note(error)
        self._break()

    def _note(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        self._post(f"rank {dist.get_rank()} failed: {text}", error)

    def _post(self, text: str, error: BaseException | None = None) -> None:
        lines = traceback.format_exception(error) if error is not None else []
        note = json.dumps({"rank": dist.get_rank(), "text": text, "traceback": "".join(lines)[-20_000:]})
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.compare_set("failure", "", note)

    def _break(self) -> None:
        """Close the connections, by a wait that is too short: gloo has no other way."""
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
        """Explain errors of the transport in a block that waits for other ranks."""
        self.waits_for = waited_for
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankFailedError) or "gloo" not in str(error):
                raise
            raise self.explain(error, waited_for) from None
        self.waits_for = None

    def explain(self, error: Exception, waited_for: str) -> RankFailedError:
        """Return what an error of the transport is really about."""
        self.waits_for = waited_for
        late = "imed out" in str(error)
        note = self._read(0.0 if late else _PATIENCE)
        if note is None:
            self._post(self._diagnose(waited_for, late))
            note = self._read(_PATIENCE)
        self._break()
        if note is None:
            host = os.environ.get("MASTER_ADDR", "?")
            return RankFailedError(
                f"waited for {waited_for}, but the store on {host} is gone, with what kept it; the cause is told there"
            )
        if note["rank"] != dist.get_rank() and note["traceback"]:
            time.sleep(_COURTESY)
        return RankFailedError(note["text"])

    def _read(self, patience: float) -> dict[str, Any] | None:
        """Return the note on the board; wait a while for it, and longer if a rank is about to write one."""
        until = time.monotonic() + patience
        with contextlib.suppress(Exception):
            while True:
                if self._store.check(["failure"]):
                    note: dict[str, Any] = json.loads(self._store.get("failure"))
                    return note
                if time.monotonic() > until:
                    return None
                if self._store.check(["question"]):
                    until = max(until, time.monotonic() + _PATIENCE)
                time.sleep(0.02)
        return None

    def _ask(self) -> dict[int, dict[str, Any]]:
        """Ask all ranks where they are; return what those say that answer, or left word when they ended."""
        states = {dist.get_rank(): self._state()}
        with contextlib.suppress(Exception):
            self._store.set("question", "?")
            until = time.monotonic() + 1 + 2 * self._interval
            while len(states) < len(self._ranks) and time.monotonic() < until:
                for rank in self._ranks:
                    for key in (f"left/{rank}", f"state/{rank}"):
                        if rank not in states and self._store.check([key]):
                            states[rank] = json.loads(self._store.get(key))
                time.sleep(0.02)
        return states

    def _diagnose(self, waited_for: str, late: bool) -> str:
        """Name the ranks that keep the others waiting, or are gone."""
        me, mine, states = f"rank {dist.get_rank()}", self.calls, self._ask()
        silent = [rank for rank in self._ranks if rank not in states]
        idle = {rank: state for rank, state in states.items() if not state["waits"]}
        behind = {rank: state["calls"] for rank, state in idle.items() if state["calls"] < mine.begun}
        who = ", ".join(f"rank {rank} made {calls}" for rank, calls in behind.items())
        rule = f"; {me} makes call {mine.begun} of the pipeline, {mine.last}, but {who}: {_RULE}" if behind else ""
        if not late:
            gone = [f"rank {rank} is gone, without an exception" for rank in silent]
            gone += [f"rank {rank} has left" for rank, state in idle.items() if state["left"] or rank in behind]
            told = "; its exit code or signal is what torchrun tells of it" if silent else rule
            return f"{'; '.join(gone) or 'a rank is gone'}: {me} waited for {waited_for}{told}"
        if idle or silent:
            busy = [f"rank {rank} {'has left' if s['left'] else 'hangs ' + s['where']}" for rank, s in idle.items()]
            busy += [f"rank {rank} does not answer" for rank in silent]
            return f"{'; '.join(busy)} ({me} waited {self._timeout or 0:g} s for {waited_for}){rule}"
        everyone = "; ".join(f"rank {rank} waits for {state['waits']}" for rank, state in states.items())
        return f"all ranks wait for each other: {everyone}"

    def _state(self) -> dict[str, Any]:
        where = self._where
        place = "outside of the pipeline"
        if where.phase is not None:
            layer = "" if where.layer is None else f", layer '{where.layer}'"
            place = f"in partition {where.partition}{layer}, micro-batch {where.microbatch}, {where.phase}"
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            code = frame.f_code
            place += f", at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        return {"waits": self.waits_for, "where": place, "calls": self.calls.begun, "left": False}

    def _answer_if_asked(self) -> None:
        if self._store.check(["question"]):
            self._store.set(f"state/{dist.get_rank()}", json.dumps(self._state()))


def _answer(watch: weakref.ref[Watch], ended: threading.Event) -> None:
    while not ended.is_set():
        mine = watch()
        if mine is None:
            return
        try:
            mine._answer_if_asked()
        except Exception:
            return  # the store is gone
        interval = mine._interval
        del mine
        ended.wait(interval)


def _end(ended: threading.Event, thread: threading.Thread, store: Any, key: str, calls: Calls) -> None:
    """Let the thread end, and leave word for those who go on, if the store outlives the ranks."""
    ended.set()
    thread.join(timeout=1)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with contextlib.suppress(Exception):
            store.set(key, json.dumps({"waits": None, "calls": calls.begun, "left": True}))


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _tell_uncaught(watch: Watch) -> None:
    """Leave a note, too, if the program ends by an exception outside of the pipeline."""
    before: Hook = sys.excepthook
    reference = weakref.ref(watch)

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        mine = reference()
        if mine is not None and not isinstance(error, RankFailedError):
            sys.stderr.flush()
            mine._note(error)

    sys.excepthook = told
