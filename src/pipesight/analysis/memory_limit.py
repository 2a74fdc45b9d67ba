"""How much memory plans may need: each device its own, or all of them that of one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipesight._formatting import size
from pipesight.analysis.described_pipelines import DescribedPipeline, hosts_of
from pipesight.analysis.memory import MemoryReport

__all__ = ["MemoryLimit", "limit_of"]

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What devices have."""

    bytes: float
    """Of each device, or of the machine."""
    shared: bool = False
    """Whether all devices are processors of one machine, and share its memory."""
    replicas: int = 1
    """How many share it."""
    besides: float = 0.0
    """What else processes have of it: Python, libraries, what the program holds, and what the C library keeps."""

    def needed(self, devices: Sequence[float]) -> float:
        """Return what the fullest device needs, or the program, as if all had their peaks at the same time.

        Args:
            devices: The peak of each, in one replica.
        """
        return self.replicas * sum(devices) + self.besides if self.shared else max(devices)

    def allows(self, devices: Sequence[float]) -> bool:
        """Return whether they have so much."""
        return self.needed(devices) <= self.bytes

    def told(self, devices: Sequence[float], now: Sequence[float]) -> str:
        """Say what a plan needs, beside what the recorded setting needs."""
        need, before, there = size(self.needed(devices)), size(self.needed(now)), size(self.bytes)
        instead = f" instead of {before}" if before != need else ", as before"
        if self.shared:
            return f"the program needs about {need}{instead}, and the machine has {there}"
        return f"a device needs {need}{instead}, and has {there}"


def limit_of(
    memory: MemoryReport | None, facts: DescribedPipeline, description: Mapping[str, Any]
) -> MemoryLimit | None:
    """Return what the devices of a run have; ``None`` where that is not known, or they are of several kinds."""
    if memory is None:
        return None
    kinds = {name.partition(":")[0] for name in facts.devices or [entry.device for entry in memory.devices]}
    own = [entry for entry in memory.devices if entry.device.partition(":")[0] in kinds]
    known = [entry.capacity for entry in own if entry.capacity is not None]
    if len(kinds) != 1 or not known or len(known) < len(own):
        return None
    if kinds != {CPU}:
        return MemoryLimit(min(known))
    if hosts_of(description):  # who shares the memory of which machine is not in the plan
        return None
    besides = sum(max((entry.resident or 0) - entry.peak, 0) for entry in own)
    return MemoryLimit(min(known), True, max(len(memory.partitions) // facts.partitions, 1), besides)
