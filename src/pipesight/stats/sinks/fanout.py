"""Several sinks as one, and what happens when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from pipesight._logger import own_logger
from pipesight._plurals import count_of
from pipesight.stats.sinks.record import Record, Sink

__all__ = ["Sinks"]

logger = own_logger(__name__)


class Sinks:
    """Hands records to several sinks, from any thread.

    A sink that fails does not keep the others from their records. What a sink forgives, as a full disk, is reported
    once, its records are counted as lost, and the next ones are tried again. Anything else comes from code of the
    user's, and is raised.
    """

    def __init__(self, sinks: Iterable[Sink] = (), *, warn: Callable[[str], object] = logger.warning) -> None:
        self._sinks = list(sinks)
        self._warn = warn
        self._lost: dict[str, int] = {}
        self._lock = threading.RLock()  # a user's logger may log statistics itself

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def lost(self) -> int:
        """How many records did not reach a sink, over all sinks."""
        return sum(self._lost.values())

    def only(self, kind: type[Sink]) -> Sinks:
        """Return the sinks of one kind."""
        with self._lock:
            return Sinks([sink for sink in self._sinks if isinstance(sink, kind)], warn=self._warn)

    def write(self, records: Sequence[Record]) -> None:
        """Hand the records to each sink."""
        if not records:
            return
        with self._lock:
            self._for_each(lambda sink: sink.write(records), len(records))

    def close(self) -> None:
        """Close all sinks, and say how much was lost; records that come later go nowhere."""
        with self._lock:
            try:
                self._for_each(lambda sink: sink.close(), 0)
            finally:
                self._sinks = []
                for sink, count in self._lost.items():
                    if count:
                        values = count_of(count, "value")
                        self._warn(f"{values} in all could not be written to {sink}")

    def _for_each(self, act: Callable[[Sink], object], count: int) -> None:
        raised: list[Exception] = []
        for sink in tuple(self._sinks):
            try:
                act(sink)
            except Exception as error:
                if not isinstance(error, getattr(sink, "forgives", ())):
                    raised.append(error)
                    continue
                name = _describe(sink)
                if name not in self._lost:
                    self._warn(
                        f"cannot write statistics to {name} ({type(error).__name__}: {error}); "
                        "training continues; lost values are counted"
                    )
                self._lost[name] = self._lost.get(name, 0) + count
        if raised:
            for other in raised[1:]:
                raised[0].add_note(f"another sink failed too: {type(other).__name__}: {other}")
            raise raised[0]


def _describe(sink: Sink) -> str:
    path = getattr(sink, "path", None)
    return type(sink).__name__ if path is None else repr(str(path))
