"""Finish the trace before the process ends, however it ends.

    return, exception, sys.exit     atexit
    os._exit, os.exec*              replaced in the module `os`, while there is a trace
    SIGTERM, SIGHUP                 a handler, where the program has none
    the last thread ends            a destructor, in a process that was forked from a thread other than the main one

Torch gives DataLoader workers a SIGTERM handler that ends them at once, which is how persistent workers end. Ours
replaces it there, and exits with the same status.

Without a handler, a signal ends a process wherever it is. With one, Python only notes the signal and runs the handler
when the main thread returns from C: never, if the signal came just before the thread began to wait, or while it was
being woken for a lock that another process then took. A parent that terminates its children and joins them, as a Pool
does, would wait forever. Therefore:

    a forked process, until it records      has no handler installed: the signal ends it at once
    one that records, started by a          a thread reads signals from `signal.set_wakeup_fd`, and sends them to the
    traced process                          main thread again until the handler runs

That thread is missing where the program uses `set_wakeup_fd` itself, or where the main thread does not record.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from pipesight._torch.data_loader import after_worker_signal_handlers

__all__ = ["ExitHooks"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # by default they end a process without running any Python code
_HIGH = 200  # descriptors that a program which closes all of them will not soon get for something else
_PATIENCE = 0.1  # seconds for Python to call a handler


class ExitHooks:
    """Calls ``finish`` before this process ends, and ``flush`` before ``os.exec*``, which may fail.

    ``finish`` gets what ends the process, such as ``"SIGTERM"``, or ``None`` if it ends normally.
    """

    def __init__(self, finish: Callable[[str | None], None], flush: Callable[[], None]) -> None:
        self._finish, self._flush = finish, flush
        self._at_exit = functools.partial(finish, None)
        self._real: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}
        self._is_loader_worker = False
        self._forks_in_main_thread = True
        self._of_thread = threading.local()
        self._held: dict[int, int] = {}  # Python's handlers in C, of signals that end the process on the spot
        self._may_hear = True
        self._ear: tuple[int, int] | None = None  # the ends of a pipe
        self._is_terminating = False

    def watch(self) -> None:
        """From now on."""
        atexit.register(self._at_exit)
        for name, ours in (("_exit", self._exit), ("execv", self._exec("execv")), ("execve", self._exec("execve"))):
            if name not in self._real:
                self._real[name], self._ours[name] = getattr(os, name), ours
                setattr(os, name, ours)
        self._handle_signals()
        self._hear_signals()
        self._meet_process()

    def unwatch(self) -> None:
        """No longer."""
        atexit.unregister(self._at_exit)
        for name, ours in list(self._ours.items()):
            if getattr(os, name) == ours:  # nobody put something in front
                setattr(os, name, self._real.pop(name))
                del self._ours[name]
        if threading.current_thread() is threading.main_thread():
            self._held.clear()
            for number in _SIGNALS:
                if signal.getsignal(number) == self._terminate:
                    signal.signal(number, signal.SIG_DFL)
            self._hear_no_more()

    def before_fork(self) -> None:
        """Note which thread forks, and let signals wait: Python forgets those that a new process gets too early."""
        self._forks_in_main_thread = threading.current_thread() is threading.main_thread()
        self._of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if self._real else None

    def forked(self) -> None:
        """Let the signals come that waited, in both processes."""
        if self._of_thread.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._of_thread.mask)

    def begin_process(self) -> None:
        """Let go of what is the parent's, in a forked process."""
        self._is_terminating = False
        ear = self._ear
        self._hear_no_more()
        if ear is not None:
            with contextlib.suppress(OSError):
                os.close(ear[0])

    def after_fork(self) -> None:
        """Begin anew in a forked process: the thread that forked is the main one there."""
        self._handle_signals()
        self._hold_signals()
        if not self._forks_in_main_thread:
            self._of_thread.end = _AtEnd(self._end_with_threads)
        self._meet_loader_worker()

    def begin_recording(self) -> None:
        """From now on there is something to be done, in a forked process, too. Any thread may call this, often."""
        for number in list(self._held):
            handler = self._held.pop(number, None)
            if handler is not None and signal.getsignal(number) == self._terminate:
                _set_handler(number, handler)
        self._hear_signals()

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._terminate)

    def _hold_signals(self) -> None:
        """Let signals end the process on the spot, although there is a handler: nothing would be left undone."""
        self._held.clear()
        for number in _SIGNALS:
            if signal.getsignal(number) == self._terminate:
                signal.signal(number, self._terminate)  # the parent may not have had it in place
                self._held[number] = _set_handler(number, None)

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
        self._is_terminating = True
        try:
            self._finish(signal.Signals(number).name)
        finally:
            if self._is_loader_worker and number == signal.SIGTERM:
                self._real["_exit"](0)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # Signals that come where Python does not call a handler.

    def _hear_signals(self) -> None:
        """Have a thread see to it that the handler is called, unless others started the program. Once."""
        if not self._may_hear or threading.current_thread() is not threading.main_thread():
            return
        if os.environ.get("PIPESIGHT_PARENT", str(os.getpid())) == str(os.getpid()):
            return
        self._may_hear = False
        with contextlib.suppress(OSError, RuntimeError):  # too many descriptors; the interpreter is shutting down
            ear = _pipe()
            threading.Thread(target=self._hear, args=ear[:1], name="pipesight-trace-signals", daemon=True).start()
            self._ear = ear
            others = signal.set_wakeup_fd(ear[1], warn_on_full_buffer=False)
            if others != -1:
                signal.set_wakeup_fd(others)

    def _hear(self, reader: int) -> None:
        with contextlib.suppress(OSError):  # the program has closed it
            while number := int.from_bytes(os.read(reader, 1), "big"):  # nothing comes once the other end is closed
                if number in _SIGNALS:
                    time.sleep(_PATIENCE)
                    main = threading.main_thread().ident
                    if main and not self._is_terminating and signal.getsignal(number) == self._terminate:
                        signal.pthread_kill(main, number)  # which is heard again
            os.close(reader)

    def _hear_no_more(self) -> None:
        ear, self._ear, self._may_hear = self._ear, None, True
        if ear is not None:
            others = signal.set_wakeup_fd(-1)
            if others != ear[1]:
                signal.set_wakeup_fd(others)
            with contextlib.suppress(OSError):
                os.close(ear[1])

    # Workers of torch's DataLoader.

    def _meet_process(self) -> None:
        """Have a process of multiprocessing that was not forked from a traced one look at what it is to do, too."""
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, ExitHooks._meet_loader_worker)

    def _meet_loader_worker(self) -> None:
        """If this process is to be a worker of a DataLoader, let its handler of SIGTERM be ours."""
        after_worker_signal_handlers(self._take_sigterm)

    def _take_sigterm(self) -> None:
        if self._real and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, self._terminate):
            signal.signal(signal.SIGTERM, self._terminate)
            self._is_loader_worker = True
            self._held.pop(signal.SIGTERM, None)
            self._hear_signals()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe; one can be written to in a signal handler."""
    low = os.pipe()
    try:
        reader, writer = (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in low)
    finally:
        for descriptor in low:
            os.close(descriptor)
    os.set_blocking(writer, False)
    return reader, writer


def _set_handler(number: int, handler: int | None) -> int:
    """Set what is called in C when a signal comes, in any thread; return what was. Python's own idea of it stays."""
    before: int | None = _PyOS_setsig(number, handler)
    return before or 0


_PyOS_setsig = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))


def _is_of_program(thread: threading.Thread) -> bool:
    return not thread.name.startswith("pipesight-trace") and not isinstance(thread, threading._DummyThread)


class _AtEnd:
    """Calls something when the thread ends that has this among its own."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end, self._thread = end, threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # else another thread has forked, and this one is not there
            self._end()
