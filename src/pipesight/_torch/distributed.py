"""``torch.distributed``: the store behind the default group, and the rehearsals of optimizers."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import torch.distributed as dist

__all__ = ["default_store", "optimizer_rehearsal_code"]


def default_store() -> Any:
    """Return the key-value store that all ranks of the default group share."""
    return dist.distributed_c10d._get_default_store()


def optimizer_rehearsal_code() -> CodeType | None:
    """Return the code in which ``torch.distributed.checkpoint`` steps an optimizer only to give it a state to load."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code: CodeType | None = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    return code
