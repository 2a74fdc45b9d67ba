"""The ends of a process: whichever comes, what has to be done before it is done.

    return, exception, sys.exit     atexit
    os._exit, os.exec*              replaced in the module `os`, while there is a trace
    SIGTERM, SIGHUP                 a handler, where the program has none
    the last thread ends            as that of a process that another thread than the main one forked: a destructor

The workers of torch's DataLoader get a handler of SIGTERM from torch that ends them on the spot. That is how they end
where workers are kept until the program ends, so ours takes its place there, and leaves with the same status.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Ends"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # of which Python would let a process die with nothing done


class Ends:
    """Calls ``finish`` before this process ends, with what ends it unless it comes to its end, and ``flush`` before
    it becomes another program, which may fail.
    """

    def __init__(self, finish: Callable[[str | None], None], flush: Callable[[], None]) -> None:
        self._finish, self._flush = finish, flush
        self._at_exit = functools.partial(finish, None)
        self._real: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}
        self._is_loader_worker = False
        self._forks_in_main_thread = True
        self._of_thread = threading.local()

    def watch(self) -> None:
        """From now on."""
        atexit.register(self._at_exit)
        for name, ours in (("_exit", self._exit), ("execv", self._exec("execv")), ("execve", self._exec("execve"))):
            if name not in self._real:
                self._real[name], self._ours[name] = getattr(os, name), ours
                setattr(os, name, ours)
        self._handle_signals()
        self._meet_process()

    def unwatch(self) -> None:
        """No longer."""
        atexit.unregister(self._at_exit)
        for name, ours in list(self._ours.items()):
            if getattr(os, name) == ours:  # nobody put something in front
                setattr(os, name, self._real.pop(name))
                del self._ours[name]
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) == self._terminate:
                    signal.signal(number, signal.SIG_DFL)

    def before_fork(self) -> None:
        """Note which thread forks."""
        self._forks_in_main_thread = threading.current_thread() is threading.main_thread()

    def after_fork(self) -> None:
        """Begin anew in a forked process: the thread that forked is the main one there."""
        self._handle_signals()
        if not self._forks_in_main_thread:
            self._of_thread.end = _AtEnd(self._end_with_threads)
        self._meet_loader_worker()

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._terminate)

    def _exit(self, status: int) -> None:
        try:
            self._finish(f"os._exit({status})")
        finally:
            self._real["_exit"](status)

    def _exec(self, name: str) -> Callable[..., Any]:
        def become(*args: Any) -> Any:
            self._flush()
            return self._real[name](*args)

        return become

    def _end_with_threads(self) -> None:
        """End the process when the last thread of the program has: ours would keep it."""
        while any(map(_is_of_program, threading.enumerate())):
            time.sleep(0.01)
        try:
            self._finish(None)
        finally:
            self._real.get("_exit", os._exit)(0)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) != self._terminate:
            # The program has a handler, which calls the one that it found: without us, there is none to be called.
            self._flush()
            return
        try:
            self._finish(signal.Signals(number).name)
        finally:
            if self._is_loader_worker and number == signal.SIGTERM:
                self._real["_exit"](0)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # Workers of torch's DataLoader.

    def _meet_process(self) -> None:
        """Have a process of multiprocessing that was not forked from a traced one look at what it is to do, too."""
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, Ends._meet_loader_worker)

    def _meet_loader_worker(self) -> None:
        """If this process is to be a worker of a DataLoader, let its handler of SIGTERM be ours."""
        handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
        original = getattr(handling, "_set_worker_signal_handlers", None)
        if original is None or hasattr(original, "_pipesight"):
            return

        def set_worker_signal_handlers() -> None:
            original()
            if self._real and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, self._terminate):
                signal.signal(signal.SIGTERM, self._terminate)
                self._is_loader_worker = True

        vars(set_worker_signal_handlers)["_pipesight"] = True
        handling._set_worker_signal_handlers = set_worker_signal_handlers


def _is_of_program(thread: threading.Thread) -> bool:
    return not thread.name.startswith("pipesight-trace") and not isinstance(thread, threading._DummyThread)


class _AtEnd:
    """Calls something when the thread ends that has this among its own."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end, self._thread = end, threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # else another thread has forked, and this one is not there
            self._end()
