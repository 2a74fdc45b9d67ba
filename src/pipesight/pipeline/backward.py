"""The backward pass of a mini-batch: the workers run the graphs that the forward pass left, from the last to the first.

::

    box (i, j) <── autograd.grad(local graph) <── box (i, j + 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipesight.context import Where
from pipesight.pipeline.gradients import GradientSum, silence_hooks
from pipesight.pipeline.mailbox import Packet
from pipesight.pipeline.passes import Pass
from pipesight.pipeline.randomness import begin_task, end_task
from pipesight.pipeline.reentrant_checkpoint import CaughtGradients
from pipesight.pipeline.task import Graph, Stage
from pipesight.pipeline.transfer import ready
from pipesight.schedule.gpipe_order import backward_tasks

if TYPE_CHECKING:
    from pipesight.pipeline.minibatch import MiniBatch

__all__ = ["BackwardPass"]


class BackwardPass(Pass):
    """Runs the tasks of a mini-batch backward.

    Args:
        minibatch: One that has been run forward.
        keep: Leave it as it is, for another backward.
    """

    def __init__(self, minibatch: MiniBatch, *, keep: bool) -> None:
        super().__init__(minibatch, minibatch.m + minibatch.checkpoint_stop, minibatch.workers.backward_pace)
        self._keep = keep
        self._graphs = minibatch.graphs
        self._sums = [GradientSum() for _ in self.stages]
        self._checked: set[int] = set()  # the partitions whose weights are what they were

    def run(self, output_gradients: list[Packet]) -> GradientSum:
        """Take the gradients of the outputs, and empty the list; return those of the parameters."""
        for i, packet in enumerate(output_gradients):
            self.relay.put((i, self.n), packet, 0)
        output_gradients.clear()
        for parameters in self.parameters:
            silence_hooks(parameters)
        minibatch = self.minibatch
        minibatch.spent = True  # until all went well
        try:
            self.relay.run(minibatch.workers, self._work)
        except BaseException:
            minibatch.graphs = {}  # not emptied: after a second interrupt, workers may still be at it
            raise
        for stage in self.stages:
            stage.new = False
        minibatch.note_versions(self.stages)  # a layer may have changed its own weights when it was recomputed
        minibatch.spent = not self._keep
        total, *others = self._sums
        for other in others:
            total.merge(other)
        return total

    def input_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the inputs, put together from those of the micro-batches, after `run`."""
        if not any(needed):
            return [None] * len(needed)
        packets = [self.relay.get((i, 0), 0) for i in range(self.m)]
        gathered: list[Tensor | None] = []
        for k in range(len(needed)):
            parts = [packet.tensors[k] for packet in packets]
            some = next((part for part in parts if part is not None), None)
            if some is None:
                gathered.append(None)
                continue
            gathered.append(
                torch.cat(
                    [
                        some.new_zeros((size, *some.shape[1:])) if part is None else part
                        for part, size in zip(parts, self.minibatch.sizes, strict=True)
                    ]
                )
            )
        return gathered

    def _work(self, partitions: tuple[int, ...], where: Where) -> None:
        """Do all that one worker has to do."""
        self.enter(where)
        # Autograd would hand the nodes of a GPU to a thread of its own. Here it stays in the worker, which saves the
        # way there and back, and lets hooks see where they are.
        with torch.autograd.set_multithreading_enabled(False):
            for i, j in backward_tasks(self.m, partitions):
                graph = self._graphs.get((i, j)) if self._keep else self._graphs.pop((i, j), None)
                if graph is not None:
                    self._step(self.stages[j], i, graph, where)
                del graph  # hold nothing while waiting

    def _step(self, stage: Stage, i: int, graph: Graph, where: Where) -> None:
        """Recompute if need be, while the gradients may still be on their way, wait for them, and run backward."""
        if graph.checkpoint is not None:
            self._recompute(stage, i, graph, where)
        gradients = self._receive_gradients(stage, i, graph, where)
        self.begin(where, stage, i, "backward", marks=graph.marks)
        begin_task(self.randomness, (i, stage.j, "backward"))
        try:
            self.surroundings.run(self._task, stage, i, graph, gradients, where)
        finally:
            end_task()
            self.end(where)

    def _recompute(self, stage: Stage, i: int, graph: Graph, where: Where) -> None:
        minibatch, checkpoint = self.minibatch, graph.checkpoint
        assert checkpoint is not None
        self.begin(where, stage, i, "recompute")
        resume = stage.buffers.replay(checkpoint.buffers)
        try:
            checkpoint.check()
            if stage.j not in self._checked:
                self._checked.add(stage.j)
                stage.check_weights(self.parameters[stage.j], minibatch.versions[stage.j])
            with torch.enable_grad():
                self.call(stage, i, checkpoint.inputs.safe_from(stage), graph, replays=checkpoint)
        finally:
            resume()
            self.end(where)
        graph.marks = where.marks
        if not self._keep:
            graph.checkpoint = None

    def _receive_gradients(self, stage: Stage, i: int, graph: Graph, where: Where) -> list[Tensor | None]:
        """Wait for the gradients of the outputs and of the skips that left."""
        count = len(graph.outs) - len(stage.leaving)
        gradients: list[Tensor | None] = [None] * count
        if True in graph.promised[:count]:
            gradients = self.receive(self.relay.get((i, stage.j + 1), stage.j), stage, i, where)
        for key, promised in zip(stage.leaving, graph.promised[count:], strict=True):
            gradients += self.receive(self.relay.get((i, key), stage.j), stage, i, where) if promised else [None]
        return gradients

    def _task(self, stage: Stage, i: int, graph: Graph, gradients: list[Tensor | None], where: Where) -> None:
        # A graph that is built again need not be retained. What a stranger comes from is part of all micro-batches.
        retain = (self._keep and graph.checkpoint is None) or stage.has_strangers
        with CaughtGradients(self.stages[j].partition for j in range(graph.first, stage.j + 1)) as caught:
            of_ins, of_skips, of_parameters = graph.backward(gradients, retain=retain)
        where.end_layer()  # what is left to do, above all to add gradients up, is no layer's
        shared = graph.first != stage.j  # then the gradients may come from another device's stream
        if any(edge is not None for edge in graph.ins):
            source, target = self.stages[graph.first].device, self.stages[max(0, graph.first - 1)].device
            packet = Packet(of_ins, source, ready=ready(source, target, always=shared))
            self.relay.put((i, graph.first), packet, stage.j)
        for (key, _), gradient in zip(graph.arriving, of_skips, strict=True):
            source = self.stages[self.routes.target[key]].device
            target = self.stages[self.routes.source[key]].device
            packet = Packet([gradient], source, ready=ready(source, target, always=shared))
            self.relay.put((i, key), packet, stage.j)
        self._sums[stage.j].add(graph.parameters, of_parameters)
        if caught.parameters:
            self._sums[stage.j].add(caught.parameters, caught.gradients)
