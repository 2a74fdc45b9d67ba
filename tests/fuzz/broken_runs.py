"""Run directories as no recorder leaves them: a few good ones, and all that can be done to their files."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import socket
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from support.synthetic import START, Made

__all__ = ["BASES", "EDITS", "SECRET", "Change", "changes", "do", "files_of", "secret"]

MARK = "</script><img src=x onerror=hit()>"
SECRET = "a-secret-that-lies-elsewhere"
VALUES = [
    *(-1, 0, 1, 2**31, 2**53, 2**63, 2**64, -(2**70), 1.5, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *(True, None, "", "x", MARK, "\x1b[2J\x00\ud800", "9" * 400, "../../../etc/passwd", [], [[]], {}, {"a": {}}),
]
EVENT = ["name", "cat", "ph", "ts", "dur", "pid", "tid", "id", "args"]
PLACE = ["step", "minibatch", "partition", "microbatch", "layer", "device", "size", "level", "p_idx"]
STAT = ["iteration", "layer", "tensor", "statistic", "value", "nans", "infs", "nonfinite", "ranks", "phase"]
RUN = ["format", "format_version", "world_size", "rank", "pid", "host", "hosts", "outcome", "ended", "started"]
RUN += [
    "restart",
    "launch",
    "ppid",
    "pipelines",
    "left_out",
    "command",
    "processors",
    "observed",
    "host_of_rank",
    "clock",
]
PIPELINE = ["schedule", "partitions", "chunks", "balance", "devices", "checkpoint", "batch_size", "layers", "ranks"]
CLOCK = ["offset_correction_ns", "drift", "drift_since_ns", "error_ns"]
LAYERS = [["embed", "block0"], ["block1", "head"]]

DAMAGED = (ValueError, LookupError, OSError, EOFError, TypeError, AttributeError, zlib.error)
"""What a change may meet in files that were damaged before."""
Change = tuple[Any, ...]
"""What is done to a run: the kind, a place from 0 to 1 that chooses the file, and more."""


# Runs to begin with.


def one_process(folder: Path) -> Path:
    """Six steps of two partitions; a NaN in the fourth."""
    made = Made(folder, balance=[2, 2], chunks=2)
    at = 0
    for step in range(6):
        end = made.gpipe(step, lambda phase, i, j: 100 * (j + 1), at=at, layers=LAYERS.__getitem__)
        made.span("compute", "step", begin=end, dur=50)
        made.span("dataloader", "fetch", begin=end + 60, dur=20)
        made.transfer(step, partition=1, microbatch=0, begin=at + 95, dur=5)
        at = end + 100
        for layer in ("embed", "head"):
            made.stat(layer, "activation", "mean", step, 0.25 * step)
        made.log(f"2023-11-14T22:13:20.00000{step}+00:00 INFO train [step {step}] a line")
    bad = {"iteration": 4, "layer": "head", "tensor": "activation", "statistic": "mean", "value": None}
    made.stats[0].append({**bad, "nonfinite": "nan", "nans": 3})
    return made.write()


def replicas(folder: Path) -> Path:
    """Two ranks that have the same partitions, with clocks that were compared."""
    made = Made(folder, balance=[1, 1], chunks=2, clock={"offset_correction_ns": 0})
    for rank in range(2):
        for step in range(4):
            made.gpipe(step, lambda *_: 100, at=step * 1000 + 7 * rank, rank=rank)
            made.stat("l0", "wgrad", "std", step, 1.0, rank=rank)
    clock = {"offset_correction_ns": -7000, "drift": 1e-6, "drift_since_ns": START * 1000, "error_ns": 2000}
    made.ranks[1] = {"rank": 1, "pid": 4001, "host": "there", "clock": clock}
    made.pipeline["ranks"] = [[0, 1], [0, 1]]
    return made.write()


def restarted(folder: Path) -> Path:
    """The second attempt of a run."""
    made = Made(folder, balance=[1, 1], chunks=2, restart=1, launch="abc", ppid=1)
    for step in range(3):
        made.gpipe(step, lambda *_: 100, at=step * 1000)
    run = made.write()
    first = run / "trace/rank-00000.pfw.gz"
    shutil.copy(first, first.with_name("rank-00000-restart-1.pfw.gz"))
    return run


def foreign(folder: Path) -> Path:
    """Spans of another program, in Chrome's format, beside numbers of a third."""
    folder.mkdir()
    events = [
        {"name": f"op{k}", "cat": "cpu_op", "ph": "X", "ts": 10 * k, "dur": 5, "pid": 1, "tid": 1} for k in range(50)
    ]
    (folder / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    lines = [json.dumps({"step": step, "loss": 1.0 / (step + 1)}) for step in range(5)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


BASES = {"one process": one_process, "replicas": replicas, "restarted": restarted, "foreign": foreign}


# What is done to them.

share = st.floats(0, 1, exclude_max=True)
value = st.sampled_from(range(len(VALUES))).map(VALUES.__getitem__)


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """Draw what is done to a run, as plain values."""
    kind = draw(st.sampled_from([*BYTES, *EDITS, *PLACES]))
    if kind in BYTES:
        return kind, draw(share), draw(share), draw(st.integers(0, 7))
    if kind in EDITS:
        return kind, draw(share), draw(st.sampled_from(EDITS[kind])), draw(value)
    return kind, draw(share), draw(st.integers(0, 3))


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())


def matching(run: Path, pattern: str) -> list[Path]:
    return [path for path in files_of(run) if path.relative_to(run).match(pattern)]


def chosen(items: list[Any], place: float) -> Any:
    return items[int(place * len(items))] if items else None


def cut(file: Path, place: float, bit: int) -> None:
    os.truncate(file, int(file.stat().st_size * place))


def flip(file: Path, place: float, bit: int) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[int(place * len(content))] ^= 1 << bit
        file.write_bytes(content)


def insert(file: Path, place: float, bit: int) -> None:
    content = file.read_bytes()
    at = int(place * len(content))
    file.write_bytes(content[:at] + bytes([bit, 255, 0, 10]) * (1 + bit) + content[at:])


def forget(file: Path, place: float, bit: int) -> None:
    """Leave a hole, as a disk does that lost a block."""
    content = bytearray(file.read_bytes())
    at = int(place * len(content))
    content[at : at + 16 * (bit + 1)] = bytes(len(content[at : at + 16 * (bit + 1)]))
    file.write_bytes(content)


def empty(file: Path, place: float, bit: int) -> None:
    file.write_bytes(b"")


BYTES = {f.__name__: f for f in (cut, flip, insert, forget, empty)}
EDITS = {
    "event": EVENT,
    "place of an event": PLACE,
    "all events": [*EVENT, *PLACE],
    "statistic": STAT,
    "run": RUN,
    "pipeline": PIPELINE,
    "clock": CLOCK,
    "log": ["line"],
}
PLACES = ("remove", "copy", "pipe", "device", "socket", "folder", "link", "shuffle", "strange file", "bomb", "lock")


def edit(run: Path, kind: str, place: float, name: str, new: Any) -> None:
    """Set something that a file says to another value."""
    if kind in ("event", "place of an event", "all events"):
        if (file := chosen(matching(run, "*.pfw.gz"), place)) is not None:
            lines = gzip.decompress(file.read_bytes()).decode().split("\n")
            rows = [k for k, line in enumerate(lines) if line.startswith("{")]
            for k in rows if kind == "all events" else [chosen(rows, (place * 7) % 1)]:
                event = json.loads(lines[k])
                (event["args"] if name in PLACE else event)[name] = new
                lines[k] = json.dumps(event)
            file.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    elif kind == "statistic":
        if (file := chosen(matching(run, "stats/*.jsonl"), place)) is not None:
            lines = file.read_text().splitlines()
            k = int((place * 7) % 1 * len(lines))
            lines[k] = json.dumps({**json.loads(lines[k]), name: new})
            file.write_text("\n".join(lines) + "\n")
    elif kind == "log":
        if (file := chosen(matching(run, "logs/*.log"), place)) is not None:
            with file.open("a", errors="replace") as log:
                log.write(f"2023-11-14T22:13:20+00:00 ERROR {new} [step {new} partition {new}] {new}\n{new}\n")
    else:
        files = matching(run, "run.json") + (matching(run, "ranks/*.json") if kind == "clock" else [])
        if (file := chosen(files, place)) is not None:
            facts = json.loads(file.read_text())
            inner = facts if kind == "run" else facts["pipelines"][0] if kind == "pipeline" else facts["clock"]
            inner[name] = new
            file.write_text(json.dumps(facts))


def put(run: Path, kind: str, place: float, number: int) -> None:
    """Put something else in the place of a file, or beside the files."""
    if kind in ("strange file", "bomb"):
        names = ["rank-00009.pfw.gz", f"a\n{MARK.replace('/', '')}.pfw.gz", "rank-99999999999.pfw", "trace.json"]
        folder = run / "trace" if (run / "trace").is_dir() else run
        content = (
            gzip.compress(bytes(2**22)) if kind == "bomb" else [b"", b"[" * 5000, b"{}\n[\n", b"\xff" * 999][number]
        )
        (folder / names[number]).write_bytes(content)
        return
    file = chosen(files_of(run), place)
    if file is None:
        return
    if kind == "copy":
        names = [f"copy-of-{file.name}", file.name.replace("00000", "00001"), file.name.replace(".pfw", ".part2.pfw")]
        if not (target := file.with_name([*names, f"{file.name}.bak"][number])).exists():
            shutil.copy(file, target)
    elif kind == "shuffle":
        if file.name.endswith(".pfw.gz"):
            lines = gzip.decompress(file.read_bytes()).split(b"\n")
            file.write_bytes(gzip.compress(b"\n".join(lines[::-1] if number % 2 else sorted(lines)), mtime=0))
    elif kind == "lock":
        file.chmod(0)
    else:
        file.unlink()
        _ODD[kind](file)


def bind(path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        before = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # the name of a socket must be short
        try:
            listening.bind(path.name)
        finally:
            os.fchdir(before)
            os.close(before)


_ODD = {
    "remove": lambda path: None,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": bind,
    "folder": os.mkdir,
    "link": lambda path: path.symlink_to(secret()),
}


def secret() -> Path:
    path = Path(tempfile.gettempdir()) / f"pipesight-fuzz-{os.getpid()}.jsonl"
    if not path.exists():
        facts = {"iteration": 0, "layer": SECRET, "tensor": SECRET, "statistic": SECRET, "value": 1, "outcome": SECRET}
        path.write_text(json.dumps({**facts, "ph": "X", "name": SECRET, "ts": 1, "dur": 1}) + "\n")
    return path


def do(run: Path, change: Change) -> None:
    """Do it; where something before has left nothing to do it to, do nothing."""
    kind, place, *more = change
    if kind in BYTES:
        if (file := chosen(files_of(run), place)) is not None:
            BYTES[kind](file, *more)
    elif kind in EDITS:
        with contextlib.suppress(*DAMAGED):
            edit(run, kind, place, *more)
    else:
        with contextlib.suppress(*DAMAGED):
            put(run, kind, place, *more)
