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

A process of multiprocessing that was forked from an event loop has the loop's descriptor there; nothing reads it in
that process, so ours replaces it. Where the program sets a descriptor itself, as asyncio does for its signal handlers,
it keeps it and no signal is sent again: its main thread waits for that descriptor, and wakes up. Neither is one sent
again where only other threads record.
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
_HIGH = 200  # a descriptor above those that programs close one by one, or soon reuse
_PATIENCE = 0.1  # seconds for Python to call a handler


class ExitHooks:
    """Calls ``finish`` before this process ends, and ``flush`` before ``os.exec*``, which may fail.

    ``finish`` gets what ends the process, such as ``"SIGTERM"``, or ``None`` if it ends normally.
    """

    def __init__(self, finish: Callable[[str | None], None], flush: Callable[[], None]) -> None:
        self._finish, self._flush = finish, flush
        self._at_exit = functools.partial(finish, None)
        self._real: dict[str, Callable[..., Any]] = {}  # functions of `os`, and what replaces them
        self._ours: dict[str, Callable[..., Any]] = {}
        self._is_loader_worker = False
        self._forks_in_main_thread = True
        self._of_thread = threading.local()
        self._held: dict[int, int] = {}  # Python's C handlers of signals that currently end the process at once
        self._may_resend = True
        self._wakeup_pipe: tuple[int, int] | None = None  # what the resending thread reads
        self._inherited_wakeup = -1  # the descriptor that the process had when it was forked
        self._is_terminating = False

    def watch(self) -> None:
        """Install the hooks."""
        atexit.register(self._at_exit)
        for name, ours in (("_exit", self._exit), ("execv", self._exec("execv")), ("execve", self._exec("execve"))):
            if name not in self._real:
                self._real[name], self._ours[name] = getattr(os, name), ours
                setattr(os, name, ours)
        self._handle_signals()
        self._start_resending()
        self._follow_multiprocessing()

    def unwatch(self) -> None:
        """Remove the hooks."""
        atexit.unregister(self._at_exit)
        for name, ours in list(self._ours.items()):
            if getattr(os, name) == ours:  # else somebody has wrapped it
                setattr(os, name, self._real.pop(name))
                del self._ours[name]
        if threading.current_thread() is threading.main_thread():
            self._held.clear()
            for number in _SIGNALS:
                if signal.getsignal(number) == self._terminate:
                    signal.signal(number, signal.SIG_DFL)
            self._stop_resending()

    # Forks.

    def before_fork(self) -> None:
        """Block signals: Python would forget one that arrives too early in the new process."""
        self._forks_in_main_thread = threading.current_thread() is threading.main_thread()
        self._of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if self._real else None

    def forked(self) -> None:
        """Let blocked signals through, in both processes."""
        if self._of_thread.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._of_thread.mask)

    def begin_process(self) -> None:
        """In a forked process, let go of what belongs to its parent."""
        self._is_terminating = False
        pipe = self._wakeup_pipe
        self._stop_resending()
        if pipe is not None:
            with contextlib.suppress(OSError):
                os.close(pipe[0])
        self._inherited_wakeup = -1
        if self._real:
            with contextlib.suppress(OSError, ValueError):  # the parent has closed it; a subinterpreter
                self._inherited_wakeup = signal.set_wakeup_fd(-1)
                signal.set_wakeup_fd(self._inherited_wakeup)

    def after_fork(self) -> None:
        """In a forked process, install the hooks again: the thread that forked is the main one there."""
        self._handle_signals()
        self._hold_signals()
        if not self._forks_in_main_thread:
            self._of_thread.end = _AtThreadEnd(self._end_with_threads)
        self._meet_loader_worker()

    def begin_recording(self) -> None:
        """Note that there are events, so that the process must not end without writing them. Any thread may call it."""
        for number in list(self._held):
            handler = self._held.pop(number, None)
            if handler is not None and signal.getsignal(number) == self._terminate:
                _set_handler(number, handler)
        self._start_resending()

    # What ends a process.

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._terminate)

    def _hold_signals(self) -> None:
        """Let signals end the process at once, although there is a handler: there is nothing to write yet."""
        self._held.clear()
        for number in _SIGNALS:
            if signal.getsignal(number) == self._terminate:
                signal.signal(number, self._terminate)  # the parent may have been holding it too
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
        """End the process when the last thread of the program has ended; ours would keep it alive."""
        while any(map(_is_of_program, threading.enumerate())):
            time.sleep(0.01)
        try:
            self._finish(None)
        finally:
            self._real.get("_exit", os._exit)(0)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) != self._terminate:
            # The program's handler calls the one it found. Without a trace, that would have been none.
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

    # Signals that arrive where Python does not call the handler.

    def _start_resending(self) -> None:
        """Start the thread that sends signals again, once, if a traced process started this one."""
        if not self._may_resend or threading.current_thread() is not threading.main_thread():
            return
        if os.environ.get("PIPESIGHT_PARENT", str(os.getpid())) == str(os.getpid()):
            return
        self._may_resend = False
        with contextlib.suppress(OSError, RuntimeError):  # too many descriptors; the interpreter is shutting down
            pipe = _pipe()
            threading.Thread(target=self._resend, args=pipe[:1], name="pipesight-trace-signals", daemon=True).start()
            self._wakeup_pipe = pipe
            before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
            if before != -1 and not (before == self._inherited_wakeup and _is_of_multiprocessing()):
                signal.set_wakeup_fd(before)

    def _resend(self, reader: int) -> None:
        with contextlib.suppress(OSError):  # the program has closed it
            while number := int.from_bytes(os.read(reader, 1), "big"):  # nothing, once the other end is closed
                if number in _SIGNALS:
                    time.sleep(_PATIENCE)
                    main = threading.main_thread().ident
                    if main and not self._is_terminating and signal.getsignal(number) == self._terminate:
                        signal.pthread_kill(main, number)  # which comes back here
            os.close(reader)

    def _stop_resending(self) -> None:
        pipe, self._wakeup_pipe, self._may_resend = self._wakeup_pipe, None, True
        if pipe is not None:
            current = signal.set_wakeup_fd(-1)
            if current != pipe[1]:
                signal.set_wakeup_fd(current)
            with contextlib.suppress(OSError):
                os.close(pipe[1])

    # Workers of torch's DataLoader.

    def _follow_multiprocessing(self) -> None:
        """Look for DataLoader workers also among processes that were not forked from a traced one."""
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, ExitHooks._meet_loader_worker)

    def _meet_loader_worker(self) -> None:
        """If this process becomes a DataLoader worker, replace its handler of SIGTERM."""
        after_worker_signal_handlers(self._take_sigterm)

    def _take_sigterm(self) -> None:
        if self._real and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, self._terminate):
            signal.signal(signal.SIGTERM, self._terminate)
            self._is_loader_worker = True
            self._held.pop(signal.SIGTERM, None)
            self._start_resending()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe: one to read from, and one that signal handlers can write to."""
    low = os.pipe()
    try:
        reader, writer = (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in low)
    finally:
        for descriptor in low:
            os.close(descriptor)
    os.set_blocking(writer, False)
    return reader, writer


def _set_handler(number: int, handler: int | None) -> int:
    """Set the C handler of a signal, from any thread, and return the one before. Python does not notice."""
    before: int | None = _PyOS_setsig(number, handler)
    return before or 0


_PyOS_setsig = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))


def _is_of_multiprocessing() -> bool:
    """Tell whether multiprocessing started this process: then it does not run the event loop of its parent."""
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _is_of_program(thread: threading.Thread) -> bool:
    return not thread.name.startswith("pipesight-trace") and not isinstance(thread, threading._DummyThread)


class _AtThreadEnd:
    """Calls a function when the thread ends that keeps this in its thread-local storage."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end, self._thread = end, threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # else another thread has forked, and that thread is not here
            self._end()
