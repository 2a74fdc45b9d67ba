"""A program that records and ends as a plan says, and writes down what it has recorded, for `test_traces`.

Before some events, each thread appends to a file of its own what it is going to record; afterwards, that it has, and
when. Before a process asks for its end, it writes down when that was. Nothing of this goes through pipesight.

    recording.py PLAN       {"interval": 0.5, "max_bytes": null, "texts": [...], "process": {...}}
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pipesight.trace import Node, counter, flush, instant, start, stop

FOLDER = Path.cwd()
KINDS = ("span", "instant", "counter", "decorated", "by hand")
CHUNK = 20


def live(plan: dict[str, Any]) -> None:
    """Be a process: record in threads, start other processes, and end."""
    if plan["room"] is not None:
        os.pwrite = limited(os.pwrite, plan["room"])  # type: ignore[assignment]
    everyone = threading.Barrier(plan["threads"])
    daemon = plan["end"] == "with daemons"
    threads = [
        threading.Thread(target=record, args=(plan, number, everyone, daemon), daemon=daemon)
        for number in range(plan["threads"])
    ]
    for thread in threads:
        thread.start()
    if plan["forks while recording"]:
        start_others(plan)
    for thread in threads:
        thread.join(0.1 if daemon else None)
    if not plan["forks while recording"]:
        start_others(plan)
    record(plan, -1, None, False)
    if plan["end"] == "SIGKILL":
        flush()
    write("asked", -1, {"at": time.perf_counter_ns(), "end": plan["end"]})
    END[plan["end"]]()


def record(plan: dict[str, Any], number: int, everyone: threading.Barrier | None, forever: bool) -> None:
    """Record as many events as the plan says, or until the process ends."""
    if everyone is not None:
        everyone.wait()
    begun = 0
    while begun < plan["events"] or forever:
        some = range(begun, begun + CHUNK)
        keys = [(number + 2) * 10**7 + k for k in some]
        events = [(KINDS[key % len(KINDS)], plan["texts"][key % len(plan["texts"])], key) for key in keys]
        write("going to", number, {"events": events})
        for kind, text, key in events:
            record_one(kind, text, key)
        write("have", number, {"at": time.perf_counter_ns()})
        begun += CHUNK
        if forever:
            time.sleep(0.001)


def record_one(kind: str, text: str, key: int) -> None:
    """Record one event, with a key that no other of the process has."""
    if kind == "span":
        with Node(text, "fuzz")(args={"key": key, "text": text}):
            pass
    elif kind == "instant":
        instant(text, key=key, text=text)
    elif kind == "counter":
        counter(text, key=key)
    elif kind == "decorated":
        Node(text, "fuzz")(args={"key": key, "text": text})(do_nothing)()
    else:
        node = Node(text, "fuzz", args={"key": key, "text": text})
        node.start()
        node.stop()


def do_nothing() -> None:
    """Be decorated."""


def write(what: str, number: int, facts: dict[str, Any]) -> None:
    """Append a line to what this thread has written down."""
    line = json.dumps({"what": what, **facts}) + "\n"
    descriptor = os.open(FOLDER / f"truth-{os.getpid()}-{number}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def limited(real: Any, room: int) -> Any:
    """Return what writes to a disk that is full at some place of each file."""

    def pwrite(descriptor: int, block: bytes, at: int) -> int:
        if at + len(block) > room:
            raise OSError(28, "No space left on device")
        return int(real(descriptor, block, at))

    return pwrite


# Other processes.


def start_others(plan: dict[str, Any]) -> None:
    """Start the processes that the plan has for this one, in a thread perhaps, and wait until they end."""
    for other in plan["others"]:
        if other["from a thread"]:
            thread = threading.Thread(target=start_one, args=(other,))
            thread.start()
            thread.join()
        else:
            start_one(other)


def start_one(plan: dict[str, Any]) -> None:
    """Start a process, wait for its end, and write down its status."""
    if plan["method"] == "os.fork":
        pid = os.fork()
        if pid == 0:
            live(plan)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    elif plan["method"].endswith("loader"):
        status = load(plan)
    else:
        process = multiprocessing.get_context(plan["method"]).Process(target=live, args=(plan,))
        process.start()
        process.join()
        status = int(process.exitcode or 0)
    what = {name: plan[name] for name in ("end", "method", "from a thread")}
    write("status", -2, {**what, "status": status})


KEPT: list[Any] = []


def load(plan: dict[str, Any]) -> int:
    """Let a worker of a DataLoader record, in threads of its own; it may be kept until the program ends."""
    from torch.utils.data import DataLoader

    loader = DataLoader(Items(plan), num_workers=1, persistent_workers=plan["method"] == "kept loader")
    KEPT.append(loader)
    return 0 if [int(item) for item in loader] == [0, 1] else 1


class Items:
    """Two items; to make one is to record in threads."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        everyone = threading.Barrier(self._plan["threads"])
        numbers = [100 * index + k for k in range(self._plan["threads"])]
        threads = [threading.Thread(target=record, args=(self._plan, n, everyone, False)) for n in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return index


# Ends.


def fail() -> None:
    """End by an exception."""
    raise KeyError("mine")


def kill(number: int) -> None:
    """End by a signal."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def stop_and_leave() -> None:
    """End the trace first."""
    stop()
    os._exit(4)


def become_another() -> None:
    """Become another program."""
    os.execv(sys.executable, [sys.executable, "-S", "-c", ""])


def leave_in_a_thread() -> None:
    """Let a thread end the process."""
    threading.Thread(target=os._exit, args=(4,)).start()
    time.sleep(60)


END: dict[str, Any] = {
    "return": lambda: None,
    "with daemons": lambda: None,
    "sys.exit": lambda: sys.exit(3),
    "exception": fail,
    "os._exit": lambda: os._exit(4),
    "os._exit in a thread": leave_in_a_thread,
    "stop": stop_and_leave,
    "exec": become_another,
    "SIGTERM": lambda: kill(signal.SIGTERM),
    "SIGHUP": lambda: kill(signal.SIGHUP),
    "SIGKILL": lambda: kill(signal.SIGKILL),
}


def main() -> None:
    """Be the first process."""
    whole = json.loads(Path(sys.argv[1]).read_text())
    (FOLDER / "first.pid").write_text(str(os.getpid()))
    os.dup2(os.open(FOLDER / "stderr.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    start(FOLDER / "run", interval=whole["interval"], max_bytes=whole["max_bytes"])
    live(whole["process"])


if __name__ == "__main__":
    __import__("recording").main()  # so that processes which are spawned find what they are to run
