"""Moments of CUDA tensors: measured where they are, read back once a step, and never waited for in between."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipesight._torch.tensors import is_transformed, raw_stream
from pipesight.stats.moments._tensor_kinds import ORDINARY, flat_pieces, plain
from pipesight.stats.moments.measuring import measure_on_device
from pipesight.stats.moments.moments import FIELDS, LaterMoments, Moments

__all__ = ["DeviceRow", "DeviceRows", "has_kernels", "is_capturing"]

BLOCK, DEPTH, WARPS = 1024, 16, 8
PROGRAMS = 2  # a multiprocessor: as many as it holds
REGISTERS = 128  # so that it holds two
ROWS = 256

QUICK = frozenset({torch.float32, torch.bfloat16, torch.float16})
SLOW = frozenset({torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether tensors on this device are measured by our kernels; else ordinary operations do it."""
    if device.type != "cuda":
        return False
    try:
        import triton  # type: ignore  # noqa: F401, PGH003 (which error it is depends on whether it is installed)
    except ImportError:
        return False
    return True


def is_capturing() -> bool:
    """Whether what is launched now is not run, but becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Readback:
    """Rows on their way from a device."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._event = torch.cuda.Event()
        self._event.record()
        self._read: list[list[float]] | None = None

    def ready(self) -> bool:
        return self._read is not None or bool(self._event.query())

    def row(self, index: int) -> list[float]:
        if self._read is None:
            self._event.synchronize()
            self._read = self._rows.tolist()
        return self._read[index]


class DeviceRow(LaterMoments):
    """The moments of one tensor, on a device or on their way from it."""

    __slots__ = ("_index", "_readback", "_rows")

    def __init__(self, rows: Tensor, index: int) -> None:
        self._rows: Tensor | None = rows
        self._index = index
        self._readback: _Readback | None = None

    @property
    def ready(self) -> bool:
        """Whether :meth:`moments` does not wait."""
        return self._readback is not None and self._readback.ready()

    def moments(self) -> Moments:
        """Return the moments; waits for them."""
        if self._readback is not None:
            return Moments.from_row(self._readback.row(self._index))
        assert self._rows is not None
        return Moments.from_row(self._rows.tolist())

    def sent(self, readback: _Readback, start: int) -> None:
        """The row is on its way, with others; those of its stream begin at ``start``."""
        self._index += start
        self._readback, self._rows = readback, None


class _Lane:
    """The rows that one stream, the current one, writes: memory belongs to the stream it was taken on."""

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()
        self.blocks: list[Tensor] = []
        self.used = 0
        self.given: list[DeviceRow] = []

    def reserve(self, count: int, device: torch.device) -> tuple[Tensor, list[DeviceRow]]:
        """Return ``count`` new rows, one after the other in memory."""
        at = self.used % ROWS
        if not at or at + count > ROWS:
            block = torch.empty(-(-count // ROWS) * ROWS, len(FIELDS), dtype=torch.float64, device=device)
            self.used = len(self.blocks) * ROWS
            self.blocks += block.split(ROWS)
            at = 0
        else:
            block = self.blocks[-1]
        rows = block[at : at + count]
        given = [DeviceRow(rows[i], self.used + i) for i in range(count)]
        self.given += given
        self.used += count
        return rows, given


class DeviceRows:
    """The rows of one step on one device.

    Example::

        rows = DeviceRows(torch.device("cuda", 0))
        row = rows.measure([activation])[0]
        rows.send()  # at the end of a step
        row.moments()

    Several threads, each with its stream, may measure at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        properties = torch.cuda.get_device_properties(device)
        self._multiprocessors = properties.multi_processor_count
        self._pairs = properties.major >= 9 and not torch.version.hip  # has instructions for two values of 16 bits
        self._lanes: dict[int, _Lane] = {}  # by the number of the stream

    def measure(self, tensors: Sequence[Tensor], *, powers: bool = False) -> list[DeviceRow]:
        """Measure tensors on the current stream: two kernels for one, and two for all those of one dtype."""
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.measure(tensors, powers=powers)
        with torch.no_grad():
            flat = [_flat(tensor) for tensor in tensors]
            found: dict[int, DeviceRow] = {}
            together: dict[torch.dtype, list[int]] = {}
            for i, x in enumerate(flat):
                if x is None:
                    found[i] = self._put(measure_on_device(tensors[i], powers=powers))  # this waits for the device
                elif len(flat) == 1 or x.data_ptr() % 16:
                    found[i] = self._measure_one(x, powers)
                else:
                    together.setdefault(x.dtype, []).append(i)
            for members in together.values():
                rows = self._measure_many([x for i in members if (x := flat[i]) is not None], powers)
                found.update(zip(members, rows, strict=True))
        return [found[i] for i in range(len(tensors))]

    def send(self) -> None:
        """Start to read the rows back, and begin anew."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        if not lanes:
            return
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            host = torch.empty(
                sum(lane.used for lane in lanes.values()), len(FIELDS), dtype=torch.float64, pin_memory=True
            )
            start = 0
            starts = []
            for lane in lanes.values():
                here.wait_stream(lane.stream)
                starts.append(start)
                for block in lane.blocks:
                    block.record_stream(here)
                    size = min(ROWS, lane.used + starts[-1] - start)
                    host[start : start + size].copy_(block[:size], non_blocking=True)
                    start += size
            readback = _Readback(host)
        for lane, start in zip(lanes.values(), starts, strict=True):
            for row in lane.given:
                row.sent(readback, start)

    def _reserve(self, count: int) -> tuple[Tensor, list[DeviceRow]]:
        stream = raw_stream(self.device.index)
        with self._lock:
            if stream not in self._lanes:
                self._lanes[stream] = _Lane()
            return self._lanes[stream].reserve(count, self.device)

    def _put(self, moments: Moments) -> DeviceRow:
        rows, given = self._reserve(1)
        rows.copy_(torch.tensor([moments.row()], dtype=torch.float64))
        return given[0]

    def _measure_one(self, x: Tensor, powers: bool) -> DeviceRow:
        from pipesight.stats.moments import _triton

        programs = self._programs(x.numel())
        rows = torch.empty(programs, len(FIELDS), dtype=torch.float64, device=self.device)
        out, given = self._reserve(1)
        quick = x.dtype in QUICK and not powers
        kernel: Any = _triton.measure_kernel[(programs,)]
        kernel(x, x.numel(), rows, BLOCK, DEPTH, powers, quick, self._pairs, num_warps=WARPS, **_limits())
        merge: Any = _triton.merge_kernel[(1,)]
        merge(rows, out, rows, programs, _power_of_2(programs), powers, False)
        return given[0]

    def _measure_many(self, tensors: list[Tensor], powers: bool) -> list[DeviceRow]:
        import triton.language as tl  # type: ignore  # noqa: PGH003

        from pipesight.stats.moments import _triton

        programs = [self._programs(x.numel()) for x in tensors]
        firsts = [0]
        for count in programs:
            firsts.append(firsts[-1] + count)
        lines = [
            [x.data_ptr(), x.numel(), first, count] for x, first, count in zip(tensors, firsts, programs, strict=False)
        ]
        owners = [i for i, count in enumerate(programs) for _ in range(count)]
        packed = torch.tensor([*(cell for line in lines for cell in line), *owners], dtype=torch.int64, pin_memory=True)
        packed = packed.to(self.device, non_blocking=True)
        table, owner = packed[: 4 * len(tensors)], packed[4 * len(tensors) :]
        rows = torch.empty(firsts[-1], len(FIELDS), dtype=torch.float64, device=self.device)
        out, given = self._reserve(len(tensors))
        dtype = getattr(tl, str(tensors[0].dtype).removeprefix("torch."))
        quick = tensors[0].dtype in QUICK and not powers
        kernel: Any = _triton.measure_many_kernel[(firsts[-1],)]
        kernel(table, owner, rows, dtype, BLOCK, DEPTH, powers, quick, self._pairs, num_warps=WARPS, **_limits())
        merge: Any = _triton.merge_kernel[(len(tensors),)]
        merge(rows, out, table, 0, _power_of_2(max(programs)), powers, True)
        return given

    def _programs(self, numel: int) -> int:
        return min(PROGRAMS * self._multiprocessors, -(-numel // (BLOCK * DEPTH)))


def _flat(tensor: Tensor) -> Tensor | None:
    """Return the elements in any order as one dense tensor of a dtype the kernels take, or None for odd kinds."""
    ordinary = (
        type(tensor) in ORDINARY and tensor.dtype in QUICK and tensor.is_contiguous() and not is_transformed(tensor)
    )
    if ordinary and (address := tensor.data_ptr()):  # nothing below would find anything to do
        x = tensor.detach().view(-1)
        return x.clone() if address % 4 else x
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


def _limits() -> dict[str, Any]:
    return {} if torch.version.hip else {"maxnreg": REGISTERS}


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
