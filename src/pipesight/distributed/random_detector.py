"""Whether layers draw random numbers."""

from __future__ import annotations

from typing import Any

import torch

from pipesight._torch.operators import TorchDispatchMode
from pipesight._torch.tensors import without_function_overrides

__all__ = ["RandomDetector"]


class RandomDetector(TorchDispatchMode):
    """Detects operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = True
        with without_function_overrides():  # it may come from where these are on, such as the end of a vmap
            return func(*args, **(kwargs or {}))
