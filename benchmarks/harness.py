"""Interleaved measuring: contenders are processes that take turns, so that noise hits all alike.

Each takes the same number of steps a turn, and only one runs at a time:

    round 0   plain  ours  torchgpipe
    round 1   ours  torchgpipe  plain      ratios are taken within a round, then their median
"""

import contextlib
import dataclasses
import json
import math
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Self, TypeVar

from benchmarks.job import Job

if TYPE_CHECKING:
    from benchmarks.tables import Table

__all__ = ["Contender", "Options", "Outcome", "Turn", "measure"]

ROOT = Path(__file__).resolve().parents[1]

T = TypeVar("T")

# A contender that says nothing for this long hangs.
PATIENCE_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A row of a table: a job, and the interpreter that runs it (`None`: there is none here)."""

    name: str
    job: Job
    python: Path | None
    pythonpath: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What the command line says about all benchmarks."""

    peers: Path | None = None
    torchgpipe_path: Path | None = None
    size: Literal["full", "brief", "quick"] = "full"
    part: tuple[int, int] = (1, 1)
    """Which one of how many parts of a long benchmark to run."""
    known: Sequence["Table"] = ()
    """What earlier parts found."""

    def part_of(self, items: Sequence[T]) -> Sequence[T]:
        """Return those of this part, as many in each."""
        k, parts = self.part
        return items[len(items) * (k - 1) // parts : len(items) * k // parts]

    @property
    def quick(self) -> bool:
        """Whether it is enough to see that it runs."""
        return self.size == "quick"

    def contender(self, name: str, job: Job) -> Contender:
        """Give a job the interpreter that can run it."""
        if job.engine != "torchgpipe":
            return Contender(name, job, Path(sys.executable))
        if self.torchgpipe_path is not None:
            return Contender(name, job, Path(sys.executable), self.torchgpipe_path)
        return Contender(name, job, self.peers)

    def rounds(self, full: int) -> int:
        """Of a full run so many; of a brief one a third, an odd number, so that one round is the median."""
        return {"full": full, "brief": max(3, math.ceil(full / 3) | 1), "quick": 3}[self.size]

    def turn_seconds(self, full: float) -> float:
        return {"full": full, "brief": max(full / 2, min(full, 0.2)), "quick": min(full, 0.05)}[self.size]


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One contender's part of one round."""

    seconds: float
    peak_bytes: int
    cpu_seconds: float


@dataclasses.dataclass(slots=True)
class Outcome:
    """All turns of one contender, or why there are none."""

    contender: Contender
    turns: list[Turn] = dataclasses.field(default_factory=list)
    skipped: str | None = None
    crashed: str | None = None


class CrashError(RuntimeError):
    """A contender ended, or hung, instead of answering."""


class Running:
    """A contender's process, and the conversation with it."""

    def __init__(self, contender: Contender) -> None:
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        paths = [str(contender.pythonpath or ""), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [str(contender.python), "-m", "benchmarks.contender", contender.job.dumps()],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dismiss()
        try:
            self.process.wait(timeout=0 if kind else 20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.listener.join()
        self.stderr.close()

    def dismiss(self) -> None:
        """Ask it to end, which the end of its stdin does."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def ask(self, steps: int) -> Turn:
        try:
            print(steps, file=self.process.stdin, flush=True)
        except OSError:
            raise CrashError(self._last_words()) from None
        answer = self.hear()
        return Turn(seconds=answer["seconds"], peak_bytes=int(answer["peak_bytes"]), cpu_seconds=answer["cpu_seconds"])

    def hear(self) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            self.process.kill()
            raise CrashError(f"said nothing for {PATIENCE_SECONDS:.0f} s") from None
        if not line:
            raise CrashError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put("")

    def _last_words(self) -> str:
        status = self.process.wait()
        self.stderr.seek(0)
        words = self.stderr.read().decode(errors="replace").strip()
        print(words, file=sys.stderr)
        # Notes may follow the error's own line, and torch puts "[rank0]: " before it.
        errors = [line for line in words.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception): .", line)]
        return f"exit status {status}: {errors[-1][:200] if errors else 'see its stderr above'}"


def measure(contenders: Sequence[Contender], *, rounds: int, turn_seconds: float) -> list[Outcome]:
    """Run the contenders in turns and return all their times.

    All take the same number of steps a turn: so many that the first contender is busy for `turn_seconds`.
    A contender that crashes, or whose gradients are not those of the first, is out; the others go on.
    """
    outcomes = [Outcome(contender) for contender in contenders]
    for outcome in outcomes:
        if outcome.contender.python is None:
            outcome.skipped = "no such package here; see --peers and --torchgpipe-path"
    with contextlib.ExitStack() as stack:
        present = [
            (outcome, stack.enter_context(Running(outcome.contender)))
            for outcome in outcomes
            if outcome.skipped is None
        ]
        present = ready(present)
        steps = 0
        order = random.Random(0)
        for number in range(rounds):
            for outcome, running in order.sample(present, len(present)) if number else present:
                if outcome.crashed is not None:
                    continue
                try:
                    steps = steps or max(1, math.ceil(turn_seconds / running.ask(1).seconds))
                    outcome.turns.append(running.ask(steps))
                except CrashError as crash:
                    outcome.crashed = str(crash)
            progress(f"round {number + 1} of {rounds}")
        progress("")
        for _, running in present:
            running.dismiss()
    return outcomes


def ready(present: list[tuple[Outcome, Running]]) -> list[tuple[Outcome, Running]]:
    """Wait until all have built their models, and keep those that compute the same gradients."""
    kept = []
    expected: list[float] | None = None
    for outcome, running in present:
        progress(f"waiting for {outcome.contender.name}")
        try:
            norms: list[float] = running.hear()["gradient_norms"]
        except CrashError as crash:
            outcome.crashed = str(crash)
            continue
        expected = norms if expected is None else expected
        if (difference := differ(norms, expected)) is None:
            kept.append((outcome, running))
        else:
            outcome.crashed = f"wrong gradients: {difference}"
    return kept


def differ(norms: list[float], expected: list[float]) -> str | None:
    """Say which gradient is not within 1% of what is expected, unless both are next to nothing."""
    if len(norms) != len(expected):
        return f"{len(norms)} of them, not {len(expected)}"
    nothing = 1e-4 * max(expected, default=0.0)
    for number, (norm, right) in enumerate(zip(norms, expected, strict=True)):
        if not math.isclose(norm, right, rel_tol=0.01, abs_tol=nothing):
            return f"the norm of number {number} is {norm:.6g}, not {right:.6g}"
    return None


def progress(text: str) -> None:
    """Show what is going on, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
