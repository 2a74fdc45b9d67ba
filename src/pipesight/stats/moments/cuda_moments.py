"""Moments of CUDA tensors: measured where they are, read back once a step, and never waited for in between."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import attrgetter, or_

import torch
from torch import Tensor

from pipesight._torch.tensors import current_gpu, is_transformed, raw_stream, without_function_overrides
from pipesight.context import Where
from pipesight.stats.moments._flat_pieces import ORDINARY, flat_pieces, plain
from pipesight.stats.moments.cpu_moments import measure_on_device
from pipesight.stats.moments.cuda_lanes import ROWS, Lane, Waiting
from pipesight.stats.moments.cuda_launch import QUICK, TOGETHER, Kernels
from pipesight.stats.moments.cuda_readback import Batch, DeviceRow, Readback, RowOwner, SentRows
from pipesight.stats.moments.moments import FIELDS, Moments

__all__ = ["DeviceRows", "is_capturing", "is_quick"]

MEMORY_SHIFT = 7  # a 128th of the device's memory, at most, waits to be measured
SLOW = frozenset({torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
_version, _how = attrgetter("_version"), attrgetter("powers", "one_by_one")


def is_capturing() -> bool:
    """Whether what is launched now is not run, but becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
        self._lanes: dict[int, Lane] = {}  # by the address of the stream

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
            with torch.cuda.stream(lane.stream):
                self._flush_lane(lane)

    def flush_here(self) -> None:
        """Measure the tensors that wait on the current stream."""
        lane = self._lanes.get(raw_stream(self._index))
        if lane is not None:
            self._flush_lane(lane)

    def _flush_lane(self, lane: Lane) -> None:
        for queue in list(lane.queues.values()):
            while queue.waiting:
                with self._lock:
                    waiting = queue.take()
                if waiting:
                    self._measure_waiting(lane, waiting)

    def _measure_waiting(self, lane: Lane, waiting: list[Waiting]) -> None:
        """Measure tensors of one dtype on the lane's stream, which is the current one."""
        if current_gpu() != self._index:
            with torch.cuda.device(self.device):
                self._measure_waiting(lane, waiting)
            return
        with without_function_overrides():  # a Pipeline's mode would take tensors of other micro-batches for kept ones
            if not self._measure_alike(lane, waiting):
                self._measure_each(lane, waiting)

    def _measure_each(self, lane: Lane, waiting: list[Waiting]) -> None:
        """Measure tensors of one dtype, those together that one kernel takes."""
        alike: dict[bool, list[Waiting]] = {}
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

    def _measure_alike(self, lane: Lane, waiting: list[Waiting]) -> bool:
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
            readback = Readback(host, tables)
        batches: list[Batch] = []
        for (_, _, given, of_lane, _), start in zip(lanes, starts, strict=True):
            for row in given:
                row.sent(readback, start)
            batches += [Batch(batch.start + start, *batch[1:]) for batch in of_lane]
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

    def _add_lane(self, stream: int) -> Lane:
        return self._lanes.setdefault(stream, Lane(self.device, self._kernels.scratch_rows, self._most_bytes))

    def _reserve(self, count: int) -> tuple[Lane, int, list[DeviceRow]]:
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
    x = plain(tensor)
    if x.layout is torch.strided and not (x.is_nested or x.is_quantized or 0 in x.stride()):
        x = x.permute(sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)).resolve_neg().contiguous()
    pieces = list(flat_pieces(x))
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
