"""Moments of CUDA tensors: measured where they are, read back once a step, and never waited for in between."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesight._torch.tensors import current_gpu, is_transformed, raw_stream
from pipesight.context import Where
from pipesight.stats.moments._flat_pieces import ORDINARY, flat_pieces, plain
from pipesight.stats.moments.cpu_moments import measure_on_device
from pipesight.stats.moments.cuda_launch import QUICK, TOGETHER, Kernels, Table
from pipesight.stats.moments.moments import FIELDS, LaterMoments, Moments, merge_rows

__all__ = ["Calls", "DeviceRow", "DeviceRows", "SentRows", "is_capturing", "is_quick"]

ROWS = 512  # a block
MEMORY_SHIFT = 7  # a 128th of the device's memory, at most, waits to be measured
ROW_BYTES = len(FIELDS) * 8
SLOW = frozenset({torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
_NANS, _INFS = FIELDS.index("nans"), FIELDS.index("infs")


def is_capturing() -> bool:
    """Whether what is launched now is not run, but becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Readback:
    """Rows on their way from a device.

    Args:
        rows: Memory of the host that they are copied to.
        tables: Those that nobody reads any more when they have arrived, each after the list of free ones it goes to.
    """

    def __init__(self, rows: Tensor, tables: list[tuple[list[Table], list[Table]]]) -> None:
        self._rows, self._tables = rows, tables
        self._event = torch.cuda.Event()
        self._event.record()
        self._read: NDArray[np.float64] | None = None
        self._bad: frozenset[int] = frozenset()
        self._arrived = False

    def ready(self) -> bool:
        if not self._arrived and self._event.query():
            self._arrive()
        return self._arrived

    def _arrive(self) -> None:
        self._arrived = True
        with contextlib.suppress(IndexError):  # another thread may have found it, too
            while True:
                free, used = self._tables.pop()
                free += used

    @property
    def rows(self) -> NDArray[np.float64]:
        """All rows; waits for them."""
        if self._read is None:
            self._event.synchronize()
            self._arrive()
            rows: NDArray[np.float64] = self._rows.numpy()
            self._bad = frozenset(np.flatnonzero((rows[:, _NANS] != 0) | (rows[:, _INFS] != 0)).tolist())
            self._read = rows
        return self._read

    def is_bad(self, index: int) -> bool:
        """Whether a tensor has NaN or Inf."""
        return bool(len(self.rows)) and index in self._bad

    def has_bad(self) -> bool:
        """Whether any tensor has NaN or Inf."""
        return bool(len(self.rows)) and bool(self._bad)


class DeviceRow(LaterMoments):
    """The moments of one tensor, on a device or on their way from it."""

    __slots__ = ("_at", "_block", "index", "readback")

    def __init__(self, block: Tensor | None, at: int, index: int) -> None:
        self._block = block
        self._at = at
        self.index = index
        self.readback: _Readback | None = None

    @classmethod
    def of(cls, readback: _Readback, index: int) -> DeviceRow:
        """Return a row on its way."""
        row = cls(None, 0, index)
        row.readback = readback
        return row

    @property
    def ready(self) -> bool:
        """Whether :meth:`moments` does not wait."""
        return self.readback is not None and self.readback.ready()

    @property
    def is_bad(self) -> bool:
        """Whether the tensor has NaN or Inf; waits for the device."""
        if self.readback is not None:
            return self.readback.is_bad(self.index)
        return self.moments().is_bad

    def row(self) -> list[float]:
        """Return the row; waits for it."""
        row: list[float]
        if self.readback is not None:
            row = self.readback.rows[self.index].tolist()
        else:
            assert self._block is not None
            row = self._block[self._at].tolist()
        return row

    def put(self, moments: Moments) -> None:
        """Write moments that were measured otherwise."""
        assert self._block is not None
        self._block[self._at].copy_(torch.tensor(moments.row(), dtype=torch.float64))

    def sent(self, readback: _Readback, start: int) -> None:
        """The row is on its way, with others; those of its stream begin at ``start``."""
        self.index += start
        self.readback, self._block = readback, None


Calls: TypeAlias = list[tuple[Sequence[Any] | None, Any]]


class RowOwner(Protocol):
    """Gets the rows of one tensor.

    Attributes:
        calls: To it is added ``((row,), spot)``, or ``(None, spot)`` where the tensor changed before it was measured.
        code: A number that no other owner has whose tensors are measured on the device.
        powers: Whether the third and fourth moments are wanted.
        one_by_one: Whether it wants each row, not only what they merge to.
    """

    calls: Calls
    code: int
    powers: bool
    one_by_one: ClassVar[bool]


_version, _code = map(attrgetter, ("_version", "code"))
_how = attrgetter("powers", "one_by_one")


_Waiting: TypeAlias = tuple[Tensor, int, RowOwner, Any]  # with its version, its owner and spot


class _Batch(NamedTuple):
    """Rows that one kernel wrote: the owners of each call, and their rows from the start on."""

    start: int
    rows: Sequence[int]
    owners: tuple[RowOwner, ...]
    spots: tuple[Any, ...]


class SentRows:
    """Rows of one step on their way from a device, and whose they are."""

    def __init__(self, readback: _Readback, batches: list[_Batch]) -> None:
        self._readback, self._batches = readback, batches

    def ready(self) -> bool:
        """Whether they are here."""
        return self._readback.ready()

    def has_bad(self) -> bool:
        """Whether any tensor has NaN or Inf; waits for the device."""
        return self._readback.has_bad()

    def hand_out(self, calls_of: Callable[[Any], Calls]) -> None:
        """Add the rows of each owner to its calls, one by one."""
        for start, rows, owners, spots in self._batches:
            for row, owner, spot in zip(rows, owners, spots, strict=True):
                calls_of(owner).append(((DeviceRow.of(self._readback, start + row),), spot))
        self._batches = []

    def merged(self) -> tuple[list[Any], NDArray[np.float64]]:
        """Return the owners whose rows were not handed out, by their codes, and for each the row of all its calls.

        Waits for the device.
        """
        each = [owner for batch in self._batches for owner in batch.owners]
        if not each:
            return [], np.empty((0, len(FIELDS)))
        codes = np.array(list(map(_code, each)))
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
        counts = np.diff(starts, append=len(codes))
        rows = self._readback.rows[np.concatenate([np.array(batch.rows) + batch.start for batch in self._batches])]
        rows = rows[order]
        merged = np.empty((len(starts), len(FIELDS)))
        for count in np.unique(counts):  # those with as many calls, at once
            alike = np.flatnonzero(counts == count)
            places = starts[alike][None, :] + np.arange(count)[:, None]
            merged[alike] = merge_rows(torch.from_numpy(rows[places])).numpy()
        return [each[place] for place in order[starts].tolist()], merged


class _Queue:
    """Tensors of one dtype that wait to be measured together; threads add to it without a lock.

    Attributes:
        bytes_left: How much more memory may wait.
    """

    __slots__ = ("_most_bytes", "bytes_left", "waiting")

    def __init__(self, most_bytes: int) -> None:
        self.waiting: deque[_Waiting] = deque()
        self._most_bytes = self.bytes_left = most_bytes

    def take(self) -> list[_Waiting]:
        """Return tensors, as many as a kernel takes; they wait no longer."""
        self.bytes_left = self._most_bytes
        return [self.waiting.popleft() for _ in range(min(TOGETHER, len(self.waiting)))]


class _Lane:
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
        self.queues: dict[torch.dtype, _Queue] = {}
        self._most_bytes = most_bytes
        self.free_tables: list[Table] = []
        self.begin()

    def add_queue(self, dtype: torch.dtype) -> _Queue:
        """Return the queue of a dtype that may be new."""
        return self.queues.setdefault(dtype, _Queue(self._most_bytes))

    def begin(self) -> None:
        """Begin a step."""
        self.blocks: list[Tensor] = []
        self.given: list[DeviceRow] = []
        self.batches: list[_Batch] = []
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
        self.batches.append(_Batch(self.used, rows, owners, spots))
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


class DeviceRows:
    """The rows of one step on one device.

    Example::

        rows = DeviceRows(torch.device("cuda", 0))
        row = rows.measure([activation])[0]
        rows.send()  # at the end of a step
        row.moments()

    Several threads, each with its stream, may measure at once.

    Args:
        device: A GPU.
        numbers: Count the tensors, also those of other devices.
    """

    def __init__(self, device: torch.device, numbers: Iterator[int] | None = None) -> None:
        self.device = device
        self._index = device.index
        self._numbers = itertools.count() if numbers is None else numbers
        self._lock = threading.Lock()
        self._kernels = Kernels(device)
        self._most_bytes = torch.cuda.get_device_properties(device).total_memory >> MEMORY_SHIFT
        self._lanes: dict[int, _Lane] = {}  # by the address of the stream

    def measure_one(self, tensor: Tensor, *, powers: bool = False) -> DeviceRow:
        """Measure a tensor on the current stream, by one kernel."""
        if current_gpu() != self._index:
            with torch.cuda.device(self.device):
                return self.measure_one(tensor, powers=powers)
        x = _flat(tensor)
        if x is None:
            return self._put(measure_on_device(tensor, powers=powers))  # this waits for the device
        return self.measure_quickly(x, powers)

    def measure_quickly(self, x: Tensor, powers: bool) -> DeviceRow:
        """Measure a dense tensor of a dtype that the kernels take, such as one that `is_quick`."""
        if current_gpu() != self._index:
            with torch.cuda.device(self.device):
                return self.measure_quickly(x, powers)
        stream = raw_stream(self._index)
        with self._lock:
            lane = self._lanes.get(stream) or self._add_lane(stream)
            address, row = lane.reserve_one()
        self._kernels.measure(x, powers, stream, lane.rows, lane.done, address)
        return row

    def measure_later(self, x: Tensor, owner: RowOwner, where: Where | None) -> bool:
        """Measure a tensor together with others, until `flush` at the latest; return False if it is elsewhere.

        Called for each tensor of each layer: what can be checked for many at once is not checked here.

        Args:
            x: It must not change until then.
            owner: Gets the row, or None where torch knows that the tensor has changed.
            where: The place of the tensor in a pipeline.
        """
        if x.get_device() != self._index:
            return False
        stream = raw_stream(self._index)
        lane = self._lanes.get(stream) or self._add_lane(stream)
        number = next(self._numbers)
        spot = number if where is None else (number, where.partition, where.microbatch, where.phase)
        queue = lane.queues.get(x.dtype) or lane.add_queue(x.dtype)
        waiting = queue.waiting
        waiting.append((x, x._version, owner, spot))
        queue.bytes_left -= x.nbytes
        if queue.bytes_left <= 0 or len(waiting) >= TOGETHER:
            with self._lock:
                some = queue.take()
            if some:
                self._measure_waiting(lane, some)
        return True

    def flush(self) -> None:
        """Measure all tensors that wait."""
        for lane in list(self._lanes.values()):
            for queue in list(lane.queues.values()):
                while queue.waiting:
                    with self._lock:
                        waiting = queue.take()
                    if waiting:
                        with torch.cuda.stream(lane.stream):
                            self._measure_waiting(lane, waiting)

    def _measure_waiting(self, lane: _Lane, waiting: list[_Waiting]) -> None:
        """Measure tensors of one dtype on the lane's stream, which is the current one."""
        if current_gpu() != self._index:
            with torch.cuda.device(self.device):
                self._measure_waiting(lane, waiting)
            return
        if not self._measure_alike(lane, waiting):
            self._measure_each(lane, waiting)

    def _measure_each(self, lane: _Lane, waiting: list[_Waiting]) -> None:
        """Measure tensors of one dtype, those together that one kernel takes."""
        alike: dict[bool, list[_Waiting]] = {}
        for item in waiting:
            x, version, owner, spot = item
            if x._version != version or not (address := x.data_ptr()):
                owner.calls.append((None, spot))
            elif owner.one_by_one or x.dtype not in QUICK or address % 16 or not is_dense(x):
                owner.calls.append(((self.measure_one(x, powers=owner.powers),), spot))
            else:
                alike.setdefault(owner.powers, []).append(item)
        for items in alike.values():
            self._measure_alike(lane, items)

    def _measure_alike(self, lane: _Lane, waiting: list[_Waiting]) -> bool:
        """Measure tensors of one dtype by a kernel, if it takes them all; what several layers returned, once."""
        tensors, versions, owners, spots = zip(*waiting, strict=True)
        ids = list(map(id, tensors))
        known = dict(zip(ids, tensors, strict=True))
        distinct = tensors
        rows: Sequence[int] = range(len(tensors))
        if len(known) < len(tensors):
            places = dict(zip(known, rows, strict=False))
            distinct, rows = tuple(known.values()), [places[key] for key in ids]
        ways, dtype = {*map(_how, owners)}, tensors[0].dtype
        powers, one_by_one = next(iter(ways))
        if len(ways) > 1 or one_by_one or dtype not in QUICK:
            return False
        addresses = list(map(Tensor.data_ptr, distinct))
        if (
            tuple(map(_version, tensors)) != versions
            or not all(addresses)
            or reduce(or_, addresses) & 15
            or not all(map(Tensor.is_contiguous, distinct))
            or any(map(Tensor.is_neg, distinct))
        ):
            return False
        with self._lock:
            out, table = lane.reserve_batch(len(distinct), rows, owners, spots), lane.take_table()
        sizes = list(map(Tensor.numel, distinct))
        self._kernels.measure_many(dtype, addresses, sizes, powers, table, lane.rows, lane.done, out)
        return True

    def measure(self, tensors: Sequence[Tensor], *, powers: bool = False) -> list[DeviceRow]:
        """Measure tensors on the current stream, by one kernel for those of one dtype."""
        if current_gpu() != self._index:
            with torch.cuda.device(self.device):
                return self.measure(tensors, powers=powers)
        flat = [_flat(tensor) for tensor in tensors]
        found: dict[int, DeviceRow] = {}
        together: dict[torch.dtype, list[int]] = {}
        for i, x in enumerate(flat):
            if x is None or len(flat) == 1 or x.data_ptr() % 16:
                found[i] = self.measure_one(tensors[i], powers=powers)
            else:
                together.setdefault(x.dtype, []).append(i)
        for members in together.values():
            for start in range(0, len(members), TOGETHER):
                some = members[start : start + TOGETHER]
                rows = self._measure_many([x for i in some if (x := flat[i]) is not None], powers)
                found.update(zip(some, rows, strict=True))
        return [found[i] for i in range(len(tensors))]

    def send(self) -> SentRows | None:
        """Start to read the rows back, and begin anew; None if there is nothing to be read."""
        self.flush()
        with self._lock:
            lanes = [
                (lane, lane.blocks, lane.given, lane.batches, lane.used) for lane in self._lanes.values() if lane.used
            ]
            tables = [(lane.free_tables, lane.tables) for lane, *_ in lanes]
            for lane, *_ in lanes:
                lane.begin()
        if not lanes:
            return None
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            host = torch.empty(sum(used for *_, used in lanes), len(FIELDS), dtype=torch.float64, pin_memory=True)
            start = 0
            starts = []
            for lane, blocks, _, _, used in lanes:
                if lane.stream != here:
                    here.wait_stream(lane.stream)
                starts.append(start)
                for block in blocks:
                    block.record_stream(here)
                    size = min(ROWS, used + starts[-1] - start)
                    host[start : start + size].copy_(block[:size], non_blocking=True)
                    start += size
            readback = _Readback(host, tables)
        batches: list[_Batch] = []
        for (_, _, given, of_lane, _), start in zip(lanes, starts, strict=True):
            for row in given:
                row.sent(readback, start)
            batches += [_Batch(batch.start + start, *batch[1:]) for batch in of_lane]
        return SentRows(readback, batches)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be measured, or was measured and is not on its way yet."""
        lanes = list(self._lanes.values())
        return not any(lane.used or any(queue.waiting for queue in lane.queues.values()) for lane in lanes)

    def hand_out(self) -> None:
        """Give the owners what was measured so far, and is not on its way yet."""
        self.flush()
        with self._lock:
            for lane in self._lanes.values():
                lane.hand_out()

    def _add_lane(self, stream: int) -> _Lane:
        return self._lanes.setdefault(stream, _Lane(self.device, self._kernels.scratch_rows, self._most_bytes))

    def _reserve(self, count: int) -> tuple[_Lane, int, list[DeviceRow]]:
        stream = raw_stream(self._index)
        with self._lock:
            lane = self._lanes.get(stream) or self._add_lane(stream)
            return lane, *lane.reserve(count)

    def _put(self, moments: Moments) -> DeviceRow:
        _, _, (row,) = self._reserve(1)
        row.put(moments)
        return row

    def _measure_many(self, tensors: list[Tensor], powers: bool) -> list[DeviceRow]:
        lane, out, given = self._reserve(len(tensors))
        with self._lock:
            table = lane.take_table()
        addresses, sizes = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors))
        self._kernels.measure_many(tensors[0].dtype, addresses, sizes, powers, table, lane.rows, lane.done, out)
        return given


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of an ordinary tensor are its memory."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()


def is_quick(tensor: Tensor) -> bool:
    """Whether a kernel takes a tensor as it is."""
    return (
        type(tensor) in ORDINARY
        and tensor.dtype in QUICK
        and is_dense(tensor)
        and not is_transformed(tensor)
        and bool(address := tensor.data_ptr())
        and not address % 4
    )


def _flat(tensor: Tensor) -> Tensor | None:
    """Return the elements in any order as one dense tensor of a dtype the kernels take, or None for odd kinds."""
    if is_quick(tensor):
        return tensor.detach().view(-1)
    pieces = list(flat_pieces(plain(tensor)))
    if len(pieces) != 1 or pieces[0][1] != 1 or not pieces[0][0].is_cuda:
        return None
    x = pieces[0][0]
    if x.dtype is torch.bool:
        x = x.view(torch.uint8)
    elif x.dtype not in QUICK and x.dtype not in SLOW:
        x = x.to(torch.float64 if not x.dtype.is_floating_point else torch.float32)
    if x.element_size() == 2 and x.data_ptr() % 4:  # the kernel reads two at a time
        x = x.clone()
    return x
