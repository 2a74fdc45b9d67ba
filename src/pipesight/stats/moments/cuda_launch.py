"""Launch the kernels that measure CUDA tensors, at the cost of a launch.

``kernel[grid](...)`` of Triton looks at every argument to find the compiled kernel, which takes longer than most
tensors take to be measured. Here the compiled kernel is found by what it depends on, and is given addresses::

    (dtype, aligned, wide, powers)  -->  compiled kernel  -->  launched with (address, elements, rows, done, out)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesight._torch.tensors import raw_stream

__all__ = ["QUICK", "TOGETHER", "Kernels", "Table", "has_kernels"]

BLOCK, DEPTH, WARPS = 1024, 16, 8
PROGRAMS = 2  # a multiprocessor: as many as it holds
WAVES = 4  # of programs, where many tensors are measured together
TOGETHER = 128  # tensors, at most, that one kernel measures
REGISTERS = 128  # so that it holds two
TILE = BLOCK * DEPTH
MOST_PLANS = 1024
QUICK = frozenset({torch.float32, torch.bfloat16, torch.float16})


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


class Kernels:
    """The kernels of one device.

    Attributes:
        scratch_rows: How many rows the programs of a launch need to write to, at most.
    """

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._device = device
        self._walkers = PROGRAMS * properties.multi_processor_count
        self._most_programs = 1 << self._walkers.bit_length()  # of a tensor: one more than walkers, and a power of 2
        self.scratch_rows = WAVES * self._walkers + 2 * TOGETHER
        self._pairs = properties.major >= 9 and not torch.version.hip  # has instructions for two values of 16 bits
        self._of_one: dict[tuple[torch.dtype, bool, bool, bool], _Kernel] = {}
        self._of_many: dict[tuple[torch.dtype, bool], _Kernel] = {}
        self._plans: dict[tuple[Any, ...], tuple[int, NDArray[np.int64]]] = {}  # steps repeat themselves

    def measure(self, x: Tensor, powers: bool, stream: int, rows: int, done: int, out: int) -> None:
        """Measure a dense tensor of a dtype that the kernels take, on the stream, which is the current one.

        Args:
            x: At an address that is a multiple of 4.
            powers: Whether the third and fourth moments are wanted.
            stream: Its address.
            rows: The address of ``scratch_rows`` rows that this stream alone uses.
            done: The address of an int32 that is 0.
            out: The address of the row.
        """
        address, numel, dtype = x.data_ptr(), x.numel(), x.dtype
        key = (dtype, not address & 15, numel >= 1 << 31, powers)
        kernel = self._of_one.get(key)
        if kernel is None:
            from pipesight.stats.moments import _triton

            types = (dtype, None, torch.float64, torch.int32, torch.float64)
            kernel = self._of_one[key] = _Kernel(_triton.measure_kernel, types, self._constants(dtype, powers))
        programs = self._programs(dtype, powers, numel, self._walkers)
        kernel.launch((int(programs), 1, 1), stream, address, numel, rows, done, out)

    def measure_many(
        self,
        dtype: torch.dtype,
        addresses: Sequence[int],
        sizes: Sequence[int],
        powers: bool,
        table: Table,
        rows: int,
        done: int,
        out: int,
    ) -> None:
        """Measure dense tensors of one dtype on the current stream, `TOGETHER` at most.

        Args:
            dtype: Of the tensors.
            addresses: Where they are: multiples of 16.
            sizes: How many elements each has.
            powers: Whether the third and fourth moments are wanted.
            table: Nothing else may be written to it until the stream has come here.
            rows: The address of ``scratch_rows`` rows that this stream alone uses.
            done: The address of as many int32 that are 0.
            out: The address of as many rows.
        """
        kernel = self._of_many.get((dtype, powers))
        if kernel is None:
            import triton.language as tl  # type: ignore  # noqa: PGH003

            from pipesight.stats.moments import _triton

            types = (torch.int64, torch.float64, torch.int32, torch.float64)
            constants = (getattr(tl, str(dtype).removeprefix("torch.")), *self._constants(dtype, powers))
            kernel = self._of_many[dtype, powers] = _Kernel(_triton.measure_many_kernel, types, constants)
        plan = self._plans.get(key := (dtype, powers, *sizes))
        if plan is None:
            if len(self._plans) >= MOST_PLANS:  # sizes that are new in each step
                self._plans.clear()
            plan = self._plans[key] = self._plan(dtype, powers, np.array(sizes, dtype=np.int64))
        programs, columns = plan
        grid = (programs, len(sizes), 1)
        kernel.launch(grid, raw_stream(self._device.index), table.fill(addresses, columns), rows, done, out)

    def _plan(self, dtype: torch.dtype, powers: bool, sizes: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Return the most programs that one of several tensors gets, and what the kernel reads beside addresses.

        All together fill the device a few times, each by its share; more programs would have more to merge.
        """
        share = (sizes * (WAVES * self._walkers / max(1, sizes.sum()))).astype(np.int64)
        counts = self._programs(dtype, powers, sizes, share.clip(1, self._walkers))
        return int(counts.max()), np.concatenate((sizes, counts, np.cumsum(counts) - counts))

    def _programs(self, dtype: torch.dtype, powers: bool, numel: Any, walkers: Any) -> Any:
        """Return how many programs measure a tensor: walkers over whole tiles, and one for the rest of quick ones."""
        whole, rest = numel // TILE, numel % TILE > 0
        if dtype in QUICK and not powers:
            return np.minimum(walkers, whole) + rest
        return np.minimum(walkers, whole + rest)

    def _constants(self, dtype: torch.dtype, powers: bool) -> tuple[Any, ...]:
        return BLOCK, DEPTH, powers, dtype in QUICK and not powers, self._pairs, self._most_programs


class Table:
    """What a kernel reads of the tensors that it measures: memory that is kept, on the host and on the device.

    Args:
        device: The current one.
    """

    def __init__(self, device: torch.device) -> None:
        # Pinned: a copy from other memory may wait for all that the stream has to do.
        self._host = torch.empty(4 * TOGETHER, dtype=torch.int64, pin_memory=True)
        self._device = torch.empty(4 * TOGETHER, dtype=torch.int64, device=device)
        self._numbers: NDArray[np.int64] = self._host.numpy()
        self._address = self._device.data_ptr()

    def fill(self, addresses: Sequence[int], columns: NDArray[np.int64]) -> int:
        """Write addresses and what follows them, on the current stream; return where they are on the device."""
        count = len(addresses)
        self._numbers[:count] = addresses
        self._numbers[count : 4 * count] = columns
        self._device.copy_(self._host, non_blocking=True)
        return self._address


class _Kernel:
    """A kernel for arguments of certain types, which Triton compiles when it is launched first.

    Args:
        function: What Triton compiles.
        types: Those of the arguments: what a pointer points to, None for numbers.
        constants: Its other arguments.
    """

    def __init__(self, function: Any, types: tuple[torch.dtype | None, ...], constants: tuple[Any, ...]) -> None:
        self._function, self._types, self._constants = function, types, constants
        self._compiled: Any = None
        self._direct = True

    def launch(self, grid: tuple[int, int, int], stream: int, *arguments: int) -> None:
        """Launch it on the stream, which is the current one, with addresses and numbers."""
        if self._compiled is not None and self._direct:
            try:
                self._compiled[grid](*arguments, *self._constants, stream=stream)
                return
            except TypeError:  # a version of Triton that launches otherwise, which it does not do then
                self._direct = False
        typed = [n if kind is None else _Pointer(n, kind) for n, kind in zip(arguments, self._types, strict=True)]
        options = {} if torch.version.hip else {"maxnreg": REGISTERS}
        self._compiled = self._function[grid](*typed, *self._constants, num_warps=WARPS, **options)


class _Pointer:
    """An address as Triton takes a tensor."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address
