"""The one tracer of a process: which sinks get its events, and what happens when it forks or ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from pipesight._logger import own_logger
from pipesight.trace import _span_events
from pipesight.trace._encode import Encoder
from pipesight.trace._encoder_thread import EncoderThread, Sink
from pipesight.trace._exit_hooks import ExitHooks
from pipesight.trace._recording_switch import set_recording
from pipesight.trace._span_events import EVENTS

__all__ = ["Tracer", "tracer"]

logger = own_logger(__name__)


class Tracer:
    """Records events as long as there is a sink."""

    def __init__(self) -> None:
        self._exit_hooks = ExitHooks(self.finish, self._flush_and_log_lost)
        self._begin(EncoderThread())
        self.on_finish: list[Callable[[], None]] = []
        """Called when the process ends with a trace being written, after its last event."""
        self.ending: str | None = None
        """What ends the process, such as ``SIGTERM``; ``None`` if it ends normally."""

    def _begin(self, thread: EncoderThread) -> None:
        self._thread = thread
        # A signal handler that ends the process may interrupt whoever holds one of these: both are reentrant.
        self._changing = threading.RLock()
        self._finishing = threading.RLock()

    @property
    def encoder(self) -> Encoder:
        """The encoder of the current trace, or of the last one."""
        return self._thread.encoder

    @property
    def is_writing(self) -> bool:
        """Whether there is a sink."""
        return bool(self._thread.sinks)

    def add(self, sink: Sink, encoder: Encoder | None = None, *, interval: float | None = None) -> None:
        """Give a sink all events from now on, every ``interval`` seconds."""
        with self._changing:
            self._thread.interval = interval or self._thread.interval
            if self._thread.sinks:
                self._thread.drain()
            else:
                self._thread.begin(encoder or Encoder())
                _span_events.on_backlog.append(self._limit_backlog)
                _span_events.on_lost.append(self._count_lost)
                _span_events.on_thread.append(self._meet_thread)
                self._exit_hooks.watch()
            self._thread.sinks = (*self._thread.sinks, sink)
            set_recording(True)
            self._thread.ensure_running()

    def remove(self, sink: Sink) -> None:
        """Give a sink the last events, and close it."""
        with self._changing:
            if sink not in self._thread.sinks:
                return
            if len(self._thread.sinks) == 1:
                set_recording(False)
            _span_events.prepare_flush(last=True)
            self._thread.drain_or_give_up()
            self._thread.sinks = tuple(other for other in self._thread.sinks if other is not sink)
            if not self._thread.sinks:
                self._unwatch()
                self._thread.stop()
        sink.close()

    def pause(self) -> None:
        """Stop recording until `resume`, unless another sink needs the events."""
        if len(self._thread.sinks) == 1:
            set_recording(False)

    def resume(self) -> None:
        """Record again."""
        if self._thread.sinks:
            set_recording(True)

    def flush(self) -> None:
        """Write all events that have ended."""
        _span_events.prepare_flush(last=False)
        self._thread.drain()
        for sink in self._thread.sinks:
            sink.flush()

    # What `_span_events` calls.

    def _limit_backlog(self) -> None:
        self._thread.limit_backlog()

    def _count_lost(self, count: int) -> None:
        self._thread.count_lost(count)

    def _meet_thread(self) -> None:
        self._thread.announce_thread()
        self._exit_hooks.begin_recording()
        self._thread.ensure_running()

    # The end of the process.

    def finish(self, ending: str | None = None) -> None:
        """Write everything and close the sinks: the process ends."""
        self.ending = ending or self.ending
        with self._finishing:  # if another thread is here, it does not take forever: every wait in here is limited
            set_recording(False)
            _span_events.prepare_flush(last=True)
            self._thread.drain_or_give_up()
            for sink in self._thread.sinks:
                sink.close()
            self._thread.sinks = ()
            for action in list(self.on_finish):
                try:
                    action()
                except Exception:
                    logger.exception("an action at the end of the trace failed")

    def _flush_and_log_lost(self) -> None:
        self.flush()
        for sink in self._thread.sinks:
            sink.log_lost()

    def _unwatch(self) -> None:
        _span_events.on_backlog.remove(self._limit_backlog)
        _span_events.on_lost.remove(self._count_lost)
        _span_events.on_thread.remove(self._meet_thread)
        self._exit_hooks.unwatch()

    # Forks.

    def before_fork(self) -> None:
        """Prepare for a fork."""
        self._exit_hooks.before_fork()

    def after_fork_in_parent(self) -> None:
        """Continue in the process that forked."""
        self._exit_hooks.forked()

    def after_fork_in_child(self) -> None:
        """Start afresh in the forked process: what was recorded before belongs to its parent."""
        before = self._thread
        self._begin(EncoderThread(before.interval))
        self._exit_hooks.begin_process()
        EVENTS.clear()
        _span_events.begin_process()
        if before.sinks:
            encoder = before.encoder.for_child()
            self._thread.encoder = encoder
            children = [sink.after_fork(encoder) for sink in before.sinks]
            self._thread.sinks = tuple(child for child in children if child is not None)
            if self._thread.sinks:
                self._exit_hooks.after_fork()
            else:
                set_recording(False)
                self._unwatch()
        self._exit_hooks.forked()


tracer = Tracer()
os.register_at_fork(
    before=tracer.before_fork,
    after_in_parent=tracer.after_fork_in_parent,
    after_in_child=tracer.after_fork_in_child,
)
