"""One mini-batch on its way through the partitions: forward, and later backward, on the workers.

A task (i, j) runs micro-batch i through partition j, in the partition's worker. Each task has an autograd graph of its
own: its inputs are made roots of that graph (`tie.enter`), and its outputs go on detached. In backward, the task waits
for the gradients of the outputs, runs the local graph, and sends the gradients of the inputs to partition j - 1::

    forward    box (i, j) ──> enter ──> layers ──> detach ──> box (i, j + 1)
    backward   box (i, j) <── autograd.grad(local graph) <─── box (i, j + 1)

Skips that cross partitions are more outputs of one task and more inputs of another, with boxes (i, key). What the
workers do in either pass is in `forward` and `backward`; here is what lasts from one to the other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipesight.context import MicrobatchToken
from pipesight.pipeline.aliasing import Changes
from pipesight.pipeline.backward import BackwardPass
from pipesight.pipeline.caller_state import Surroundings
from pipesight.pipeline.dependencies import Reach
from pipesight.pipeline.forward import ForwardPass
from pipesight.pipeline.gradients import OutputGradients, expect_no_gradient
from pipesight.pipeline.mailbox import Packet
from pipesight.pipeline.microbatch import Form
from pipesight.pipeline.partition import SkipRoutes
from pipesight.pipeline.randomness import PassRandomness
from pipesight.pipeline.task import Graph, Stage
from pipesight.pipeline.transfer import Streams
from pipesight.pipeline.workers import Workers

__all__ = ["MiniBatch", "next_serial"]

next_serial = itertools.count(1).__next__
"""Returns a number for each mini-batch of the process, whichever engine runs it."""


class MiniBatch:
    """One mini-batch: `forward` once, then `backward`, once or, if the graph is retained, again.

    The rest is for the passes.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        routes: SkipRoutes,
        workers: Workers,
        microbatches: Sequence[tuple[Tensor, ...]],
        inputs_needed: Sequence[bool],
        surroundings: Surroundings,
        *,
        form: Form,
        checkpoint_stop: int,
        step: int,
    ) -> None:
        self.stages, self.routes, self.workers, self.surroundings = stages, routes, workers, surroundings
        self.m, self.n = len(microbatches), len(stages)
        self.step, self.serial = step, next_serial()
        self.grad = torch.is_grad_enabled()
        self.checkpoint_stop = checkpoint_stop if self.grad else 0
        self.sizes = [tensors[0].size(0) for tensors in microbatches]
        self.inputs_needed = [self.grad and need for need in inputs_needed]
        self._inputs = [
            Packet(list(tensors), stages[0].device, list(self.inputs_needed), form) for tensors in microbatches
        ]
        self.input_storages = {t.untyped_storage().data_ptr() for t in microbatches[0]}
        self.tokens = [MicrobatchToken(i) for i in range(self.m)]
        self.randomness = PassRandomness()
        self.streams = Streams([stage.device for stage in stages])
        self.graphs: dict[tuple[int, int], Graph] = {}
        self.changes = [Changes() for _ in microbatches]
        self.reach = Reach(routes, len(self.inputs_needed))
        self.parameters: list[list[Tensor]] = [[] for _ in stages]
        """The tensors of each partition that get gradients; `forward` finds them."""
        self.versions: list[list[int]] = [[] for _ in stages]
        """Those of the parameters."""
        self.spent = False
        self._differentiating = threading.Lock()

    def forward(self) -> list[Packet]:
        """Run all micro-batches through all partitions; return the outputs of the last."""
        outputs = ForwardPass(self).run(self._inputs)
        self._output_sizes = [[t.size(0) if t is not None and t.dim() else 0 for t in o.tensors] for o in outputs]
        return outputs

    def backward(
        self, outputs: OutputGradients, inputs_needed: Sequence[bool], parameters: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run backward on the workers; return the gradients of the inputs, then those of the parameters."""
        self.surroundings.refuse_inside()
        with self._differentiating:
            if self.spent:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: the first backward freed what GPipe's "
                    "forward had kept. Specify retain_graph=True in the first one if you need a second"
                )
            keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
            backward = BackwardPass(self, keep=keep)
            total = backward.run(self._cut(outputs))
            needed = [a and b for a, b in zip(inputs_needed, self.inputs_needed, strict=True)]
            gradients = [total.take(parameter) for parameter in parameters]
            expect_no_gradient(p for p, gradient in zip(parameters, gradients, strict=True) if gradient is None)
            total.accumulate()
            return [*backward.input_gradients(needed), *gradients]

    def dependencies(self) -> tuple[set[int], list[Tensor]]:
        """Return what the outputs depend on, after `forward`: the positions of inputs, and the parameters."""
        inputs, used = self.reach.dependencies(self.m, self.n, len(self._output_sizes[0]))
        found = {id(p): p for parameters in self.parameters for p in parameters if id(p) in used}
        return inputs, list(found.values())

    def _cut(self, outputs: OutputGradients) -> list[Packet]:
        """Cut the gradients of the gathered outputs into those of the micro-batches, which alone remain."""
        sizes = zip(*self._output_sizes, strict=True)
        pairs = zip(outputs.gradients, sizes, strict=True)
        parts = [[None] * self.m if gradient is None else gradient.split(size) for gradient, size in pairs]
        outputs.gradients.clear()
        device = self.stages[-1].device
        return [Packet([p[i] for p in parts], device, ready=outputs.ready) for i in range(self.m)]

    def note_versions(self, stages: Iterable[Stage]) -> None:
        """Note the versions of the parameters of some stages as they are now."""
        for stage in stages:
            self.versions[stage.j] = [parameter._version for parameter in self.parameters[stage.j]]
