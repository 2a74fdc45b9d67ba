"""How ``torch.distributed.checkpoint`` makes the state of an optimizer: with a step that trains nothing."""

from __future__ import annotations

import sys
from types import CodeType

__all__ = ["optimizer_rehearsal_code"]


def optimizer_rehearsal_code() -> CodeType | None:
    """Return the code in which ``torch.distributed.checkpoint`` steps an optimizer only to give it a state to load."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code: CodeType | None = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    return code
