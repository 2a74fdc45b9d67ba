"""Reading a run: all tables of its report, against `gunzip -c` of the same files, and the memory that it takes.

Every turn is a process of its own, so that it includes starting Python and importing DuckDB.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness import ROOT, Contender, Options, Outcome, Turn, progress
from benchmarks.job import Job
from benchmarks.tables import MEBIBYTES, Goal, Quantity, show, show_goals, show_limit

__all__ = ["run"]

SECONDS = Quantity("s to read it all", lambda turn: turn.seconds)
PARTITIONS, MICROBATCHES, LAYERS = 4, 4, 4
MEMBER = 8000  # lines, or half a second of them
MEBIBYTES_AT_MOST = 1024

READ = """
import sys
from pipesight.report import open_run
def main():
    with open_run(sys.argv[1]) as run:
        run.tasks(), run.transfers(), run.spans(), run.layer_times(), run.names(), run.steps(), run.ranks(), run.notes
        print(run.events)
main()
"""


def run(options: Options) -> bool:
    """Measure; return whether nothing crashed and memory stayed within its limit."""
    sound = True
    with tempfile.TemporaryDirectory(prefix="pipesight-reading-") as name:
        folder = Path(name)
        counts = {"full": (1_000_000, 5_000_000), "brief": (5_000_000,), "quick": (100_000, 500_000)}[options.size]
        for count in counts:
            path = folder / f"{count}.pfw.gz"
            write(path, events(count))
            sound &= compare(f"{count:,} events in one file", path, [path], rounds=options.rounds(9))
            path.unlink()
        ranks, each = (100, 200) if options.quick else (1000, 5000)
        for rank in range(ranks):
            write(folder / f"trace/rank-{rank:05}.pfw.gz", events(each, seed=rank))
            progress(f"writing {rank + 1} of {ranks}")
        progress("")
        files = sorted((folder / "trace").iterdir())
        sound &= compare(f"{ranks:,} ranks of {each:,} events", folder, files, rounds=options.rounds(5))
    return sound


def compare(title: str, path: Path, files: Sequence[Path], *, rounds: int) -> bool:
    """Measure in turns; print; return whether nothing crashed and memory stayed within its limit."""
    commands: dict[str, Callable[[], Turn]] = {
        "gunzip": lambda: timed(["gunzip", "-c", *map(str, files)]),
        "pipesight": lambda: timed([sys.executable, "-c", READ, str(path)]),
    }
    outcomes = {name: Outcome(Contender(name, Job(engine="reading", workload=title), None)) for name in commands}
    for number in range(rounds):
        for name in random.Random(number).sample(list(commands), len(commands)):
            try:
                outcomes[name].turns.append(commands[name]())
            except subprocess.CalledProcessError as error:
                outcomes[name].crashed = f"exit status {error.returncode}"
        progress(f"round {number + 1} of {rounds}")
    progress("")
    found = list(outcomes.values())
    sound = show(title, found, reference="gunzip", kind="cost", quantity=SECONDS)
    show_goals(found, [Goal("pipesight", "gunzip", "cost", 2.0)], SECONDS)
    most = max((MEBIBYTES.of(turn) for turn in outcomes["pipesight"].turns), default=0.0)
    met = most <= MEBIBYTES_AT_MOST
    show_limit("memory of pipesight, MiB", most, MEBIBYTES_AT_MOST, met=met)
    return sound and met


def timed(command: Sequence[str]) -> Turn:
    """Run a command to its end, and return what it took."""
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    before = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": paths}
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - before
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Turn(seconds=seconds, peak_bytes=used.ru_maxrss * 1024, cpu_seconds=used.ru_utime + used.ru_stime)


def write(path: Path, lines: Iterator[bytes]) -> None:
    """Write a trace as pipesight does: as gzip members of a few thousand lines."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        held = [b"[\n"]
        for line in lines:
            held.append(line)
            if len(held) == MEMBER:
                file.write(packed(held))
                held = []
        file.write(packed([*held, b"]\n"]))


def packed(lines: Sequence[bytes]) -> bytes:
    packer = zlib.compressobj(4, zlib.DEFLATED, 31, 7, zlib.Z_FILTERED)
    return packer.compress(b"".join(lines)) + packer.flush()


def events(count: int, *, seed: int = 0) -> Iterator[bytes]:
    """Yield the events of a pipeline: tasks, and the layers in them, which take their time at random."""
    draw = random.Random(seed)
    now, number = 1_794_794_750_745_264, 10
    while number < count + 10:
        step = number // (PARTITIONS * MICROBATCHES * 2 * (LAYERS + 1))
        for j in range(PARTITIONS):
            for i in range(MICROBATCHES):
                for phase in ("forward", "backward"):
                    where = f'"step":{step},"minibatch":{step},"partition":{j},"microbatch":{i}'
                    begin = now = now + draw.randint(3, 400)
                    for k in range(LAYERS):
                        dur = draw.randint(50, 400)
                        layer = f'{where},"layer":"block{j * LAYERS + k}"'
                        yield event(number, f"{phase}.layer", j, now, dur, layer, level=3)
                        now, number = now + dur, number + 1
                    yield event(number, phase, j, begin, now - begin, where, level=2)
                    number += 1


def event(number: int, name: str, j: int, begin: int, dur: int, where: str, *, level: int) -> bytes:
    return (
        f'{{"id":{number},"name":"{name}","cat":"compute","pid":4711,"tid":{j},"ts":{begin},"dur":{dur},"ph":"X",'
        f'"args":{{"hhash":"6773142abec9c34b","p_idx":{number},{where},"level":{level}}}}}\n'
    ).encode()
