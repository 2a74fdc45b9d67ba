"""One reader of a run's files for all its viewers; it notifies them of anything new."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipesight._logger import own_logger
from pipesight.runs.following.follower import Follower, State
from pipesight.view.live.metrics_text import metrics

__all__ = ["DrawingError", "News", "Publisher"]

logger = own_logger(__name__)

LEVEL = 4  # of gzip
SHARE = 2
"""The pause before the next look, as a multiple of the time that the last one took to read and draw."""


class DrawingError(RuntimeError):
    """The run as it is now cannot be drawn; the reason is in the log."""


@dataclass(frozen=True, slots=True)
class News:
    """How far a run is, for viewers that wait for more."""

    revision: int
    ended: bool = False
    outcome: str | None = None


class Publisher:
    """Follows a run from ``with`` to its end, in its own thread, and draws each revision once, on request.

    Example::

        with Publisher(Path("RUN"), draw=draw) as publisher:
            news = publisher.wait(None, timeout=60)
            print(gzip.decompress(publisher.payload()))

    ``draw`` makes the payload of a run, one on disk or the last steps of one that is still running, and ``measure`` the
    metrics of its last steps. ``interval`` is in seconds from one look to the next, at least.
    """

    def __init__(
        self,
        path: Path,
        *,
        draw: Callable[[Follower], dict[str, Any] | None],
        measure: Callable[[Follower], str] = metrics,
        interval: float = 1.0,
    ) -> None:
        self.path = path
        self._draw, self._measure, self._interval = draw, measure, interval
        self._follower = Follower(path)
        self._reading = threading.Lock()  # the follower
        self._told = threading.Condition()
        self._news = News(0)
        self._made: dict[str, tuple[int, Any]] = {}  # what was last made, and of which revision
        self._complaints: set[str] = set()
        self._cost = 0.0  # seconds that the last drawing took
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pipesight-follow", daemon=True)

    def __enter__(self) -> Self:
        self._look()  # so that the state is known at once
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with self._told:
            self._told.notify_all()
        self._thread.join()
        with self._reading:
            self._follower.close()

    @property
    def closed(self) -> bool:
        """Whether the run has ended and all of it was published."""
        return self._closing.is_set()

    @property
    def state(self) -> State:
        """How far the run is."""
        return self._follower.state

    def wait(self, seen: News | None, *, timeout: float) -> News:
        """Return the news as soon as they differ from those last seen; after the timeout, the same ones."""
        with self._told:
            self._told.wait_for(lambda: self._news != seen or self.closed, timeout)
            return self._news

    def payload(self) -> bytes | None:
        """Return what the page draws, as JSON in gzip; nothing while there is nothing to draw.

        Raises:
            DrawingError: This revision cannot be drawn; the next may be.
        """
        payload: bytes | None = self._once("draw", self._pack)
        return payload

    def metrics(self) -> str:
        """Return the last steps' metrics for Prometheus; `DrawingError` if this revision cannot be read."""
        text: str = self._once("measure", lambda _: self._measure(self._follower))
        return text

    def _once(self, what: str, make: Callable[[News], Any]) -> Any:
        """Make something of each revision once."""
        with self._reading:
            news = self._news
            if self._made.get(what, (-1, None))[0] != news.revision:
                begin = time.monotonic()
                try:
                    made = make(news)
                except Exception as error:  # for one revision; the next may succeed
                    self._complain(f"cannot {what} the run %s; will retry when it grows", error)
                    made = DrawingError(f"cannot {what} the run; `pipesight view` printed the reason")
                self._made[what] = (news.revision, made)
                self._cost = time.monotonic() - begin
            made = self._made[what][1]
        if isinstance(made, DrawingError):
            raise made
        return made

    def _pack(self, news: News) -> bytes | None:
        payload = self._draw(self._follower)
        if payload is None:
            return None
        payload["revision"], payload["live"] = news.revision, not news.ended
        return gzip.compress(json.dumps(payload, allow_nan=False, separators=(",", ":")).encode(), LEVEL)

    def _follow(self) -> None:
        spent = 0.0
        while not self._news.ended and not self._closing.wait(max(self._interval, SHARE * (spent + self._cost))):
            begin = time.monotonic()
            self._look()
            spent = time.monotonic() - begin

    def _look(self) -> None:
        with self._reading:
            try:
                changed = self._follower.look()
            except Exception as error:
                self._complain("cannot read the run %s; will retry", error)
                return
            if changed:
                state = self._follower.state
                self._tell(News(self._news.revision + 1, state.phase == "ended", state.outcome))

    def _complain(self, what: str, error: Exception) -> None:
        """Log a failure, once for each kind."""
        if (complaint := f"{what} {error!r}") not in self._complaints:
            self._complaints.add(complaint)
            logger.error(what, self.path, exc_info=error)

    def _tell(self, news: News) -> None:
        with self._told:
            self._news = news
            self._told.notify_all()
