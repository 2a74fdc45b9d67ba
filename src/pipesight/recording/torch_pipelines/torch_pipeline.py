"""What is known of a pipeline of bare ``torch.distributed.pipelining``: this rank's part of it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["TorchPipeline"]


@dataclass(slots=True, eq=False)
class TorchPipeline:
    """A pipeline that a schedule of torch's runs. Other ranks know their parts of it; reports join them.

    Attributes:
        schedule: The name of the schedule, or of its class if it is none of torch's.
        chunks: Micro-batches per mini-batch.
        partitions: How many there are.
        ranks: The rank that has each partition. Replicas of this pipeline are not known.
        stages: The modules of the stages of this rank, by partition.
        layers: The layers of each, by name.
        devices: That of each.
        first_step: The step that it was first called in.
        steps: How many mini-batches it has trained on.
    """

    schedule: str
    chunks: int
    partitions: int
    ranks: list[int]
    stages: Mapping[int, nn.Module]
    layers: Mapping[int, Mapping[str, nn.Module]]
    devices: Mapping[int, str]
    first_step: int
    steps: int = 0

    @property
    def learns(self) -> bool:
        """Whether any weight of this rank is trained."""
        return any(p.requires_grad for module in self.stages.values() for p in module.parameters())

    @property
    def pipe(self) -> int:
        """A number that the ranks of this pipeline, and no others, have in common."""
        return zlib.crc32(f"{self.ranks} {self.schedule} {self.chunks}".encode()) + 1
