"""What `run.json` says of a pipeline: how it is cut, and what its layers hold and hand on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from torch import nn
from torch.utils.hooks import RemovableHandle

from pipesight import context
from pipesight._nested import tensors_in
from pipesight.pipeline.gpipe import GPipe

if TYPE_CHECKING:
    from pipesight.distributed import DistributedPipeline

__all__ = ["Pipeline", "PipelineDescription"]

Pipeline: TypeAlias = Union[GPipe, "DistributedPipeline"]
"""A pipeline of either engine."""


class PipelineDescription:
    """A pipeline that a run has met. Its first mini-batch tells how large these are, and the outputs of layers.

    Of one over several processes, each knows the outputs of its own layers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._outputs: dict[str, int] = {}
        self._samples: int | None = None
        self._minibatch: int | None = None
        self._adding = threading.Lock()
        self._handles: list[RemovableHandle] = [
            layer.register_forward_hook(partial(self._add, name))
            for part in (pipeline.partitions if isinstance(pipeline, GPipe) else pipeline.partitions.values())
            for name, layer in part.named_children()
        ]

    def settle(self) -> bool:
        """Learn no more, once a mini-batch has come through; return whether there is news."""
        if not self._handles or self._minibatch is None:
            return False
        self.remove()
        return True

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def as_json(self) -> dict[str, Any]:
        """Return what there is to say by now."""
        pipeline = self._pipeline
        everything: Sequence[nn.Module]
        placed: dict[str, Any]
        if isinstance(pipeline, GPipe):
            everything, placed = list(pipeline.partitions), {"schedule": "gpipe"}
        else:
            everything, placed = pipeline.outlines, {"schedule": pipeline.schedule, "ranks": pipeline.ranks}
        return {
            **placed,
            "partitions": len(pipeline.balance),
            "chunks": pipeline.chunks,
            "balance": pipeline.balance,
            "devices": [str(device) for device in pipeline.devices],
            "checkpoint": pipeline.checkpoint,
            "batch_size": self._samples,
            "layers": [
                {
                    "name": name,
                    "class": type(layer).__name__,
                    "partition": j,
                    "parameter_bytes": sum(p.nelement() * p.element_size() for p in layer.parameters()),
                    "output_bytes": self._outputs.get(name),
                }
                for j, part in enumerate(everything)
                for name, layer in part.named_children()
            ],
        }

    def _add(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Add what a layer makes of a micro-batch of the first mini-batch."""
        where = context.current()
        if where is None or where.phase != "forward":
            return
        with self._adding:
            if self._minibatch is None:
                self._minibatch, self._samples = where.serial, where.samples
            if where.serial == self._minibatch:
                size = sum(tensor.nelement() * tensor.element_size() for tensor in tensors_in(output))
                self._outputs[name] = self._outputs.get(name, 0) + size
