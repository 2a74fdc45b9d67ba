"""The most in the middle of tasks, with an allocator that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipesight._torch import cuda_peaks
from pipesight._torch.cuda_peaks import InsideTask, PeakMeter

GPU = torch.device("cuda", 0)


class Allocator:
    """Counts like that of a GPU."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def numbers(self, gpu: int) -> dict[str, Any]:
        assert gpu == 0
        return {"allocated_bytes": {"all": {"current": self.now, "peak": self.most}}, "num_ooms": 0}

    def forget(self, gpu: int) -> None:
        assert gpu == 0
        self.most = self.now


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Put one in the place of PyTorch's."""
    found = Allocator()
    monkeypatch.setattr(cuda_peaks, "allocator_numbers", found.numbers)
    monkeypatch.setattr(cuda_peaks, "forget_peaks", found.forget)

    def memory_stats_as_nested_dict(device=None):
        return found.numbers(0)

    def reset_peak_memory_stats(device=None):
        found.forget(0 if device is None else torch.device(device).index)

    def memory_stats(device_index=None, /):
        numbers = found.numbers(0)["allocated_bytes"]["all"]
        return {f"allocated_bytes.all.{name}": value for name, value in numbers.items()}

    def reset_accelerator(device_index=None, /):
        found.forget(0)

    if hasattr(getattr(torch, "accelerator", None), "memory"):
        monkeypatch.setattr(torch.accelerator.memory, "memory_stats", memory_stats)
        monkeypatch.setattr(torch.accelerator.memory, "reset_peak_memory_stats", reset_accelerator)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", memory_stats_as_nested_dict)
    monkeypatch.setattr(torch.cuda.memory, "reset_peak_memory_stats", reset_peak_memory_stats)
    return found


def peak() -> int:
    """Return what a program would be told."""
    found: int = torch.cuda.memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"]
    return found


def test_each_layer_has_its_most(allocator):
    """Of a layer, what it needs for a moment counts from its beginning on, and what it leaves."""
    meter = PeakMeter()
    allocator.add(1000)
    task = InsideTask(GPU, meter, meter.most_since(GPU)[0])
    allocator.add(5)
    task.begin("a")
    for size in (100, 50, -90):
        allocator.add(size)
    task.begin(None)
    task.begin("b")
    for size in (10, -70):
        allocator.add(size)
    task.begin(None)
    allocator.add(7)
    found = {"before": [5, 5], "layers": {"a": [150, 60], "b": [10, -60]}, "after": [7, 7]}
    assert task.found() == found


def test_a_program_is_told_its_own_peak(allocator):
    """What the program asks for is what it would be, until it resets that itself."""
    meter = PeakMeter()
    allocator.add(500)
    allocator.add(-400)
    meter.most_since(GPU)
    assert allocator.most == 100
    assert peak() == 500
    allocator.add(700)
    assert peak() == 800
    meter.most_since(GPU)
    allocator.add(-750)
    meter.most_since(GPU)
    assert peak() == 800
    if hasattr(getattr(torch, "accelerator", None), "memory"):
        found = torch.accelerator.memory.memory_stats(0)
        assert found == {"allocated_bytes.all.current": 50, "allocated_bytes.all.peak": 800}
    torch.cuda.memory.reset_peak_memory_stats()
    assert peak() == 50


def test_a_mistake_of_the_program_changes_nothing(allocator, caplog):
    """A device that is none raises what PyTorch raises, and later resets count."""
    meter = PeakMeter()
    allocator.add(500)
    allocator.add(-400)
    meter.most_since(GPU)
    with pytest.raises(RuntimeError):
        torch.cuda.memory.reset_peak_memory_stats("nothing")
    assert peak() == 500
    torch.cuda.memory.reset_peak_memory_stats()
    assert (peak(), caplog.records) == (100, [])
