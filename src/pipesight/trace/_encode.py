"""Encode events as lines of JSON. Text that repeats is made once: names, threads, arguments."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from json import JSONEncoder
from typing import Any, TypeAlias

from pipesight._launcher import launched_rank
from pipesight._os_facts import current_folder
from pipesight._version import __version__
from pipesight.trace._pipeline_lines import PlaceLines
from pipesight.trace._span_events import FIELDS, ROOT_ID, WHEN, Args, thread_ids

__all__ = ["NAMING", "THREAD", "Encoder"]

_dumps = JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_RESERVED = ("hhash", "p_idx", "level")  # arguments that we give to every event
_MOST_NAMES = 1000  # of threads, in the header
_MOST_TEMPLATES = 10_000  # of a thread
NAMING = b'{"id":0,"name":"thread_name","cat":"dftracer",'
"""How the lines begin that name threads, and are no events."""


_Entry: TypeAlias = tuple[Args, bytes]  # the last arguments of a node, and the template of its line


class _Thread:
    """Takes the place of a node among the events: from here on, this thread number belongs to another thread.

    Python gives the number of a thread that has ended to the next one that starts.
    """

    phase = "thread"


THREAD = _Thread()


class Encoder:
    """Encodes the events of one process.

    Times are those of the wall clock at the start, plus the monotonic clock since then: setting the wall clock does not
    change durations. Processes that this one starts use the same offset.
    """

    def __init__(self, *, include_args: bool = True, track_labels: bool = True, offset: int | None = None) -> None:
        self.include_args = include_args
        self.track_labels = track_labels
        """Whether headers have the lines by which viewers label and sort tracks, which DFTracer does not write."""
        self.offset = time.time_ns() - time.perf_counter_ns() if offset is None else offset
        """Nanoseconds to add to the monotonic clock."""
        self.begun = time.perf_counter_ns()
        self.lost = 0
        """Events that did not become lines."""
        self.pid = os.getpid()
        host = os.uname().nodename
        self._host = (host, _hash(host))
        self._arrows = int.from_bytes(os.urandom(7)) >> 3
        """Tells arrows from those of other processes in the same viewer, which keeps 53 bits."""
        self._templates: defaultdict[int, dict[Any, _Entry]] = defaultdict(dict)
        self._places = PlaceLines(self._template, self._arrow)
        self._threads: dict[int, tuple[int, str]] = {}
        self._names: dict[int, str] = {}

    def for_child(self) -> Encoder:
        """Return the encoder of a process that was forked from this one."""
        return Encoder(include_args=self.include_args, track_labels=self.track_labels, offset=self.offset)

    def microseconds(self, moment: int) -> int:
        """Convert a time of the monotonic clock, in nanoseconds, to the microseconds of the file."""
        return (moment + self.offset) // 1000

    # Header and footer.

    def header(self) -> bytes:
        """Return the first lines of a file: what the hashes stand for, and the event that all others are nested in."""
        thread = self.pid  # on Linux, the main thread has the number of its process
        command, executable, folder = " ".join(sys.argv), sys.executable, current_folder()
        moment = self.begun
        start = {
            "hhash": self._host[1],
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime((moment + self.offset) // 10**9)),
            "cwd": _hash(folder),
            "cmd_hash": _hash(command),
            "exec_hash": _hash(executable),
            "ppid": os.getppid(),
            "version": f"pipesight {__version__}",
            "clock_offset_ns": self.offset,
            "p_idx": 0,
            "level": 1,
        }
        lines = [
            self._metadata(1, "HH", thread, self._host[0], self._host[1]),
            self._metadata(2, "thread_name", thread, "MainThread", str(thread)),
            self._metadata(3, "FH", thread, folder, _hash(folder)),
            self._metadata(4, "SH", thread, command, _hash(command)),
            self._metadata(5, "SH", thread, executable, _hash(executable)),
            self._event(ROOT_ID, "start", thread, moment, start),
        ]
        if self.track_labels:
            lines += [
                self._metadata(0, "process_name", thread, _process_name(self.pid)),
                self._sort_order("process_sort_index", thread, launched_rank() or 0),
                self._sort_order("thread_sort_index", thread, 0),
            ]
        others = [known for known in list(self._names.items()) if known[0] != self.pid]
        lines += [self._metadata(0, "thread_name", number, name, str(number)) for number, name in others]
        return ("[\n" + "".join(f"{line}\n" for line in lines)).encode()

    def footer(self, events: int, lost: int) -> bytes:
        """Return the last lines of a file."""
        counts = {"hhash": self._host[1], "num_events": events, "lost_events": lost, "p_idx": 0, "level": 1}
        return self._event(0, "end", self.pid, time.perf_counter_ns(), counts).encode() + b"\n]\n"

    def _metadata(self, number: int, name: str, thread: int, meaning: str, value: str | None = None) -> str:
        args = {"hhash": self._host[1], "name": meaning}
        if value is not None:
            args["value"] = value
        return self._line(number, name, thread, "M", args)

    def _sort_order(self, name: str, thread: int, index: int) -> str:
        return self._line(0, name, thread, "M", {"hhash": self._host[1], "sort_index": index})

    def _line(self, number: int, name: str, thread: int, phase: str, args: Args) -> str:
        line = {"id": number, "name": name, "cat": "dftracer", "pid": self.pid, "tid": thread, "ph": phase}
        return _dumps({**line, "args": args})

    def _event(self, number: int, name: str, thread: int, moment: int, args: Args) -> str:
        line = {"id": number, "name": name, "cat": "dftracer", "pid": self.pid, "tid": thread}
        return _dumps({**line, "ts": self.microseconds(moment), "dur": 0, "ph": "X", "args": args})

    # Events.

    def lines(self, events: Sequence[Any]) -> tuple[bytes, int]:
        """Return the lines of events, given as `EVENTS` holds them, and the number of events.

        Raises:
            Exception: One of them cannot be encoded. The encoder's state is as before the call.
        """
        names = dict(self._names)
        try:
            return self._lines(events)
        except Exception:
            self._names = names
            self._templates.clear()
            self._places = PlaceLines(self._template, self._arrow)
            raise

    def _lines(self, events: Sequence[Any]) -> tuple[bytes, int]:
        lines: list[bytes] = []
        add = lines.append
        micro, rest = divmod(self.offset, 1000)  # separately: arithmetic with small integers is faster
        count = len(events) // FIELDS
        places, include_args = self._places, self.include_args
        thread, templates, kept = 0, self._templates[0], places.of(0)
        fields = iter(events)
        for node, number, parent, start, stop, level, where, args in zip(*[fields] * FIELDS, strict=True):
            if where != thread:
                thread, templates, kept = where, self._templates[where], places.of(where)
            entry = templates.get(node)
            if entry is None or entry[0] is not args:
                if type(args) is tuple:
                    known = kept.get((node, args[4], args[6]))
                    if known is not None and known[0] is args[0]:
                        line = known[1]
                    else:
                        add(self._naming(thread).encode())
                        line = places.make(node, thread, args)
                    begin = (start + rest) // 1000
                    where_it_was = (args[2], args[3], args[5]) if include_args else ()
                    duration = (stop + rest) // 1000 - begin
                    add(line % (number, begin + micro, duration, parent, *where_it_was, level))
                    if args[1]:
                        arrows = places.arrows(thread, args, begin + micro, self._arrows)
                        lines += arrows
                        count += len(arrows)
                    continue
                if node is THREAD:
                    count -= 1
                    self._rename_thread(thread, number, parent)
                    templates, kept = self._templates[thread], places.of(thread)
                    continue
                add(self._naming(thread).encode())
                if node.phase != "X":
                    add(self._mark(node, number, start, thread, args).encode())
                    continue
                entry = self._remember(node, thread, args)
            begin = (start + rest) // 1000
            add(entry[1] % (number, begin + micro, (stop + rest) // 1000 - begin, parent, level))
        return b"".join(lines), count

    def _remember(self, node: Any, thread: int, args: Args) -> _Entry:
        """Keep the template of a line: the same node is likely to come again with the same arguments."""
        template = self._template(node, thread, args)
        templates = self._templates[thread]
        if len(templates) > _MOST_TEMPLATES:  # each `Use` is another node
            templates.clear()
        entry = templates[node] = (args, template.encode())  # formatting bytes is faster
        return entry

    def _template(self, node: Any, thread: int, args: Args) -> str:
        """Return a line with a ``%d`` for each of: ID, start, duration, parent and level."""
        line = {"name": node.name, "cat": node.category, "pid": self.pid, "tid": self._thread(thread)[0]}
        constant = (_dumps(line)[1:-1], self._host[1], self._text(args))
        names, host, text = (part.replace("%", "%%") for part in constant)
        return (
            f'{{"id":%d,{names},"ts":%d,"dur":%d,"ph":"X","args":{{"hhash":"{host}","p_idx":%d,{text}"level":%d}}}}\n'
        )

    def _arrow(self, end: str, thread: int) -> str:
        """Return the line of one end of an arrow, with a ``%d`` for ID and time."""
        binding = '"bp":"e",' if end == "f" else ""  # it ends at the enclosing span, not at the next one
        return (
            f'{{"id":%d,"name":"micro-batch","cat":"pipeline","pid":{self.pid},"tid":{self._thread(thread)[0]},"ts":%d,'
            f'"ph":"{end}",{binding}"args":{{"hhash":"{self._host[1]}"}}}}\n'
        )

    def _text(self, args: Args) -> str:
        """Return arguments as the inside of a JSON object, followed by a comma."""
        return _dumps(_without_reserved(args))[1:-1] + "," if args and self.include_args else ""

    def _rename_thread(self, thread: int, number: int, name: str) -> None:
        self._templates.pop(thread, None)
        self._places.forget(thread)
        self._threads[thread] = (number, name)

    def _thread(self, thread: int) -> tuple[int, str]:
        """Return the operating system's number and the name of a thread."""
        return self._threads.get(thread) or thread_ids.get(thread) or (thread, f"thread {thread}")

    def _naming(self, thread: int) -> str:
        """Return the line that names a thread, or nothing if there was one."""
        number, name = self._thread(thread)
        if self._names.get(number) == name:
            return ""
        self._names[number] = name
        if len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]
        if number == self.pid:  # the main thread, which the header names
            return ""
        return f"{self._metadata(0, 'thread_name', number, name, str(number))}\n"

    def _mark(self, mark: Any, number: int, moment: int, thread: int, args: Args) -> str:
        line: dict[str, Any] = {"id": number, "name": mark.name, "cat": mark.category, "pid": self.pid}
        line["tid"] = self._thread(thread)[0]
        when = self.microseconds(moment)
        if mark.phase == "M":
            known = {key: str(when) if value is WHEN else value for key, value in args.items()}
            return _dumps({**line, "ph": "M", "args": {"hhash": self._host[1], **known}}) + "\n"
        line |= {"ts": when, "ph": mark.phase}
        if mark.phase == "C":  # viewers draw one chart for each name and ID, with a curve for each argument
            return _dumps({**line, "id": 0, "args": args, "point": args}) + "\n"
        if mark.phase == "i":
            line["s"] = "t"  # drawn on this thread's track only
        else:
            line["id"] = mark.key ^ self._arrows
            if mark.phase == "f":
                line["bp"] = "e"  # it ends at the enclosing span, not at the next one
        own: Args = _without_reserved(args) if self.include_args else {}
        point = {"point": own} if mark.phase == "i" else {}  # for readers that cannot know the names of arguments
        return _dumps({**line, "args": {"hhash": self._host[1], **own}, **point}) + "\n"


def _without_reserved(args: Args) -> Args:
    """Return arguments with an underscore after names that are reserved."""
    if any(name in args for name in _RESERVED):
        return {f"{name}_" if name in _RESERVED else name: value for name, value in args.items()}
    return args


def _process_name(pid: int) -> str:
    multiprocessing = sys.modules.get("multiprocessing.process")
    name = "MainProcess" if multiprocessing is None else multiprocessing.current_process().name
    rank = launched_rank()
    words = [] if rank is None else [f"rank {rank}"]
    words += [] if name == "MainProcess" else [name]
    return ", ".join(words) or f"process {pid}"


def _hash(text: str) -> str:
    import hashlib  # here, since it takes long to import

    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
