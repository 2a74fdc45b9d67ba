"""Run directories made up for tests: every time in them is known."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipesight.schedule.simulation import simulate
from pipesight.schedule.task_orders import Schedule

START = 1_700_000_000_000_000  # microseconds
NAMES = {"forward": "forward", "recompute": "forward.recompute", "backward": "backward", "weight": "backward.weight"}


class Made:
    """A run directory in the making: tasks, spans and lines are added, `write` puts them on disk.

    Times are microseconds after `START`. ::

        made = Made(tmp_path / "run", balance=[2, 2], chunks=4)
        made.task(0, partition=0, microbatch=0, phase="forward", begin=0, dur=100, layers={"a": 60, "b": 40})
        made.span("dataloader", "fetch", begin=900, dur=50)
        run = made.write()
    """

    def __init__(self, folder: Path, *, balance: Sequence[int] = (1, 1), chunks: int = 2, **description: Any) -> None:
        self.folder = folder
        self.balance, self.chunks = list(balance), chunks
        self.samples: int | None = 8 * chunks  # of the mini-batches that are added; `None` leaves them out
        self.description = description
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.stats: dict[int, list[dict[str, Any]]] = {}
        self.logs: dict[int, list[str]] = {}
        self.pipeline: dict[str, Any] = {}  # what run.json says of the pipeline, beside or instead of the usual
        self.ranks: dict[int, dict[str, Any]] = {}  # what other ranks say of themselves

    def event(
        self, cat: str, name: str, *, begin: int, dur: int, rank: int = 0, tid: int | None = None, **args: Any
    ) -> None:
        """Add a span."""
        pid = 4000 + rank
        events = self.events.setdefault(rank, [])
        known = {"hhash": "0f", "p_idx": 6, **args, "level": 2}
        events.append(
            {
                "id": len(events) + 10,
                "name": name,
                "cat": cat,
                "pid": pid,
                "tid": pid if tid is None else tid,
                "ts": START + begin,
                "dur": dur,
                "ph": "X",
                "args": known,
            }
        )

    def span(self, cat: str, name: str, *, begin: int, dur: int, rank: int = 0, **args: Any) -> None:
        """Add a span of the main thread."""
        self.event(cat, name, begin=begin, dur=dur, rank=rank, **args)

    def task(
        self,
        step: int,
        *,
        partition: int,
        microbatch: int,
        phase: str,
        begin: int,
        dur: int,
        minibatch: int | None = None,
        rank: int = 0,
        device: str | None = None,
        layers: Mapping[str, int] | None = None,
    ) -> None:
        """Add a task, on the CPU or, if ``device`` is given, on a GPU's track, and its layers, one after the other."""
        where: dict[str, Any] = {
            "step": step,
            "minibatch": step + 1 if minibatch is None else minibatch,
            "partition": partition,
            "microbatch": microbatch,
        }
        tid = 4100 + partition
        if device is not None:
            where["device"] = device
            tid = 10_000_000 + int(device.partition(":")[2])
        at = begin
        for layer, time in (layers or {}).items():
            name = f"{NAMES[phase]}.layer"
            self.event("compute", name, begin=at, dur=time, rank=rank, tid=tid, **where, layer=layer)
            at += time
        samples = self.pipeline.get("batch_size", self.samples)
        if partition == 0 and phase == "forward" and device is None and samples is not None:
            where["samples"] = samples
        self.event("compute", NAMES[phase], begin=begin, dur=dur, rank=rank, tid=tid, **where)

    def transfer(
        self, step: int, *, partition: int, microbatch: int, begin: int, dur: int, size: int = 1024, rank: int = 0
    ) -> None:
        """Add a transfer to a partition."""
        where = {"step": step, "minibatch": step + 1, "partition": partition, "microbatch": microbatch}
        self.event(
            "device",
            "transfer",
            begin=begin,
            dur=dur,
            rank=rank,
            tid=4100 + partition,
            **where,
            **{"from": f"cuda:{partition - 1}", "to": f"cuda:{partition}", "size": size},
        )

    def gpipe(
        self,
        step: int,
        time: Callable[[str, int, int], int],
        *,
        at: int = 0,
        checkpointed: int = 0,
        rank: int = 0,
        layers: Callable[[int], Iterable[str]] | None = None,
    ) -> int:
        """Add the tasks of one mini-batch by GPipe's schedule, without any gap; return when it ends.

        ``time(phase, i, j)`` is how long a task takes; micro-batches below ``checkpointed`` are recomputed. With
        ``layers``, the names of those of a partition, a task's time is shared out evenly among them.
        """
        n, m = len(self.balance), self.chunks

        def add(phase: str, i: int, j: int, begin: int) -> int:
            dur = time(phase, i, j)
            names = list(layers(j)) if layers is not None else []
            shares = {name: dur // len(names) for name in names}
            self.task(step, partition=j, microbatch=i, phase=phase, begin=begin, dur=dur, rank=rank, layers=shares)
            return begin + dur

        free = [at] * n
        forward: dict[tuple[int, int], int] = {}
        for i in range(m):
            for j in range(n):
                forward[i, j] = free[j] = add("forward", i, j, max(free[j], forward.get((i, j - 1), at)))
        backward: dict[tuple[int, int], int] = {}
        for i in reversed(range(m)):
            for j in reversed(range(n)):
                if i < checkpointed:
                    free[j] = add("recompute", i, j, free[j])
                backward[i, j] = free[j] = add("backward", i, j, max(free[j], backward.get((i, j + 1), at)))
        return max(free)

    def scheduled(
        self, step: int, schedule: Schedule, times: Mapping[str, int], *, at: int = 0, first_rank: int = 0
    ) -> int:
        """Add the tasks of one mini-batch by any schedule, a rank for each of its devices; return when it ends."""
        durations = np.array([times.get(phase, 0) for phase in NAMES], float)[:, None, None]
        found = simulate(schedule, durations)
        for p, phase in enumerate(NAMES):
            for j, i in np.argwhere(~np.isnan(found.begin[p])).tolist():
                begin, rank = at + int(found.begin[p, j, i]), first_rank + schedule.device_of_stage[j]
                self.task(step, partition=j, microbatch=i, phase=phase, begin=begin, dur=times[phase], rank=rank)
        return at + int(found.makespan)

    def stat(self, layer: str, tensor: str, statistic: str, iteration: int, value: Any, *, rank: int = 0) -> None:
        """Add a line of statistics."""
        line = {"iteration": iteration, "layer": layer, "tensor": tensor, "statistic": statistic, "value": value}
        self.stats.setdefault(rank, []).append(line)

    def log(self, line: str, *, rank: int = 0) -> None:
        """Add a log line."""
        self.logs.setdefault(rank, []).append(line)

    def write(self, *, end: bool = True) -> Path:
        """Write it all; without ``end``, as if the process had been killed."""
        (self.folder / "trace").mkdir(parents=True, exist_ok=True)
        for rank, events in self.events.items():
            lines = ["[", *(json.dumps(event, separators=(",", ":")) for event in events), *(["]"] if end else [])]
            with gzip.open(self.folder / f"trace/rank-{rank:05}.pfw.gz", "wt") as file:
                file.write("\n".join(lines) + "\n")
        for name, suffix, ranks in (("stats", "jsonl", self.stats), ("logs", "log", self.logs)):
            for rank, entries in ranks.items():
                (self.folder / name).mkdir(exist_ok=True)
                text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries)
                (self.folder / f"{name}/rank-{rank:05}.{suffix}").write_text(text)
        for rank, facts in self.ranks.items():
            (self.folder / "ranks").mkdir(exist_ok=True)
            (self.folder / f"ranks/rank-{rank:05}.json").write_text(json.dumps(facts))
        (self.folder / "run.json").write_text(json.dumps(self._run()))
        return self.folder

    def _run(self) -> dict[str, Any]:
        n = len(self.balance)
        pipeline = {
            "schedule": "gpipe",
            "partitions": n,
            "chunks": self.chunks,
            "balance": self.balance,
            "devices": ["cpu"] * n,
            "checkpoint": "never",
            "batch_size": 8 * self.chunks,
            "layers": [
                {"name": f"l{k}", "class": "Linear", "partition": j, "parameter_bytes": 1000, "output_bytes": 100}
                for k, j in enumerate(j for j, layers in enumerate(self.balance) for _ in range(layers))
            ],
            **self.pipeline,
        }
        return {
            "format": "pipesight-run",
            "format_version": 1,
            "pipesight": "0.1.0",
            "command": ["train.py"],
            "host": "here",
            "rank": 0,
            "world_size": max(len(self.events), 1),
            "started": "2023-11-14T22:13:20+00:00",
            "ended": "2023-11-14T22:14:20+00:00",
            "outcome": "ok",
            "pipelines": [pipeline],
            "observed": {"trace": True, "steps": None, "every": 1, "stats": None, "logs": "info", "max_bytes": None},
            "left_out": {"steps": 0, "events": 0, "log_lines": 0},
            **self.description,
        }
