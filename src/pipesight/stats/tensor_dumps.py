"""Copies of tensors on disk, in the files that Transformer Engine's ``DumpTensors`` would write.

{log_dir}/tensor_dumps/rank_0/iter_000100/decoder_fc1_activation.pt
                                          decoder_fc1_activation.1.pt    of another call in this step
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pipesight import context
from pipesight.stats.moments._flat_pieces import plain
from pipesight.stats.moments.shards import local_part

__all__ = ["TensorDumps"]

HEADER = 4096  # bytes of a file beside the numbers, or a few more
LONGEST = 200  # characters of a name, so that file systems take it


class TensorDumps:
    """Writes the tensors of one rank, as many as a disk quota has room for. Threads may share it.

    ``warn`` is told, once each, that the quota is used up and that a file cannot be written.
    """

    def __init__(self, log_dir: str | os.PathLike[str], rank: int, warn: Callable[[str], None]) -> None:
        self._folder, self._rank, self._warn = Path(log_dir) / "tensor_dumps" / f"rank_{rank}", rank, warn
        self._used = sum(path.stat().st_size for path in self._folder.rglob("*.pt"))  # an earlier run may have left
        self._iteration: int | None = None
        self._names: dict[str, int] = {}  # how many files of this iteration begin with it
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def save(self, layer: str, name: str, iteration: int, tensor: Tensor, *, max_bytes: int) -> Path | None:
        """Write a tensor; return its file, or ``None`` if there is no room for it."""
        values = plain(local_part(tensor).tensor)
        path = self._take(layer, name, iteration, values, max_bytes)
        if path is None:
            return None
        where = context.current()
        place = (None, None, None) if where is None else (where.partition, where.microbatch, where.phase)
        entry: dict[str, object] = {"layer": layer, "tensor": name, "iteration": iteration, "rank": self._rank}
        entry.update(zip(("partition", "microbatch", "phase"), place, strict=True))
        copy = values.to("cpu", copy=True)  # of the elements alone, where they are part of something larger
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"high_precision": copy, **entry}, path)
        except (OSError, RuntimeError) as error:  # torch raises the latter where the disk is full
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn_once("file", f"tensors cannot be dumped to {self._folder} ({error}); training goes on")
            return None
        return path

    def _take(self, layer: str, name: str, iteration: int, values: Tensor, max_bytes: int) -> Path | None:
        """Take room for a tensor, and return its file."""
        stem = re.sub(r'[/\\:*?"<>| .\0]', "_", f"{layer}_{name}")[:LONGEST]
        size = values.numel() * values.element_size() + HEADER
        with self._lock:
            if iteration != self._iteration:
                self._iteration, self._names = iteration, {}
            number = self._names.get(stem, 0)
            path = self._folder / f"iter_{iteration:06d}" / (f"{stem}.{number}.pt" if number else f"{stem}.pt")
            there = path.stat().st_size if path.exists() else 0  # an earlier run's, which this one replaces
            if self._used - there + size <= max_bytes:
                self._names[stem] = number + 1
                self._used += size - there
                return path
        self._warn_once(
            "quota",
            f"from iteration {iteration} on, tensors are not dumped for lack of room: {name!r} of layer {layer!r} has "
            f"{size:,} bytes, {self._folder} has {self._used:,} (max_bytes: {max_bytes:,}); raise max_bytes of "
            "DumpTensors, or select fewer steps, layers or tensors",
        )
        return None

    def _warn_once(self, what: str, text: str) -> None:
        with self._lock:
            if what in self._warned:
                return
            self._warned.add(what)
        self._warn(text)
