"""The store behind the default process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["default_store"]


def default_store() -> Any:
    """Return the key-value store that all ranks of the default group share."""
    return dist.distributed_c10d._get_default_store()
