"""Jobs of many workers, simulated operation by operation, and written as traces of operations.

Nothing here is shared with the replay: a stage runs its tasks one after the other, a message leaves when its task has
ended and the one before it is through, and a collective begins with its last worker. So a job without delays takes
exactly as long as its replay says, and one that is made again with other durations says what a scenario must give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipesight.runs.reading.event_tables import Operations
from pipesight.runs.reading.operation_trace import read_operations

__all__ = ["MadeJob", "orders"]

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id")
Task = tuple[str, int, int]  # phase, part of the model, micro-batch
Worker = tuple[int, int]  # replica, stage


def orders(stages: int, chunks: int, microbatches: int) -> list[list[Task]]:
    """Return the tasks of each stage in order: 1F1B or, with several chunks, all forwards and then all backwards."""
    if chunks > 1:
        parts = [[chunk * stages + stage for chunk in range(chunks)] for stage in range(stages)]
        return [
            [("forward", part, i) for part in own for i in range(microbatches)]
            + [("backward", part, i) for part in reversed(own) for i in range(microbatches)]
            for own in parts
        ]
    found: list[list[Task]] = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        own: list[Task] = [("forward", stage, i) for i in range(ahead)]
        for i in range(microbatches - ahead):
            own += [("forward", stage, ahead + i), ("backward", stage, i)]
        found.append(own + [("backward", stage, i) for i in range(microbatches - ahead, microbatches)])
    return found


@dataclass
class MadeJob:
    """A job, in seconds; ``compute(step, replica, task)`` and ``transfer(step, replica, from_stage, to_stage)``."""

    replicas: int = 2
    stages: int = 4
    chunks: int = 1
    microbatches: int = 6
    steps: int = 3
    compute: Callable[[int, int, Task], float] = lambda step, replica, task: 0.2 if task[0] == "backward" else 0.1
    transfer: Callable[[int, int, int, int], float] = lambda step, replica, source, target: 0.001
    collective: float = 0.01
    delay: float = 0.0
    """What no dependency explains, before each forward."""
    rows: list[tuple[object, ...]] = field(default_factory=list)

    def times(self) -> list[float]:
        """Simulate all steps; return how long each takes."""
        self.rows.clear()
        return [self._step(10 * step + 3) for step in range(self.steps)]

    def operations(self, folder: Path) -> Operations:
        """Simulate, write and read the job."""
        return read_operations(self.write(folder / "trace.parquet"))

    def write(self, path: Path) -> Path:
        """Simulate the job, and write its trace."""
        self.times()
        pq.write_table(pa.table(dict(zip(COLUMNS, map(list, zip(*self.rows, strict=True)), strict=True))), path)
        return path

    def _add(self, step, replica, stage, kind, begin, end, number, part=-1, i=-1):
        rank = stage * self.replicas + replica
        chunk = part // self.stages if part >= 0 else -1
        row = (replica, stage, rank, step, kind, begin, end - begin, number, chunk, part, i)
        self.rows.append(row)

    def _step(self, step: int) -> float:
        workers = [(replica, stage) for replica in range(self.replicas) for stage in range(self.stages)]
        for replica, stage in workers:
            self._add(step, replica, stage, "params-all-gather", 0.0, self.collective, 0)
        now: dict[Worker, float] = {}
        for replica in range(self.replicas):
            now |= {(replica, stage): end for stage, end in enumerate(self._pipeline(step, replica))}
        for replica, stage in workers:
            self._add(step, replica, stage, "layernorm-grads-all-reduce", now[replica, stage], now[replica, stage], 0)
        if self.stages > 1:
            for replica in range(self.replicas):
                self._together(step, "embedding-grads-all-reduce", [(replica, 0), (replica, self.stages - 1)], now)
        for stage in range(self.stages):
            self._together(step, "grads-reduce-scatter", [(r, stage) for r in range(self.replicas)], now)
        self._together(step, "optimizer-clip-main-grad", workers, now)
        for replica, stage in workers:
            self._add(step, replica, stage, "optimizer", now[replica, stage], now[replica, stage] + 0.02, 0)
            now[replica, stage] += 0.02
        return max(now.values())

    def _together(self, step: int, kind: str, workers: list[Worker], now: dict[Worker, float]) -> None:
        end = max(now[worker] for worker in workers) + self.collective
        for worker in workers:
            self._add(step, *worker, kind, now[worker], end, 0)
            now[worker] = end

    def _pipeline(self, step: int, replica: int) -> list[float]:
        """Simulate the tasks of a replica; return when each stage is done."""
        left = orders(self.stages, self.chunks, self.microbatches)
        parts = self.stages * self.chunks
        now = [self.collective] * self.stages
        ends: dict[Task, float] = {}
        streams: dict[tuple[int, str], list[float]] = {}  # when each message of a stream of a stage is through

        def stream(stage: int, kind: str) -> list[float]:
            return streams.setdefault((stage, kind), [0.0])

        while any(left):
            before = sum(map(len, left))
            for stage, tasks in enumerate(left):
                while tasks:
                    phase, part, i = task = tasks[0]
                    other = part + (-1 if phase == "forward" else 1)
                    source = other % self.stages
                    arrived = 0.0
                    if 0 <= other < parts and source != stage:
                        if (phase, other, i) not in ends:
                            break
                        sends, receives = stream(source, f"{phase}-send"), stream(stage, f"{phase}-recv")
                        sent, ready = max(ends[phase, other, i], sends[-1]), receives[-1]
                        arrived = max(sent, ready) + self.transfer(step, replica, source, stage)
                        number = len(sends) - 1
                        self._add(step, replica, source, f"{phase}-send", sent, arrived, number)
                        self._add(step, replica, stage, f"{phase}-recv", ready, arrived, len(receives) - 1)
                        sends.append(arrived)
                        receives.append(arrived)
                    begin = max(now[stage], arrived) + (self.delay if phase == "forward" else 0.0)
                    now[stage] = ends[task] = begin + self.compute(step, replica, task)
                    self._add(step, replica, stage, f"{phase}-compute", begin, now[stage], 0, part, i)
                    tasks.pop(0)
            assert sum(map(len, left)) < before, "deadlock"
        return now
