"""The dynamic range of blocks: how many powers of two a shared scale would have to span, at worst.

Example::

    measure_blockwise(activation, block_size=32, dims=1).value
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pipesight.stats.moments._flat_pieces import matrices, plain
from pipesight.stats.moments.shards import local_part

__all__ = ["BlockwiseRange", "max_blockwise_dynamic_range", "measure_blockwise"]


@dataclass(frozen=True, slots=True)
class BlockwiseRange:
    """The greatest dynamic range of the blocks of a tensor, or of several; ``-inf`` where no block has one."""

    value: float = -math.inf

    EMPTY: ClassVar[BlockwiseRange]

    def merge(self, other: BlockwiseRange) -> BlockwiseRange:
        """The greater one: blocks never span tensors."""
        return self if self.value >= other.value else other

    def row(self) -> list[float]:
        """The one field."""
        return [self.value]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> BlockwiseRange:
        """The record that :meth:`row` was called on."""
        (value,) = row
        return cls(float(value))


BlockwiseRange.EMPTY = BlockwiseRange()


def max_blockwise_dynamic_range(record: BlockwiseRange) -> float:
    """The greatest of log₂ max |x| - log₂ min { |x| : x ≠ 0 } over the blocks, NaN when every x is 0."""
    return record.value if record.value > -math.inf else math.nan


def measure_blockwise(
    tensor: Tensor, *, block_size: int, dims: int = 1, max_over_orientations: bool = False
) -> BlockwiseRange:
    """The greatest dynamic range of the blocks of a tensor; NaNs and infinities are left out.

    Args:
        tensor: as :func:`pipesight.stats.moments.cpu_moments.measure` takes it.
        block_size: elements along a side of a block; those at the edges of the tensor may be smaller.
        dims: 1 for blocks of the last dimension; 2 for squares of the last dimension and all others taken together.
        max_over_orientations: also take blocks of all others taken together, as if the tensor were transposed.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be a positive whole number (got {block_size!r})")
    if dims not in (1, 2):
        raise ValueError(f"dims must be 1 (blocks of a row) or 2 (squares) (got {dims!r})")
    shapes = [(block_size if dims == 2 else 1, block_size)]
    if max_over_orientations and dims == 1:  # squares are the same either way
        shapes.append((block_size, 1))
    worst = -math.inf
    with torch.no_grad():
        numbers = plain(local_part(tensor).tensor)
        for height, width in shapes:
            for matrix in matrices(numbers, height, width):
                worst = max(worst, _worst(matrix, height, width))
    return BlockwiseRange(worst)


def _worst(matrix: Tensor, height: int, width: int) -> float:
    exact = matrix.dtype in (torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64)
    sizes = matrix.to(torch.float64 if exact else torch.float32).abs()
    if not sizes.amax().isfinite():
        sizes = sizes.nan_to_num_(0.0, 0.0, 0.0)
    width, height = min(width, sizes.size(1)), min(height, sizes.size(0))  # a block may be larger than the tensor
    sizes = torch.nn.functional.pad(sizes, (0, -sizes.size(1) % width, 0, -sizes.size(0) % height))
    blocks = sizes.view(sizes.size(0) // height, height, sizes.size(1) // width, width)
    most = blocks.amax((1, 3)).cpu().double()
    least = torch.threshold(blocks, 0.0, math.inf).amin((1, 3)).cpu().double()  # zeros become inf
    ranges = torch.where(most > 0, most.log2() - least.log2(), -math.inf)
    return ranges.max().item()
