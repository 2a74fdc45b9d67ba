"""The part of a DTensor that lies on this rank, and whether it counts when ranks are merged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesight._torch.tensors import is_instance

__all__ = ["LocalPart", "local_part"]


class LocalPart(NamedTuple):
    """What a rank holds of a tensor.

    Attributes:
        tensor: the elements on this rank.
        counts: whether they count when the ranks are merged; of several ranks with the same elements, one counts.
    """

    tensor: Tensor
    counts: bool


def local_part(tensor: Tensor, ranks: Collection[int] | None = None) -> LocalPart:
    """The elements of ``tensor`` on this rank; a tensor that is no DTensor is its own part and counts.

    A sharded dimension gives each rank its own elements, a replicated one gives them the same; of those only the lowest
    rank counts.

    Example::

        part = local_part(tensor, ranks=torch.distributed.get_process_group_ranks(group))
        moments = measure(part.tensor)
        row = (moments if part.counts else Moments.EMPTY).row()  # merge the rows of the group

    Args:
        tensor: any tensor.
        ranks: the global ranks that will be merged; all ranks of the mesh by default.

    Raises:
        ValueError: for a partial DTensor. To sum it takes all ranks of the mesh; asked by one of them, it would hang.
    """
    if not is_instance(tensor, "torch.distributed.tensor", "DTensor"):
        return LocalPart(tensor, True)
    shards: Any = tensor
    placements = shards.placements
    if any(placement.is_partial() for placement in placements):
        done = ", ".join("Replicate()" if each.is_partial() else repr(each) for each in placements)
        raise ValueError(
            f"a partial DTensor is a sum that has not been done (placements: {placements}); on all ranks of its mesh, "
            f"pass x.redistribute(placements=[{done}]), which sends the tensor over the network"
        )
    with torch.no_grad():
        local = shards.detach().to_local()
        if hasattr(local, "wait"):  # a collective that may still be running
            local = local.wait()
    return LocalPart(local.detach(), _is_first(shards.device_mesh, placements, ranks))


def _is_first(mesh: Any, placements: Any, ranks: Collection[int] | None) -> bool:
    """Whether no lower rank among ``ranks`` holds the same elements."""
    at = mesh.get_coordinate()
    if at is None:  # not in the mesh: holds nothing
        return False
    same = mesh.mesh
    for dim, placement in reversed(list(enumerate(placements))):
        if not placement.is_replicate():
            same = same.select(dim, at[dim])
    own = int(mesh.mesh[tuple(at)])
    return all(rank >= own or (ranks is not None and rank not in ranks) for rank in same.flatten().tolist())
