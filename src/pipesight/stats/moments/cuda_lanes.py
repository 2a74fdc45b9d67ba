"""What is kept for each stream of a GPU: tensors that wait to be measured, and rows that kernels write to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipesight.stats.moments.cuda_launch import TOGETHER, Table
from pipesight.stats.moments.cuda_readback import Batch, DeviceRow, RowOwner
from pipesight.stats.moments.moments import FIELDS

__all__ = ["ROWS", "ROW_BYTES", "Lane", "Queue", "Waiting"]

ROWS = 512  # a block
ROW_BYTES = len(FIELDS) * 8

Waiting: TypeAlias = tuple[Tensor, int, RowOwner, Any]  # with its version, its owner and spot


class Queue:
    """Tensors of one dtype that wait to be measured together; threads add to it without a lock.

    Attributes:
        bytes_left: How much more memory may wait.
    """

    __slots__ = ("_most_bytes", "bytes_left", "waiting")

    def __init__(self, most_bytes: int) -> None:
        self.waiting: deque[Waiting] = deque()
        self._most_bytes = self.bytes_left = most_bytes

    def take(self) -> list[Waiting]:
        """Return tensors, as many as a kernel takes; they wait no longer."""
        self.bytes_left = self._most_bytes
        return [self.waiting.popleft() for _ in range(min(TOGETHER, len(self.waiting)))]


class Lane:
    """What belongs to one stream, the current one: memory is that of the stream it was taken on.

    Attributes:
        used: How many rows of the blocks are taken, of those that were skipped at the end of a block too.
        queues: What waits to be measured, by dtype.
    """

    def __init__(self, device: torch.device, scratch_rows: int, most_bytes: int) -> None:
        self.stream = torch.cuda.current_stream()
        # Memory of the kernels, which follow each other: the programs' rows, and how many of them have ended.
        self._rows = torch.empty(scratch_rows, len(FIELDS), dtype=torch.float64, device=device)
        self._done = torch.zeros(TOGETHER, dtype=torch.int32, device=device)
        self.rows, self.done = self._rows.data_ptr(), self._done.data_ptr()
        self._device = device
        self.queues: dict[torch.dtype, Queue] = {}
        self._most_bytes = most_bytes
        self.free_tables: list[Table] = []
        self.begin()

    def add_queue(self, dtype: torch.dtype) -> Queue:
        """Return the queue of a dtype that may be new."""
        return self.queues.setdefault(dtype, Queue(self._most_bytes))

    def begin(self) -> None:
        """Begin a step."""
        self.blocks: list[Tensor] = []
        self.given: list[DeviceRow] = []
        self.batches: list[Batch] = []
        self.tables: list[Table] = []
        self.used = 0
        self._left = self._address = 0

    def take_table(self) -> Table:
        """Return a table that nobody uses, and nobody else will until the rows of this step have arrived."""
        self.tables.append(self.free_tables.pop() if self.free_tables else Table(self._device))
        return self.tables[-1]

    def reserve_one(self) -> tuple[int, DeviceRow]:
        """Return the address of a new row, and the row."""
        if not self._left:
            self._add_blocks(1)
        at = ROWS - self._left
        address = self._address + at * ROW_BYTES
        row = DeviceRow(self.blocks[-1], at, self.used)
        self.given.append(row)
        self.used += 1
        self._left -= 1
        return address, row

    def reserve(self, count: int) -> tuple[int, list[DeviceRow]]:
        """Return the address of new rows, one after the other in memory, and the rows."""
        block = self._add_blocks(-(-count // ROWS)) if count > self._left else self.blocks[-1]
        at = self.used % ROWS
        given = [DeviceRow(block, at + i, self.used + i) for i in range(count)]
        self.given += given
        self.used += count
        self._left = -self.used % ROWS
        return block.data_ptr() + at * ROW_BYTES, given

    def reserve_batch(
        self, count: int, rows: Sequence[int], owners: tuple[RowOwner, ...], spots: tuple[Any, ...]
    ) -> int:
        """Return the address of new rows, fewer than in a block, that belong to owners."""
        if count > self._left:
            self._add_blocks(1)
        address = self._address + (ROWS - self._left) * ROW_BYTES
        self.batches.append(Batch(self.used, rows, owners, spots))
        self.used += count
        self._left -= count
        return address

    def hand_out(self) -> None:
        """Give the owners of batches their rows, one by one."""
        for start, rows, owners, spots in self.batches:
            for i, owner, spot in zip(rows, owners, spots, strict=True):
                row = DeviceRow(self.blocks[(start + i) // ROWS], (start + i) % ROWS, start + i)
                self.given.append(row)
                owner.calls.append(((row,), spot))
        self.batches = []

    def _add_blocks(self, count: int) -> Tensor:
        # Zeros: rows that are skipped are read back too, and must not look as if they had NaN.
        block = torch.zeros(count * ROWS, len(FIELDS), dtype=torch.float64, device=self._device)
        self.used = len(self.blocks) * ROWS
        self.blocks += block.split(ROWS)
        self._left, self._address = ROWS, self.blocks[-1].data_ptr()
        return block
