"""Random programs record in threads and processes and end in every way; the truth is what they wrote down themselves.

Every event that a program had recorded before it asked for its end is on disk, once and as it was, or it is counted as
lost, in the file and on stderr. Before SIGKILL only what was flushed is promised.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from fuzz.cases import account, fuzz
from pipesight.runs.reading.run import open_run
from support import warm

PROGRAM = Path(__file__).with_name("recording.py")
ENDS = ["return", "with daemons", "sys.exit", "exception", "os._exit", "os._exit in a thread", "stop", "exec"]
ENDS += ["SIGTERM", "SIGHUP", "SIGKILL"]
METHODS = ["os.fork", "os.fork", "os.fork", "fork", "fork", "spawn", "forkserver"]
STATUS = {"sys.exit": 3, "exception": 1, "os._exit": 4, "os._exit in a thread": 4, "stop": 4}
STATUS |= {name: -getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGKILL")}
HOSTILE = ["", "%d %s %%", '"\\\n\r\0', "]", "\ud800", "\u2028é\U0001f600", "{'a': 1}", "x" * 300, "hhash"]

texts = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=20), min_size=1, max_size=4)


@st.composite
def processes(draw: st.DrawFn, depth: int = 2, method: str | None = None) -> dict[str, Any]:
    """A process, and those that it starts."""
    plan: dict[str, Any] = {"method": method, "end": draw(st.sampled_from(ENDS)), "texts": draw(texts)}
    plan |= {"threads": draw(st.integers(1, 6)), "events": draw(st.sampled_from([20, 100, 400]))}
    plan["forks while recording"] = draw(st.booleans())
    full = plan["end"] not in ("exec", "SIGKILL") and draw(st.integers(0, 4)) == 0
    plan["room"] = draw(st.integers(1, 12_000)) if full else None
    plan["from a thread"] = method is not None and draw(st.booleans())
    methods = METHODS + (["loader", "kept loader"] if method is None else [])
    if method in ("os.fork", "fork"):  # Python's server of forks is of no use to those that are forked
        methods = [other for other in methods if other != "forkserver"]
    others = draw(st.lists(st.sampled_from(methods), max_size=2)) if depth else []
    plan["others"] = [draw(loaders(other) if "loader" in other else processes(depth - 1, other)) for other in others]
    return plan


@st.composite
def loaders(draw: st.DrawFn, method: str) -> dict[str, Any]:
    """A worker of a DataLoader: it ends as torch ends it, once it has made its items."""
    plan = {"method": method, "end": "return", "texts": draw(texts), "threads": draw(st.integers(1, 6))}
    return plan | {"events": draw(st.sampled_from([20, 100])), "room": None, "from a thread": False}


cases = st.fixed_dictionaries(
    {
        "interval": st.sampled_from([0.001, 0.5, 60]),
        "max_bytes": st.sampled_from([None, None, 3000]),
        "convert": st.integers(0, 4).map(lambda number: number == 0),
        "process": processes(),
    }
)


@fuzz(few=8)
@given(case=cases)
def test_every_event_is_accounted_for(case: dict[str, Any]) -> None:
    """What programs recorded is on disk, or counted as lost and said."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-traces-"))
    try:
        (folder / "plan.json").write_text(json.dumps(case))
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIPESIGHT_")}
        ended = warm.run(str(PROGRAM), "plan.json", cwd=folder, env=env, timeout=180)
        wait_for_orphans(folder)
        stderr = (folder / "stderr.txt").read_text(errors="replace")
        assert ended.returncode == STATUS.get(case["process"]["end"], 0), stderr
        assert not re.search("Fatal|Exception in thread pipesight|stuck", stderr), stderr
        lost = check(folder, stderr, limited=has_limit(case["process"]))
        if case["convert"]:
            check_conversion(folder)
        event("lost some" if lost else "lost none")
        account("traces", "agreed")
    finally:
        shutil.rmtree(folder)


def wait_for_orphans(folder: Path) -> None:
    """Wait for workers that are kept: where their program ended on the spot, they notice after some seconds."""
    until = time.monotonic() + 60
    pids = {int(path.name.split("-")[1]) for path in folder.glob("truth-*.jsonl")}
    while time.monotonic() < until and any(map(is_running, pids)):
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def has_limit(plan: dict[str, Any]) -> bool:
    return plan["room"] is not None or any(has_limit(other) for other in plan.get("others", ()))


def check(folder: Path, stderr: str, *, limited: bool) -> int:
    """Compare what processes wrote down with what is on disk; return how many events were lost."""
    found, lost = on_disk(folder, stderr)
    total = 0
    for pid, (promised, possible, statuses, is_killed) in truth(folder).items():
        there = found.pop(pid, Counter())
        assert not there - possible, f"process {pid}: never recorded, twice there, or changed"
        missing, gone = promised - there, lost.get(pid, 0)
        if not (limited and is_killed):  # on a full disk, nobody is left to count
            assert missing.total() <= gone, f"process {pid}: {missing.total()} missing, {gone} counted"
        assert limited or not gone, f"process {pid}: {gone} lost"
        assert gone <= (possible - there).total(), f"process {pid}: {gone} counted as lost, but they are there"
        for status in statuses:
            in_thread = status["from a thread"] and status["method"] == "os.fork"
            expected = 0 if in_thread and status["end"] in ("sys.exit", "exception") else STATUS.get(status["end"], 0)
            assert status["status"] == expected, status
        total += gone
    assert not found, "of processes that did not record"
    return total


def truth(folder: Path) -> dict[int, tuple[Counter[Any], Counter[Any], list[dict[str, Any]], bool]]:
    """Return, of each process, what it had recorded when it asked for its end, all that it may have, the statuses of
    those that it started, and whether it was killed.
    """
    lines: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for path in sorted(folder.glob("truth-*.jsonl")):
        _, pid, thread = re.fullmatch(r"(truth)-(\d+)-(-?\d+)\.jsonl", path.name).groups()  # type: ignore[union-attr]
        for line in path.read_text().splitlines():
            lines.setdefault(int(pid), []).append((int(thread), json.loads(line)))
    known = {}
    for pid, said in lines.items():
        asked = min((line["at"] for _, line in said if line["what"] == "asked"), default=float("inf"))
        promised: Counter[Any] = Counter()
        possible: Counter[Any] = Counter()
        begun: dict[int, list[Any]] = {}
        for thread, line in said:
            if line["what"] == "going to":
                begun[thread] = [(kind_on_disk(kind), text, key) for kind, text, key in line["events"]]
                possible.update(begun[thread])
            elif line["what"] == "have" and line["at"] <= asked:
                promised.update(begun[thread])
        is_killed = any(line.get("end") == "SIGKILL" for _, line in said if line["what"] == "asked")
        known[pid] = promised, possible, [line for _, line in said if line["what"] == "status"], is_killed
    return known


def kind_on_disk(kind: str) -> str:
    return {"instant": "i", "counter": "C"}.get(kind, "X")


def on_disk(folder: Path, stderr: str) -> tuple[dict[int, Counter[Any]], dict[int, int]]:
    """Return the events of each process that are on disk, and how many it says were lost."""
    found: dict[int, Counter[Any]] = {}
    lost: dict[int, int] = {}
    told: set[int] = set()
    counts = re.findall(r"lost ([\d,]+) events? of the trace (.*)", stderr)
    said = {path: int(count.replace(",", "")) for count, path in counts}
    for path in folder.glob("run*.pfw.gz"):
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n") if len(line) > 1]
        if not lines:  # there was room for nothing
            continue
        (pid,) = {line["pid"] for line in lines}
        events = found.setdefault(pid, Counter())
        for line in lines:
            if line["cat"] in ("fuzz", "instant", "counter"):
                args = line["args"]
                assert line["ph"] == "C" or args["text"] == line["name"]
                events[line["ph"], line["name"], args["key"]] += 1
            elif line["name"] == "end" and line["cat"] == "dftracer":
                lost[pid] = lost.get(pid, 0) + line["args"]["lost_events"]
    for path, count in said.items():  # the count on stderr is of all parts, and there where the file has no room for it
        of_process = re.search(r"-(\d+)\.pfw\.gz$", path)
        pid = int(of_process[1]) if of_process else int((folder / "first.pid").read_text())
        told.add(pid)
        assert lost.get(pid, 0) <= count
        lost[pid] = count
    assert {pid for pid, count in lost.items() if count} <= told, "counted, but not said"
    return found, lost


def check_conversion(folder: Path) -> None:
    """A dataset of a trace has as many rows as the trace has lines."""
    for path in sorted(folder.glob("run*.pfw.gz"))[:1]:
        text = gzip.decompress(path.read_bytes())
        lines = sum(len(line) > 1 for line in text.split(b"\n"))
        if b'"cat":"fuzz"' not in text:  # without a span, it is no run
            continue
        alone = folder / "alone"
        alone.mkdir()
        shutil.copy(path, alone / "run.pfw.gz")
        with open_run(alone / "run.pfw.gz", whole=True) as run:
            assert run.write_dataset(folder / "dataset") == lines
