"""Record checkpoints that are written and read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from pipesight._patches import Patches
from pipesight.trace.ai import ai
from pipesight.trace.automatic._step_argument import with_step
from pipesight.trace.node import Node

__all__ = ["instrument_checkpoints"]


def instrument_checkpoints(patches: Patches) -> None:
    """Record ``checkpoint.capture`` and ``checkpoint.restart``."""
    patches.wrap(torch.serialization, "save", _around(ai.checkpoint.capture, "f", 1))
    patches.wrap(torch.serialization, "load", _around(ai.checkpoint.restart, "f", 0))
    try:
        import safetensors.torch
    except ImportError:
        pass
    else:
        patches.wrap(safetensors.torch, "save_file", _around(ai.checkpoint.capture, "filename", 1))
        patches.wrap(safetensors.torch, "load_file", _around(ai.checkpoint.restart, "filename", 0))
    if torch.distributed.is_available():
        from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

        for name in ("save", "async_save"):
            patches.wrap(state_dict_saver, name, _around(ai.checkpoint.capture, "checkpoint_id", None))
        patches.wrap(state_dict_loader, "load", _around(ai.checkpoint.restart, "checkpoint_id", None))


def _around(node: Node, keyword: str, position: int | None) -> Callable[..., Any]:
    """Return a wrapper that records calls; the file is the argument ``keyword``, or the one at ``position``."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not node.recording:
            return original(*args, **kwargs)
        given = kwargs.get(keyword)
        if given is None and position is not None and len(args) > position:
            given = args[position]
        path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
        with node(args=with_step({} if path is None else {"path": path})) as use:
            result = original(*args, **kwargs)
            if path is not None and os.path.isfile(path):
                use.update(args={"size": os.path.getsize(path)})
            return result

    return around
