"""Rank 0's answers to ranks that ask for its time: one thread for all of them, however many come at once.

A line that is a question mark is answered with the time. Any other is what a rank found out of its own clock. A rank
that is slow, or says nothing, keeps no other waiting.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipesight.recording.clock_correction import UNKNOWN_DRIFT

__all__ = ["ASK", "ClockServer"]

ASK = b"?\n"
"""What a rank sends to be told the time."""
_BACKLOG = 4096  # connections that may wait for this thread to wake up
_LONGEST = 4096  # bytes of a line
_IDLE = 60.0  # seconds after which a rank that says nothing is let go
_PAUSE = 0.05


@dataclass(slots=True)
class _Client:
    """A rank that is connected."""

    socket: socket.socket
    heard: float
    line: bytearray = field(default_factory=bytearray)


class ClockServer:
    """Tells the time of this process, and collects what others say of theirs.

    Args:
        clock: That of the trace, in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._told: dict[int, tuple[int, dict[str, Any]]] = {}  # when ranks told of their clocks, and what
        self._waiting: set[int] = set()  # ranks that will measure once more
        self._news = threading.Condition()
        self._listener = _listener()
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="pipesight-clock", daemon=True)
        self._thread.start()

    def known(self) -> dict[str, dict[str, Any]]:
        """Return what is known of the clocks of other ranks; those that will measure again may have drifted since."""
        found = {}
        with self._news:
            for rank, (moment, facts) in sorted(self._told.items()):
                since = self._clock() - moment if rank in self._waiting else 0
                found[str(rank)] = {**facts, "error_ns": facts["error_ns"] + round(UNKNOWN_DRIFT * since)}
        return found

    def stop(self, *, patience: float) -> None:
        """End, once the ranks that have been here were here a last time."""
        until = time.monotonic() + patience
        with self._news:
            while self._waiting and (left := until - time.monotonic()) > 0:
                self._news.wait(left)
        self._waker.close()
        self._thread.join(timeout=patience + 1)

    def _serve(self) -> None:
        with self._selector as selector, self._listener, self._woken:
            while not self._answer_those(selector.select()):
                pass
            for client in self._clients():
                client.socket.close()

    def _answer_those(self, ready: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """Answer all that have come; return whether it is time to end."""
        for key, _ in ready:
            if key.fileobj is self._woken:
                return True
            if key.fileobj is self._listener:
                self._accept()
            elif not self._answer(key.data):
                self._let_go(key.data)
        return False

    def _clients(self) -> list[_Client]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _accept(self) -> None:
        now = time.monotonic()
        for client in self._clients():
            if now - client.heard > _IDLE:
                self._let_go(client)
        try:
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(connection, selectors.EVENT_READ, _Client(connection, now))
        except BlockingIOError:
            return
        except OSError:  # too many files are open; those who wait come to their turn
            time.sleep(_PAUSE)

    def _let_go(self, client: _Client) -> None:
        self._selector.unregister(client.socket)
        client.socket.close()

    def _answer(self, client: _Client) -> bool:
        """Answer what has come; return whether there may be more."""
        try:
            came = client.socket.recv(_LONGEST)
            client.heard = time.monotonic()
            client.line += came
            while (end := client.line.find(b"\n")) >= 0:
                line = bytes(client.line[: end + 1])
                del client.line[: end + 1]
                client.socket.send(b"%d\n" % self._clock() if line == ASK else self._note(json.loads(line)))
        except BlockingIOError:
            return False  # does not read what it asked for
        except (OSError, ValueError, TypeError, KeyError):
            return False  # says something else, or nothing any more
        return bool(came) and len(client.line) < _LONGEST

    def _note(self, facts: dict[str, Any]) -> bytes:
        rank, last, clock = int(facts["rank"]), bool(facts["last"]), facts["clock"]
        with self._news:
            self._told[rank] = self._clock(), {**clock, "error_ns": int(clock["error_ns"])}
            (self._waiting.discard if last else self._waiting.add)(rank)
            self._news.notify_all()
        return b"\n"


def _listener() -> socket.socket:
    """Return a socket that takes connections of either kind, where the machine knows both."""
    families = [socket.AF_INET6, socket.AF_INET] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    for family in families:
        listener = socket.socket(family)
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", 0))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            return listener
        except OSError:  # a machine that knows the new kind of addresses, but has none
            listener.close()
            if family == families[-1]:
                raise
    raise AssertionError("there is a family")
