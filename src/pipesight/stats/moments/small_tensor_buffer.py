"""Small tensors are put aside, to be measured when the step ends.

Measuring a small tensor costs calls, not arithmetic. In the threads of a pipeline each call may have to wait for the
interpreter, which another thread has; at the end of a step nobody else wants it. So a small tensor is copied into a
buffer, one call, and what lies there is measured when its values are wanted or the buffer is full::

    buffer   | fc1 0 | fc2 0 0 | fc1 0 | ...      zeros fill up rows
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesight.stats.moments._exact import exact
from pipesight.stats.moments._rows import FLOAT32
from pipesight.stats.moments._segments import ROW, in_segments
from pipesight.stats.moments.cpu_moments import is_ordinary
from pipesight.stats.moments.moments import LaterMoments

__all__ = ["SmallRow", "SmallRows"]

MOST = 1 << 15  # elements of a tensor
ROOM = 1 << 20  # elements of the buffer: 4 MiB


class SmallRow(LaterMoments):
    """The moments of one small tensor, which may not be known yet."""

    __slots__ = ("_found", "_rows")

    def __init__(self, rows: SmallRows) -> None:
        self._rows = rows
        self._found: list[float] | None = None

    @property
    def ready(self) -> bool:
        """They can be had at once."""
        return True

    @property
    def is_bad(self) -> bool:
        """Whether the tensor has NaN or Inf."""
        row = self.row()
        return bool(row[1] or row[2])

    def found(self, row: list[float]) -> None:
        """They are known now."""
        self._found = row

    def row(self) -> list[float]:
        """Return the row, and measure all that are waiting if need be."""
        if self._found is None:
            self._rows.measure_all()
            assert self._found is not None
        return self._found


class SmallRows:
    """A buffer of small tensors that wait to be measured. Threads may add to it at once.

    Example::

        row = rows.add(activation, powers=False, smallest=False)  # None: it is not small
        row.moments()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer: Tensor | None = None
        self._array: NDArray[np.float32]  # the same memory
        self._memory: memoryview
        self._used = 0
        self._waiting: list[tuple[SmallRow, int, bool, bool, bool]] = []

    def add(self, tensor: Tensor, *, powers: bool, smallest: bool, magnitudes: bool = True) -> SmallRow | None:
        """Copy a tensor that is small; return its moments to be.

        Most operations of torch give the interpreter away, and get it back when another thread is through with it. So
        none of them is called for a tensor of an ordinary kind: neither ``detach``, ``view`` nor ``is_neg``.
        """
        size = tensor.numel()
        if not 0 < size <= MOST or tensor.dtype not in FLOAT32 or not is_ordinary(tensor):
            return None
        array: NDArray[np.float32] | None = None
        if tensor.dtype is torch.float32:
            try:
                array = tensor.data.numpy()
            except RuntimeError:  # a negated view
                return None
        elif tensor.is_neg():
            return None  # torch may copy it to another dtype as it is not negated
        row = SmallRow(self)
        with self._lock:
            if self._buffer is None:
                with torch.inference_mode(False):
                    self._buffer = torch.empty(ROOM, dtype=torch.float32, device="cpu")
                    self._array = self._buffer.numpy()
                    self._memory = self._array.data
            full = -(-size // ROW) * ROW
            if self._used + full > ROOM:
                self._measure_all()
            start, end = self._used, self._used + size
            if full > size:
                self._array[end : start + full] = 0
            if array is None:
                self._buffer[start:end].view(tensor.shape).copy_(tensor.detach())
            elif array.flags.c_contiguous:
                self._memory[start:end] = array.reshape(-1).data
            else:
                np.copyto(self._array[start:end].reshape(array.shape), array)
            self._used = start + full
            self._waiting.append((row, size, powers, smallest, magnitudes))
        return row

    def measure_all(self) -> None:
        """Measure all that are waiting."""
        with self._lock:
            self._measure_all()

    def _measure_all(self) -> None:
        if not self._waiting or self._buffer is None:
            return
        waiting, self._waiting, self._used = self._waiting, [], 0
        found: list[list[float] | None] = [None] * len(waiting)
        _, sizes, powers_of, smallest_of, magnitudes_of = zip(*waiting, strict=True)
        if not any(powers_of) and not any(smallest_of):
            found = in_segments(self._array, sizes, magnitudes=any(magnitudes_of))
        start = 0
        for (later, size, powers, smallest, magnitudes), row in zip(waiting, found, strict=True):
            if row is None:
                numbers = self._buffer[start : start + size]
                row = exact(numbers, powers=powers, smallest=smallest, magnitudes=magnitudes).row()
            later.found(row)
            start += -(-size // ROW) * ROW
