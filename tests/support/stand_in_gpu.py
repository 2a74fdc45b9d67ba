"""A GPU that is not there: tensors of the CPU take the way of CUDA tensors, and NumPy does what the kernels would.

What is real: the hooks, the queues, launches shared by tensors, batches of rows, reading back and merging.
What is not: streams, events, and the kernels themselves, which `tests/cuda` checks.
"""

import ctypes
import types
from typing import Any

import numpy as np
import pytest
import torch

from pipesight.stats import iteration_buffer, stats_session
from pipesight.stats.moments import cuda_lanes, cuda_launch, cuda_moments, cuda_readback
from pipesight.stats.moments.cpu_moments import measure

__all__ = ["StandInGpu", "stand_in_gpu"]

DTYPES = {torch.float32: ctypes.c_float, torch.float16: ctypes.c_uint16, torch.bfloat16: ctypes.c_uint16}


class StandInGpu:
    """What was launched.

    Attributes:
        launches: How many tensors each launch measured.
    """

    def __init__(self) -> None:
        self.launches: list[int] = []

    def measure(self, dtype: torch.dtype, address: int, size: int, out: int) -> None:
        memory = (DTYPES[dtype] * size).from_address(address)
        raw = torch.from_numpy(np.ctypeslib.as_array(memory).copy())
        x = raw if dtype is torch.float32 else raw.view(dtype)
        row = measure(x, powers=True, smallest=True).row()
        ctypes.memmove(out, (ctypes.c_double * len(row))(*row), 8 * len(row))


def _kernels(gpu: StandInGpu) -> type:
    class Kernels:
        scratch_rows = 1

        def __init__(self, device: torch.device) -> None:
            pass

        def measure(self, x: torch.Tensor, powers: bool, stream: int, rows: int, done: int, out: int) -> None:
            gpu.launches.append(1)
            gpu.measure(x.dtype, x.data_ptr(), x.numel(), out)

        def measure_many(self, dtype, addresses, sizes, powers, table, rows, done, out) -> None:
            assert len(addresses) <= cuda_launch.TOGETHER
            gpu.launches.append(len(addresses))
            for i, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
                assert address % 16 == 0
                gpu.measure(dtype, address, size, out + i * cuda_lanes.ROW_BYTES)

    return Kernels


class _Rows(cuda_moments.DeviceRows):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._index = -1  # the number of a CPU tensor's device


class _Nothing:
    """A stream, an event, or a context."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def nothing(self, *_: object) -> None:
        pass

    record = synchronize = wait_stream = nothing


class _Torch(types.ModuleType):
    """torch, but for some names."""

    def __init__(self, real: types.ModuleType, **other: object) -> None:
        super().__init__(real.__name__)
        self._real = real
        vars(self).update(other)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


def _empty(*args: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
    return torch.empty(*args, **options)  # type: ignore[call-overload]


@pytest.fixture
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> StandInGpu:
    """Have tensors of the CPU measured as if they were on a GPU."""
    gpu, stream = StandInGpu(), _Nothing()
    properties = types.SimpleNamespace(multi_processor_count=4, major=9, total_memory=1 << 30)
    cuda = _Torch(
        torch.cuda,
        Event=_Nothing,
        stream=_Nothing,
        device=_Nothing,
        current_stream=lambda: stream,
        get_device_properties=lambda _: properties,
        synchronize=lambda _: None,
    )
    for module in (cuda_moments, cuda_lanes, cuda_readback):
        monkeypatch.setattr(module, "torch", _Torch(torch, cuda=cuda, empty=_empty))
    monkeypatch.setattr(iteration_buffer, "torch", _Torch(torch, cuda=cuda, device=lambda *_: torch.device("cpu", 0)))
    monkeypatch.setattr(cuda_moments, "Kernels", _kernels(gpu))
    monkeypatch.setattr(iteration_buffer, "DeviceRows", _Rows)
    monkeypatch.setattr(cuda_moments, "current_gpu", lambda: -1)
    monkeypatch.setattr(cuda_moments, "raw_stream", lambda _: 1)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(stats_session, "has_kernels", lambda _: True)
    monkeypatch.setattr(stats_session, "on_gpu", lambda _: True)
    monkeypatch.setattr(stats_session, "is_capturing_stream", lambda: False)
    monkeypatch.setattr(cuda_launch, "has_kernels", lambda _: True)
    monkeypatch.setattr(cuda_launch, "torch", _Torch(torch, empty=_empty))
    return gpu
