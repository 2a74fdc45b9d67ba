"""Compare the clock of each rank with that of rank 0, which answers on a port that the process group's store holds.

Everything happens in separate threads, except at the end, where ranks wait a moment for each other. Nothing here may
break the training: if clocks cannot be compared, ``run.json`` says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist

from pipesight._logger import own_logger
from pipesight._torch.default_store import default_store
from pipesight.recording.clock_correction import Correction, Measurement, correction_from, measure
from pipesight.recording.clock_server import ASK, ClockServer

__all__ = ["RankClocks"]

logger = own_logger(__name__)

INTERVAL = 10.0
"""Seconds between measurements, so that a rank that is killed has a recent one."""
_PATIENCE = 3.0  # seconds that ranks wait for each other at the end
_STORE = 15.0
"""Seconds for the store to answer at the end: a thread that is in a call of the store while Python shuts down aborts
the process."""
_POLL = 0.05


class RankClocks:
    """The clock of this rank, and on rank 0 those of the others.

    ``attempt`` is how often a launcher has restarted the ranks; ``clock`` returns the time of the trace, in
    nanoseconds.
    """

    def __init__(self, rank: int, ranks: int, attempt: int, clock: Callable[[], int]) -> None:
        self._rank, self._ranks, self._attempt, self._clock = rank, ranks, attempt, clock
        self._start = clock()
        self._measurements: list[Measurement] = []
        self._failure: str | None = None
        self._server: ClockServer | None = None
        self._thread: threading.Thread | None = None
        self._address: tuple[str, int] | None = None
        self._ended = threading.Event()
        self._end: int | None = None
        self._has_begun = ranks < 2
        self._measuring = threading.Lock()

    def begin(self) -> None:
        """Start to compare, once, when there is a process group."""
        if self._has_begun or not dist.is_available() or not dist.is_initialized():
            return
        self._has_begun = True
        store = default_store()
        name = f"pipesight/clock/{self._attempt}"
        key = f"{name}/{store.add(f'{name}/of rank {self._rank}', 1)}"  # a process may record several runs
        if self._rank == 0:
            self._server = ClockServer(self._clock)
            store.set(key, str(self._server.port))
        else:
            self._thread = threading.Thread(target=self._follow, args=(store, key), daemon=True)
            self._thread.name = "pipesight-clock"
            self._thread.start()

    def end(self, *, failed: bool = False) -> None:
        """Measure a last time; on rank 0, wait until the other ranks have. If the run failed, do not wait."""
        if self._ended.is_set():
            return
        self._end = self._clock()
        self._ended.set()
        if self._server is not None:
            self._server.stop(patience=0.0 if failed else _PATIENCE)
        if self._thread is not None:
            self._thread.join(timeout=_STORE)
            if not failed and self._address is not None:
                self._measure(last=True)

    def correction(self) -> Correction | None:
        """Return what to add to the times of this rank, as far as is known."""
        if not self._measurements:
            return None
        end = self._clock() if self._end is None else self._end
        return correction_from(self._measurements, begin=self._start, end=end)

    def as_json(self) -> dict[str, Any]:
        """Return what ``run.json`` says under ``clock``."""
        if self._ranks < 2:
            return {"error_ns": 0}
        if self._rank == 0:
            told = {} if self._server is None else self._server.known()
            errors = [facts["error_ns"] for facts in told.values()]
            return {"error_ns": max(errors) if len(told) == self._ranks - 1 else None, "ranks": told}
        correction = self.correction()
        return {"error_ns": None} if correction is None else correction.as_json()

    # On ranks other than 0.

    def _follow(self, store: Any, key: str) -> None:
        try:
            while not store.check([key]):  # waiting would block others at the store
                if self._ended.wait(_POLL):
                    return
            self._address = (os.environ.get("MASTER_ADDR", "localhost"), int(store.get(key)))
        except Exception as error:  # the store is gone
            self._complain(error)
            return
        while not self._ended.is_set():
            self._measure()
            self._ended.wait(INTERVAL * random.uniform(0.8, 1.0))  # not all at once

    def _measure(self, *, last: bool = False) -> None:
        assert self._address is not None
        until = time.monotonic() + (_PATIENCE if self._failure is None else 0.0)
        with self._measuring:
            while True:
                try:
                    self._measure_once(self._address, last)
                    return
                except (OSError, ValueError) as error:
                    if time.monotonic() > until or (self._ended.is_set() and not last):
                        self._complain(error)
                        return
                # Ranks that failed at the same time retry at different times.
                time.sleep(random.uniform(_POLL, 10 * _POLL))

    def _measure_once(self, address: tuple[str, int], last: bool) -> None:
        with _connected(address) as (ask, tell):
            found = measure(ask, self._clock)
            self._measurements.append(found)
            if len(self._measurements) > 100:  # in a long run, every second one is enough
                del self._measurements[1::2]
            correction = self.correction()
            assert correction is not None
            tell({"rank": self._rank, "last": last, "clock": correction.as_json()})

    def _complain(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = str(error)
            if not self._measurements:
                logger.warning(
                    "the clock of rank %d cannot be compared with that of rank 0 (%s); training goes on, but times of "
                    "different ranks may be inconsistent",
                    self._rank,
                    error,
                )


@contextlib.contextmanager
def _connected(address: tuple[str, int]) -> Iterator[tuple[Callable[[], int], Callable[[dict[str, Any]], None]]]:
    """Connect to rank 0; yield a function that asks for the time, and one that sends facts."""
    with socket.create_connection(address, timeout=_PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = connection.makefile("rb")

        def ask() -> int:
            connection.sendall(ASK)
            return int(answers.readline() or _hung_up())

        def tell(facts: dict[str, Any]) -> None:
            connection.sendall(json.dumps(facts).encode() + b"\n")
            answers.readline() or _hung_up()  # until it has arrived

        with answers:
            yield ask, tell


def _hung_up() -> NoReturn:
    raise ConnectionError("rank 0 closed the connection")
