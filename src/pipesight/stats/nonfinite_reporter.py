"""Report tensors that became NaN or Inf: one line for the first, then only counts.

    iteration   5   first bad tensor: ...; 203 more tensors have NaN or Inf in this iteration
    6, 7, ...       nothing, but for a count after 10, 100, 1000 ... such iterations
    the end         NaN or Inf in 95 of 100 iterations, ...

A tensor that becomes bad while others have long been, such as masks, is reported again.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight._plurals import count_of
from pipesight._torch.default_store import default_store
from pipesight.stats.nonfinite import Bad, NonfiniteError, Place

__all__ = ["FirstRank", "NonfiniteReporter"]


class NonfiniteReporter:
    """Reports bad tensors.

    ``warn`` takes what everybody should read, ``note`` what is for the log of this rank alone.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        note: Callable[[str], None],
        folder: Path,
        rank: int,
        *,
        first_rank: FirstRank,
    ) -> None:
        self._warn, self._note, self._folder, self._rank, self._first_rank = warn, note, folder, rank, first_rank
        self._lock = threading.Lock()
        self._dumped: tuple[Bad, str] | None = None
        self._raised: int | None = None  # the iteration that was reported in an error
        self._seen = 0  # iterations, of which some were bad
        self._bad = 0
        self._ends = (sys.maxsize, 0)  # the first of them, and the last
        self._previous = -1  # the last iteration of all
        self._names: set[tuple[str, str]] = set()
        self._last: set[tuple[str, str]] = set()
        self._before: set[tuple[str, str]] = set()  # the last one
        self._events = 0  # that were worth a line
        self._counted = 0  # bad iterations that a line has counted
        self._speaks = False  # this rank has reported something
        self._waiting: dict[int, str] = {}  # lines that another rank may have more reason to write

    def look(self, bad: Bad, first: Bad, actions: Collection[str], tensor: Tensor) -> None:
        """Dump a tensor if it is the first of its iteration so far, or raise `NonfiniteError`, as the actions say."""
        with self._lock:
            if "dump" in actions:
                known = self._dumped[0] if self._dumped is not None else None
                of_now = known is not None and known.place.iteration == bad.place.iteration
                if known is None or not of_now or (bad.name == first.name and bad.name != known.name):
                    self._dumped = bad, self._dump(tensor, bad.place)
            if "raise" not in actions:
                return
            report = f"first bad tensor: {first}"
            if self._raised != bad.place.iteration:
                self._raised, self._speaks = bad.place.iteration, True
                self._warn(report + self._where_it_is(first))
        if bad.name != first.name:
            report = f"{bad}; {report}"
        raise NonfiniteError(f"{report}; to continue instead, set on_nonfinite: warn")

    def end(self, iteration: int, found: Sequence[Bad]) -> None:
        """Take note of an iteration and its bad tensors, in the order of computation."""
        now = {bad.name for bad in found}
        new, settled = now - self._last, not self._last or self._last == self._before
        previous, self._previous = self._previous, iteration
        self._before, self._last = self._last, now
        self._seen += 1
        if not found:
            return
        self._names |= now
        self._bad += 1
        self._ends = min(self._ends[0], iteration), iteration
        if self._raised == iteration:
            self._counted = self._bad
        elif new and settled:
            self._events += 1
            if _is_power(self._events, 2):
                self._announce(next(bad for bad in found if bad.name in new), len(now), previous)
        elif _is_power(self._bad, 10) and self._speaks:
            self._count(" so far")

    def speak(self) -> None:
        """Report what had to wait for other ranks."""
        for iteration, line in list(self._waiting.items()):
            del self._waiting[iteration]
            ranks = self._first_rank.settle(iteration)
            if ranks:
                self._speaks = True
                self._warn(f"{line}; on rank {self._rank}" + (f" first, of {ranks} ranks" if ranks > 1 else ""))
            else:
                self._note(f"{line}; another rank was first")

    def part_with_ranks(self) -> None:
        """Report what is left while the other ranks are there."""
        self._first_rank.close()
        self.speak()

    def close(self) -> None:
        """Report what is left, and how much there was."""
        self.part_with_ranks()
        if self._speaks and self._counted < self._bad:
            self._count()

    def _announce(self, first: Bad, tensors: int, previous: int) -> None:
        more = tensors - 1
        line = f"first bad tensor: {first}{self._where_it_is(first)}"
        if more:
            line += f"; {more} more tensor{'s have' if more > 1 else ' has'} NaN or Inf in this iteration"
        iteration = first.place.iteration
        self._counted = self._bad
        if not self._speaks and self._first_rank.were_made(previous):  # this is what came of it
            self._note(f"{line}; another rank was first")
        elif self._first_rank.make(iteration, first.of_ranks):
            self._waiting[iteration] = line
        else:
            self._speaks = True
            self._warn(line)

    def _count(self, so_far: str = "") -> None:
        self._counted = self._bad
        first, last = self._ends
        self._warn(
            f"NaN or Inf in {self._bad} of {self._seen} logged iterations{so_far}, first in {first} and last in "
            f"{last}, in {count_of(len(self._names), 'tensor')}"
        )

    def _where_it_is(self, bad: Bad) -> str:
        """Name the file that a tensor of the iteration was saved to."""
        if self._dumped is None or self._dumped[0].place.iteration != bad.place.iteration:
            return ""
        dumped, path = self._dumped
        which = "it" if dumped.name == bad.name else f"{dumped.place.tensor!r} of layer {dumped.place.layer!r}"
        return f"; {which} {path}"

    def _dump(self, tensor: Tensor, place: Place) -> str:
        layer = re.sub(r"[^\w.-]", "_", place.layer)[:100]
        name = re.sub(r"[^\w.-]", "_", place.tensor)[:100]
        path = self._folder / f"iteration-{place.iteration:06d}-rank-{self._rank:05d}-{layer}-{name}.pt"
        entry = {field: getattr(place, field) for field in Place.__slots__}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save({**entry, "rank": self._rank, "values": tensor.detach().cpu().clone()}, path)
        except OSError as error:
            return f"could not be saved to {path} ({error})"
        return f"is in {path}, for torch.load"


def _is_power(number: int, base: int) -> bool:
    while number % base == 0:
        number //= base
    return number == 1


_sessions = itertools.count()  # ranks open sessions in the same order


class FirstRank:
    """Decides which of several ranks reports the first bad tensor: the one that the data came to first.

    Ranks leave what they found in the store of ``torch.distributed``, and report a step later, when all had time to::

        rank 0    step 7: finds a bad gradient     step 8: rank 1 was first, says nothing
        rank 1    step 7: finds a bad activation   step 8: reports it, "on rank 1 first, of 2 ranks"

    ``patience`` is how many seconds to wait for the other ranks at the end.
    """

    def __init__(self, *, patience: float = 2.0) -> None:
        self._key = f"pipesight/nonfinite/{next(_sessions)}"
        self._patience = patience
        self._made: dict[int, str] = {}
        self._closed = False

    def make(self, iteration: int, key: tuple[int, ...]) -> bool:
        """Leave what this rank found; tell whether there is anybody to compare it with."""
        store = _store()
        if store is None:
            return False
        mine = json.dumps([*key, dist.get_rank()])
        name = f"{self._key}/{iteration}"
        try:
            store.add(f"{name}/ranks", 1)
            held = store.compare_set(name, "", mine).decode()
            while json.loads(mine) < json.loads(held):
                held = store.compare_set(name, held, mine).decode()
        except (RuntimeError, ValueError, NotImplementedError):  # the rank that kept the store is gone
            return False
        self._made[iteration] = mine
        return True

    def were_made(self, iteration: int) -> bool:
        """Whether any rank has found something in an iteration."""
        store = _store()
        try:
            return store is not None and bool(store.check([f"{self._key}/{iteration}"]))
        except RuntimeError:
            return False

    def settle(self, iteration: int) -> int:
        """Return on how many ranks there was something, if this one was first; 0 if another was."""
        mine = self._made.pop(iteration)
        store = _store()
        try:
            if store is None:
                return 1
            name = f"{self._key}/{iteration}"
            return int(store.add(f"{name}/ranks", 0)) if store.get(name).decode() == mine else 0
        except RuntimeError:
            return 1

    def close(self) -> None:
        """Say that this rank has found everything; wait for those who have not, if it matters."""
        store = _store()
        if store is None or self._closed:
            return
        self._closed = True
        try:
            came = int(store.add(f"{self._key}/closed", 1))
            late = time.monotonic() + self._patience
            while self._made and came < dist.get_world_size() and time.monotonic() < late:
                time.sleep(0.02)
                came = int(store.add(f"{self._key}/closed", 0))
        except RuntimeError:
            return


def _store() -> Any:
    """The store that all ranks share, if there are several."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return default_store()
