"""Rows of numbers from all ranks of a group, in one packed exchange.

Each rank sends the rows it has under the names it has, and gets those of all. What names a rank has is sent once and
remembered, since they are the same step after step::

    header    what my names are (a hash), how long they are, how many numbers, which iteration      32 bytes a rank
    names     only if a hash is new to the group
    numbers   all rows, one after the other
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight._padded_gather import PaddedGather
from pipesight._plurals import plural
from pipesight._torch.default_store import default_store

__all__ = ["MissingRankError", "RankExchange"]

Rows = list[list[float]]
REMEMBERED = 256  # lists of names
GRACE = 5.0  # seconds in which those who are only late can be told from those who are gone


class MissingRankError(RuntimeError):
    """A rank did not call ``step()`` in time, so statistics could not be merged over ranks."""


class RankExchange:
    """Exchanges rows over one process group.

    Example::

        exchange = RankExchange(group, timeout=300)
        for names, rows in exchange.all(["fc1 activation"], [[1.0, 2.0]], iteration=0):
            ...  # one pair a rank, in order of rank
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self.group = group
        self._all_gather = PaddedGather(group)
        self.ranks = self._all_gather.ranks
        self._timeout = timeout
        self._known: dict[int, list[tuple[str, int]]] = {}  # names and lengths of rows, by hash
        self._count = 0
        self._key = "pipesight/stats/" + hashlib.sha256(str(self.ranks).encode()).hexdigest()
        self._device = torch.device("cpu")
        if "nccl" in str(dist.get_backend(group)):
            self._device = torch.device("cuda", torch.cuda.current_device())

    def all(
        self, names: Sequence[str], rows: Sequence[Sequence[float]], *, iteration: int
    ) -> list[tuple[tuple[str, ...], Rows]]:
        """Return the names and rows of every rank; all ranks of the group must call it.

        Raises:
            MissingRankError: Some did not, within the timeout, or came with another iteration.
        """
        self._announce()
        text = json.dumps([[name, len(row)] for name, row in zip(names, rows, strict=True)]).encode()
        mark = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)
        numbers = [number for row in rows for number in row]
        header = torch.tensor([mark, len(text), len(numbers), iteration if names else -1], device="cpu")
        headers = self._gather(header, 4).tolist()
        self._check(headers)
        if any(header[0] not in self._known for header in headers):
            longest = max(header[1] for header in headers)
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if len(self._known) > REMEMBERED:  # on all ranks at once: all have seen the same headers
                self._known.clear()
            for header, line in zip(headers, self._gather(sent, longest), strict=True):
                self._known[header[0]] = [tuple(entry) for entry in json.loads(bytes(line[: header[1]].tolist()))]
        most = max(header[2] for header in headers)
        if not most:
            return [((), []) for _ in headers]
        lines = self._gather(torch.tensor(numbers, dtype=torch.float64, device="cpu"), most).tolist()
        return [self._unpack(header[0], line) for header, line in zip(headers, lines, strict=True)]

    def _check(self, headers: list[list[int]]) -> None:
        """Raise if ranks bring values of different iterations; one with no values may be anywhere."""
        iterations = {rank: header[3] for rank, header in zip(self.ranks, headers, strict=True) if header[3] >= 0}
        if len(set(iterations.values())) > 1:
            who = ", ".join(f"rank {rank}: {iteration}" for rank, iteration in iterations.items())
            raise MissingRankError(
                f"ranks must merge statistics of the same iteration ({who}); call step() on every rank in each "
                "iteration, or pass skip_reduction=True"
            )

    def _unpack(self, mark: int, line: list[float]) -> tuple[tuple[str, ...], Rows]:
        entries = self._known[mark]
        rows, start = [], 0
        for _, size in entries:
            rows.append(line[start : start + size])
            start += size
        return tuple(name for name, _ in entries), rows

    def _gather(self, sent: Tensor, size: int) -> Tensor:
        """Gather as many numbers from each rank; shorter ones are filled up."""
        began = time.monotonic()
        try:
            if self._device.type == "cpu":
                return self._all_gather(sent, size, self._wait)
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                return self._all_gather(sent.to(self._device), size, self._wait).cpu()
        except (RuntimeError, TimeoutError, ValueError) as error:
            raise self._missing(time.monotonic() - began, error) from error

    def _wait(self, work: Any) -> None:
        until = time.monotonic() + self._timeout
        while self._device.type == "cuda" and not work.is_completed():
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(0.0002)
        work.wait(timedelta(seconds=self._timeout))

    def _announce(self) -> None:
        """Leave a note that this rank is here, for those who would miss it."""
        with contextlib.suppress(RuntimeError):
            self._count = self._came(dist.get_rank(), 1)

    def _came(self, rank: int, add: int = 0) -> int:
        """Return how often a rank has come to exchange over these ranks."""
        store: Any = default_store()
        return int(store.add(f"{self._key}/{rank}", add))

    def _missing(self, waited: float, error: Exception) -> MissingRankError:
        """Say who is not here; wait a little for those who are late, after a connection broke at once."""
        late = time.monotonic() + min(GRACE, max(0.0, self._timeout - waited))
        try:
            absent = [rank for rank in self.ranks if self._came(rank) < self._count]
            while absent and time.monotonic() < late:
                time.sleep(0.05)
                absent = [rank for rank in absent if self._came(rank) < self._count]
        except (RuntimeError, ValueError):  # the store is gone, with the rank that kept it
            return MissingRankError(
                f"ranks {self.ranks} did not all call step() to merge statistics ({error}); "
                "rank 0, which keeps the store, is gone"
            )
        if not absent:
            return MissingRankError(f"merging statistics over ranks {self.ranks} failed: {error}")
        who = f"{plural(len(absent), 'rank')} {', '.join(map(str, absent))}"
        return MissingRankError(
            f"{who} did not call step() to merge statistics over ranks {self.ranks} (waited {waited:.0f} s); "
            "every rank of the group must call step() in each iteration, or all must pass skip_reduction=True"
        )
