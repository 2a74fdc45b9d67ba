"""Let a method of a model that calls the model, such as ``generate`` of transformers, call the pipeline instead.

The plain model cannot run where its partitions are on several devices: nothing would move tensors between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipesight.pipeline.trip import is_under_way

if TYPE_CHECKING:
    from pipesight.pipeline.any_model import Pipeline

__all__ = ["through_pipeline"]


def through_pipeline(pipe: Pipeline, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a pipeline's model that calls the pipeline, with one micro-batch, where it calls the model."""
    model = pipe.module
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (own if is_under_way() else pipe)(*args, **kwargs)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        chunks, before = pipe.chunks, vars(model).get("forward")
        pipe.chunks = 1
        model.forward = forward
        try:
            return method(*args, **kwargs)
        finally:
            pipe.chunks = chunks
            del model.forward
            if before is not None:
                model.forward = before

    return call
