"""What a `Pipeline` that trains warns of once: partitions without work, too small a batch, copies on other ranks."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from pipesight._torch.c10d import is_data_parallel, place_in_world
from pipesight._user_warnings import warn_user

if TYPE_CHECKING:
    from pipesight.pipeline.any_model import Pipeline

__all__ = ["Notices"]


class Notices:
    """Those of one pipeline."""

    def __init__(self) -> None:
        self._idle, self._began = False, False

    def begin_batch(self, pipe: Pipeline, samples: int) -> None:
        """Look at the first mini-batch that is trained; the last one of an epoch may be smaller."""
        if self._began:
            return
        self._began = True
        if 0 < samples < pipe.chunks:
            warn_user(
                f"chunks is {pipe.chunks}, but the batch has only {samples} sample{'s' * (samples > 1)}, one for each "
                f"micro-batch; use a larger batch, or chunks={samples}"
            )
        rank, ranks = place_in_world()
        if ranks > 1 and not rank and not is_data_parallel(pipe, pipe.module):
            warn_user(
                f"{ranks} processes train a copy of the model each, as a Pipeline does not average gradients over "
                "them; for data parallelism, call DistributedDataParallel(pipe); for a partition in each process, use "
                "pipesight.distributed.DistributedPipeline"
            )

    def end_batch(self, cuts: Sequence[str], called: Set[int]) -> None:
        """Look for partitions that had nothing to do because the model did not call their first module."""
        idle = [name for k, name in enumerate(cuts, start=1) if k not in called]
        if idle and not self._idle:
            self._idle = True
            warn_user(
                f"the model did not call {' and '.join(map(repr, idle))} in this mini-batch, so that the partition "
                "that begins there had nothing to do; cut at modules that every call of the model calls"
            )
