"""What `run.json` says of a pipeline: how it is cut, and the sizes of its layers and their outputs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipesight import context
from pipesight._nested import tensors_in
from pipesight._patches import harmless
from pipesight._torch.autograd import next_sequence_number
from pipesight.pipeline.units import is_repeated
from pipesight.recording.operator_cost import operator_cost
from pipesight.recording.torch_pipelines import TorchPipeline
from pipesight.runs.format import BARE_TORCH

if TYPE_CHECKING:
    from pipesight.distributed import DistributedPipeline
    from pipesight.pipeline.any_model import Pipeline as PipelineOfAnyModel
    from pipesight.pipeline.gpipe import GPipe

__all__ = ["Pipeline", "PipelineDescription", "is_pipeline", "parts_of"]

Pipeline: TypeAlias = Union["GPipe", "PipelineOfAnyModel", "DistributedPipeline", TorchPipeline]
"""A pipeline of either engine, or of bare torch. Those in one process are modules."""

_CLASSES = [("pipesight.pipeline.gpipe", "GPipe"), ("pipesight.pipeline.any_model", "Pipeline")]


def is_pipeline(module: nn.Module) -> bool:
    """Tell whether a module is a pipeline. Programs that have none never import it, and recording does not either."""
    imported = [(sys.modules.get(name), of) for name, of in _CLASSES]
    return any(home is not None and isinstance(module, getattr(home, of)) for home, of in imported)


class PipelineDescription:
    """A pipeline of a run. A mini-batch shows the batch size, the sizes of the layers' outputs, and their operators.

    It is the first that trains or, until one does, the first of all. In a pipeline over several processes, each knows
    the outputs of its own layers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._outputs: dict[tuple[int, str], int] = {}  # by partition and name of layer
        self._samples: int | None = None
        self._minibatch: int | None = None
        self._trains = False
        self._settled: int | None = None
        self._adding = threading.Lock()
        self._operators: dict[tuple[int, str], int] = {}  # that have a backward
        self._operator_seconds: tuple[float, float] | None = None
        self._first: dict[tuple[int, int, str], int] = {}  # the numbers of operators; each thread counts its own
        self._handles: list[RemovableHandle] = []
        for j, name, layer in _layers(pipeline, everywhere=False):
            self._handles.append(layer.register_forward_pre_hook(partial(self._begin, (j, name))))
            self._handles.append(layer.register_forward_hook(partial(self._add, (j, name))))

    def settle(self) -> bool:
        """Remove the hooks once a mini-batch has passed that trains; return whether more is known than before."""
        if self._settled == self._minibatch:
            return False
        self._settled = self._minibatch
        if self._trains:
            self.remove()
        return True

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @harmless
    def measure_operators(self) -> None:
        """Measure what an operator takes that has next to nothing to compute; on a GPU, others hide that."""
        parameters = (p for _, _, layer in _layers(self._pipeline, everywhere=False) for p in layer.parameters())
        device = next((p.device for p in parameters), None)
        if self._operators and device is not None and device.type == "cpu":
            self._operator_seconds = operator_cost(device)

    def as_json(self) -> dict[str, Any]:
        """Return what is known so far."""
        pipeline = self._pipeline
        settings = _settings(pipeline)
        return {
            **settings,
            "batch_size": self._samples,
            **({} if self._operator_seconds is None else {"operator_seconds": list(self._operator_seconds)}),
            "layers": [
                {
                    "name": name,
                    "class": type(layer).__name__,
                    "partition": j,
                    "parameter_bytes": sum(p.nelement() * p.element_size() for p in layer.parameters()),
                    "output_bytes": self._outputs.get((j, name)),
                    **({"operators": self._operators[j, name]} if (j, name) in self._operators else {}),
                    **({"checkpointed": is_repeated(layer)} if "cuts" in settings else {}),
                }
                for j, name, layer in _layers(pipeline, everywhere=True)
            ],
        }

    def _begin(self, layer: tuple[int, str], _: nn.Module, __: Any) -> None:
        self._first[threading.get_ident(), *layer] = next_sequence_number()

    def _add(self, layer: tuple[int, str], _: nn.Module, __: Any, output: Any) -> None:
        """Add the size of a layer's output for a micro-batch of the mini-batch that is described."""
        number = next_sequence_number()
        operators = number - self._first.pop((threading.get_ident(), *layer), number)
        where = context.current()
        with self._adding:
            # Where a checkpointed forward has no graph, only the recomputation has.
            self._operators[layer] = max(operators, self._operators.get(layer, 0))
            if where is None or where.phase != "forward":
                return
            if self._minibatch is None or (where.serial != self._minibatch and not self._trains):
                # Without gradients, a forward trains only if it is checkpointed.
                trains = self._may_train() and (where.checkpointing or torch.is_grad_enabled())
                if self._minibatch is None or trains:
                    self._minibatch, self._samples, self._trains = where.serial, where.samples, trains
                    self._outputs.clear()
            if where.serial == self._minibatch:
                size = sum(tensor.nelement() * tensor.element_size() for tensor in tensors_in(output))
                self._outputs[layer] = self._outputs.get(layer, 0) + size

    def _may_train(self) -> bool:
        """Return whether gradients, if there are any, are for training: a `GPipe` may be evaluated with them."""
        return self._pipeline.training if isinstance(self._pipeline, nn.Module) else True


def parts_of(pipeline: Pipeline) -> dict[int, nn.Module]:
    """Return the partitions of this process."""
    if isinstance(pipeline, TorchPipeline):
        return dict(pipeline.stages)
    if isinstance(pipeline, nn.Module):
        parts: Iterable[nn.Module] = pipeline.partitions
        return dict(enumerate(parts))
    return dict(pipeline.partitions)


def _layers(pipeline: Pipeline, *, everywhere: bool) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield partition, name and layer of those of this process or, as far as they are known, of all."""
    if isinstance(pipeline, TorchPipeline):
        for j, layers in sorted(pipeline.layers.items()):
            yield from ((j, name, layer) for name, layer in layers.items())
        return
    parts = parts_of(pipeline)
    if everywhere and not isinstance(pipeline, nn.Module):
        parts = dict(enumerate(pipeline.outlines))
    for j, part in parts.items():
        yield from ((j, name, layer) for name, layer in part.named_children())


def _settings(pipeline: Pipeline) -> dict[str, Any]:
    """Return how a pipeline is cut and placed. Of one of bare torch, a rank knows its own partitions only."""
    if isinstance(pipeline, TorchPipeline):
        numbers = range(pipeline.partitions)
        return {
            "engine": BARE_TORCH,
            "schedule": pipeline.schedule,
            "ranks": [[rank] for rank in pipeline.ranks],
            "partitions": pipeline.partitions,
            "chunks": pipeline.chunks,
            "balance": [len(pipeline.layers[j]) if j in pipeline.layers else None for j in numbers],
            "devices": [pipeline.devices.get(j) for j in numbers],
            "checkpoint": "never",
        }
    placed: dict[str, Any] = getattr(pipeline, "ran", {"schedule": "gpipe"})
    if not isinstance(pipeline, nn.Module):
        placed = {"schedule": pipeline.schedule, "ranks": pipeline.ranks}
    return {
        **placed,
        "partitions": len(pipeline.balance),
        "chunks": pipeline.chunks,
        "balance": pipeline.balance,
        **({"cuts": cuts} if (cuts := getattr(pipeline, "cuts", None)) is not None else {}),
        "devices": [str(device) for device in pipeline.devices],
        "checkpoint": pipeline.checkpoint,
    }
