"""Rank 0's clock server: it answers all ranks that ask for the time.

A question mark on a line is answered with the time. Any other line is the JSON of what a rank found about its clock. A
slow or silent rank delays no other: each has a thread while it asks, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pipesight.recording.clock_correction import UNKNOWN_DRIFT

__all__ = ["ASK", "ClockServer"]

ASK = b"?\n"
"""What a rank sends to get the time."""
_BACKLOG = 4096  # connections that may be pending
_LONGEST = 4096  # bytes of a line
_IDLE = 60.0  # seconds after which a silent rank is disconnected


class ClockServer:
    """Answers with the time of this process, and collects what other ranks found about their clocks.

    ``clock`` returns the time of the trace, in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._reports: dict[int, tuple[int, dict[str, Any]]] = {}  # by rank: when it reported, and what
        self._waiting: set[int] = set()  # ranks that will measure again
        self._news = threading.Condition()
        self._listener = _listener()
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="pipesight-clock", daemon=True)
        self._thread.start()

    def known(self) -> dict[str, dict[str, Any]]:
        """Return what is known of other ranks' clocks, with the error that drift may have added since."""
        found = {}
        with self._news:
            for rank, (moment, facts) in sorted(self._reports.items()):
                since = self._clock() - moment if rank in self._waiting else 0
                found[str(rank)] = {**facts, "error_ns": facts["error_ns"] + round(UNKNOWN_DRIFT * since)}
        return found

    def stop(self, *, patience: float) -> None:
        """Stop, once the known ranks have measured a last time, or ``patience`` seconds have passed."""
        until = time.monotonic() + patience
        with self._news:
            while self._waiting and (left := until - time.monotonic()) > 0:
                self._news.wait(left)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._thread.join(timeout=patience + 1)

    def _serve(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                try:
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
                except RuntimeError:  # too many threads; the rank tries again
                    connection.close()

    def _answer(self, connection: socket.socket) -> None:
        """Answer a rank until it hangs up, or sends nonsense."""
        with connection, contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            connection.settimeout(_IDLE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rb") as asked:
                while (line := asked.readline(_LONGEST)).endswith(b"\n"):
                    connection.sendall(b"%d\n" % self._clock() if line == ASK else self._note(json.loads(line)))

    def _note(self, facts: dict[str, Any]) -> bytes:
        rank, last, clock = int(facts["rank"]), bool(facts["last"]), facts["clock"]
        with self._news:
            self._reports[rank] = self._clock(), {**clock, "error_ns": int(clock["error_ns"])}
            (self._waiting.discard if last else self._waiting.add)(rank)
            self._news.notify_all()
        return b"\n"


def _listener() -> socket.socket:
    """Return a socket that accepts IPv4 and, where the machine has it, IPv6."""
    families = [socket.AF_INET6, socket.AF_INET] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    for family in families:
        listener = socket.socket(family)
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", 0))
            listener.listen(_BACKLOG)
            return listener
        except OSError:  # IPv6 is supported, but not configured
            listener.close()
            if family == families[-1]:
                raise
    raise AssertionError("there is a family")
