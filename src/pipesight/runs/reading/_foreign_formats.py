"""Events and metrics that other tools wrote, converted to lines like ours: Chrome traces and torchtitan's logs."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["ChromeReader", "event_of", "records", "statistics_of"]

_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"\}\s*,\s*(?=\{)")
_SPACE = re.compile(r"[\s,]*")
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d{1,19})')
_DISTRIBUTED = re.compile(r'"distributedInfo"\s*:\s*(?=\{)')
_LONGEST = 2**22  # characters of an event
_LONGEST_HEAD = 2**26  # characters before the first
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_STEPS = ("step", "iteration", "global_step", "iter")


class ChromeReader:
    """The events of a Chrome trace: a JSON object or array, on any number of lines.

    Iterating yields each event as a line of JSON, and never holds more than a few. Damaged events are skipped.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._texts = (decoder.decode(text) for text in texts)
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._at = "", 0
        self.skipped = 0
        """Events that could not be read."""
        self.ended = False
        """Whether the end of the list was reached."""
        self.shift = 0
        """Microseconds to add to the times."""
        self.rank: int | None = None
        """The rank that the trace names."""
        self.place: int | None = None
        """The place of that rank among those of its pipeline, if that is sure."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the events."""
        if not self._begin():
            return
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at == len(self._text):
                if not self._more():
                    return
                continue
            if self._text[self._at] == "]":
                self.ended = True
                return
            try:
                event, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError):
                if len(self._text) - self._at < _LONGEST and self._more():
                    continue
                if not self._skip():
                    return
                continue
            if isinstance(event, dict):
                yield self._text[self._at : end].replace("\n", " ").replace("\r", " ").encode(errors="replace")
            else:
                self.skipped += 1
            self._at = end

    def _begin(self) -> bool:
        """Find the list of events."""
        while True:
            if self._text.lstrip().startswith("["):
                self._at = self._text.index("[") + 1
                return True
            if found := _EVENTS.search(self._text):
                head = self._text[: found.start()]
                base = _BASE.search(head)
                self.shift = int(base[1]) // 1000 if base else 0
                self.rank, self.place = self._rank(head)
                self._at = found.end()
                return True
            if len(self._text) > _LONGEST_HEAD or not self._more():
                return False

    def _rank(self, head: str) -> tuple[int | None, int | None]:
        """Return the rank that the head names, and its place in the pipeline: in all ranks, or in a group so named."""
        found = _DISTRIBUTED.search(head)
        try:
            facts = self._decode(head, found.end())[0] if found else {}
        except (ValueError, RecursionError):
            return None, None
        rank = facts.get("rank")
        if type(rank) is not int or not 0 <= rank < 10**9:
            return None, None
        own: list[tuple[str, list[Any]]] = [
            (str(group.get("pg_desc")), group["ranks"])
            for group in facts.get("pg_config") or ()
            if isinstance(group, dict) and isinstance(group.get("ranks"), list) and rank in group["ranks"]
        ]
        size = facts.get("world_size")
        pipelines = [ranks for name, ranks in own if name.split("_")[-1].lower() == "pp"]
        if pipelines:
            return rank, pipelines[0].index(rank)
        alone = type(size) is int and not any(1 < len(ranks) < size for _, ranks in own)
        return rank, rank if alone else None

    def _more(self) -> bool:
        """Read on, and drop what was consumed."""
        rest = self._text[self._at :]
        pieces, size = [rest], 0
        for text in self._texts:
            pieces.append(text)
            size += len(text)
            if size > len(rest):  # so that a long event is not parsed too often
                break
        self._text, self._at = "".join(pieces), 0
        return size > 0

    def _skip(self) -> bool:
        """Skip to the next event after a damaged one."""
        while not (found := _BETWEEN.search(self._text, self._at + 1)):
            self._at = max(self._at, len(self._text) - 2)
            if not self._more():
                return False  # it was the last, and cut off
        self._at = found.end()
        self.skipped += 1
        return True


def records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among lines."""
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def event_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the span that a line of torchtitan's structured log ends, or its metric, as an event; or ``None``."""
    return _span_of(record) or _counter_of(record)


def _counter_of(record: dict[str, Any]) -> dict[str, Any] | None:
    name, value, at = record.get("event_name"), record.get("value"), record.get("time_us")
    if record.get("log_type_name") != "metric_value" or not isinstance(name, str) or not isinstance(at, int):
        return None
    if not isinstance(value, int | float) or not _is_number(value):
        return None
    said = {"value": value if math.isfinite(value) else _WORDS[str(float(value))]}
    about = {"pid": record.get("pid"), "tid": record.get("tid"), "ts": at}
    return {"name": name, "cat": "counter", "ph": "C", **about, "args": said, "point": said}


def _span_of(record: dict[str, Any]) -> dict[str, Any] | None:
    name, value, end = record.get("log_type_name"), record.get("value"), record.get("time_us")
    if not isinstance(name, str) or not name.endswith("_end") or record.get("log_type") != "event":
        return None
    if not isinstance(value, int | float) or not isinstance(end, int) or not math.isfinite(value) or value < 0:
        return None
    dur = round(value * 1000)
    step = record.get("step")
    return {
        "name": name.removesuffix("_end"),
        "cat": "torchtitan",
        "pid": record.get("pid"),
        # Tasks of asyncio take turns on their thread, so their spans are not inside each other.
        "tid": record.get("tid") if record.get("task_name") is None else -1,
        "ts": end - dur,
        "dur": dur,
        "ph": "X",
        "args": {"step": step} if isinstance(step, int) else {},
    }


def statistics_of(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the numbers in a record as lines of statistics: our own, torchtitan's metrics, or any that has a step."""
    if {"iteration", "statistic", "value"} <= record.keys():
        yield record
        return
    step = next((record[name] for name in _STEPS if _is_number(record.get(name))), None)
    if step is None:
        return
    if "log_type_name" in record:
        found = {record["event_name"]: record.get("value")} if record["log_type_name"] == "metric_value" else {}
    else:
        found = {name: value for name, value in record.items() if name not in _STEPS}
    for name, value in found.items():
        if isinstance(name, str) and isinstance(value, int | float) and _is_number(value):
            line = {"iteration": int(step), "layer": "", "tensor": "", "statistic": name, "value": value}
            yield line if math.isfinite(value) else {**line, "value": None, "nonfinite": str(float(value))}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
