"""The backward pass of a mini-batch: the workers run the graphs that the forward pass left, from the last to the first.

::

    mailbox (i, j) <── autograd.grad(local graph) <── mailbox (i, j + 1)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pipesight._torch.autograd import keeps_graph
from pipesight.context import Kept, Where
from pipesight.pipeline.gradients import GradientSum, OutputGradients, expect_no_gradient, silence_hooks
from pipesight.pipeline.local_graph import LocalGraph
from pipesight.pipeline.mailbox import Packet, ready
from pipesight.pipeline.minibatch import Pass, Tape
from pipesight.pipeline.partition import PlacedPartition
from pipesight.pipeline.randomness import begin_task, end_task
from pipesight.pipeline.reentrant_checkpoint import CaughtGradients
from pipesight.pipeline.skip import SkipKey
from pipesight.schedule.task_orders import B
from pipesight.schedule.worker_orders import gpipe_tasks

__all__ = ["run_backward"]


def run_backward(
    tape: Tape, outputs: OutputGradients, inputs_needed: Sequence[bool], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run the backward of a mini-batch; return the gradients of the inputs, then those of the parameters."""
    tape.minibatch.caller.refuse_inside()
    with tape.differentiating:
        if tape.spent:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the first backward freed what the "
                "pipeline's forward had kept. Specify retain_graph=True in the first one if you need a second"
            )
        backward: BackwardPass = (tape.backward_pass or BackwardPass)(tape, keep=keeps_graph())
        total = backward.run(outputs)
        needed = [a and b for a, b in zip(inputs_needed, tape.inputs_needed, strict=True)]
        gradients = [total.take(parameter) for parameter in parameters]
        expect_no_gradient(p for p, gradient in zip(parameters, gradients, strict=True) if gradient is None)
        of_inputs = backward.input_gradients(needed)
        total.accumulate()
        return [*of_inputs, *gradients]


class BackwardPass(Pass):
    """Runs the tasks of a mini-batch backward.

    With ``keep``, the tape is left as it is, for another backward.
    """

    def __init__(self, tape: Tape, *, keep: bool) -> None:
        minibatch = tape.minibatch
        tasks = len(minibatch.sizes) + minibatch.checkpoint_stop
        super().__init__(tape, tasks, minibatch.engine.workers.backward_pace)
        self._keep = keep
        self._graphs = tape.graphs
        self._sums = [GradientSum() for _ in self.partitions]
        self._checked: set[int] = set()  # the partitions whose weights are what they were

    def run(self, outputs: OutputGradients) -> GradientSum:
        """Take the gradients of the gathered outputs, and empty the list; return those of the parameters."""
        self.send_outputs(outputs)
        for parameters in self.tape.parameters:
            silence_hooks(parameters)
        self.tape.spent = True  # until all went well
        try:
            self.run_workers()
        except BaseException:
            self.tape.graphs = {}  # a new one: after a second interrupt, workers may still use the old one
            raise
        for partition in self.partitions:
            partition.new = False
        self.tape.note_versions(self.partitions)  # a layer may have changed its own weights when it was recomputed
        self.tape.spent = not self._keep
        return self.total()

    def total(self) -> GradientSum:
        """Return the gradients of all partitions, which may share parameters."""
        total, *others = self._sums
        for other in others:
            total.merge(other)
        return total

    def send_outputs(self, outputs: OutputGradients) -> None:
        """Split the gradients of the gathered outputs by micro-batch, and drop the originals."""
        sizes = zip(*self.tape.output_sizes, strict=True)
        pairs = zip(outputs.gradients, sizes, strict=True)
        parts = [[None] * self.m if gradient is None else gradient.split(size) for gradient, size in pairs]
        outputs.gradients.clear()
        device = self.partitions[-1].device
        for i in range(self.m):
            self.mailboxes.put((i, self.n), Packet([p[i] for p in parts], device, ready=outputs.ready), 0)

    def work(self, share: tuple[int, ...], where: Where) -> None:
        """Run all backward tasks of the partitions of one worker."""
        # Autograd would run the nodes of a GPU in its own thread. In the worker, it saves the switch between threads,
        # and hooks see the context.
        with torch.autograd.set_multithreading_enabled(False), CaughtGradients() as caught:
            for i, j in gpipe_tasks(B, self.m, share):
                graph = self._graphs.get((i, j)) if self._keep else self._graphs.pop((i, j), None)
                if graph is not None:
                    self._step(self.partitions[j], i, graph, where, caught)
                del graph  # hold nothing while waiting

    def _step(
        self, partition: PlacedPartition, i: int, graph: LocalGraph, where: Where, caught: CaughtGradients
    ) -> None:
        """Recompute if necessary, while the gradients may still be on their way; wait for them, and run backward."""
        self.recompute(partition, i, graph, where)
        gradients = self.receive_gradients(partition, i, graph, where)
        self.begin(where, partition, i, "backward", marks=graph.marks)
        where.gradients = functools.partial(self.held_gradients, partition.j)
        begin_task(self.minibatch.randomness, (i, partition.j, "backward"))
        try:
            self.minibatch.caller.run(self._run_task, partition, i, graph, gradients, where, caught)
        finally:
            end_task()
            self.end(where)

    def recompute(self, partition: PlacedPartition, i: int, graph: LocalGraph, where: Where) -> None:
        """Build the graph of a task again, if it was checkpointed."""
        checkpoint, inputs = graph.checkpoint, graph.inputs
        if checkpoint is None:
            return
        assert inputs is not None
        self.begin(where, partition, i, "recompute")
        try:
            checkpoint.check_inputs()
            self.check_weights(partition)
            given = inputs.safe_from(partition)
            partition.checkpointer.recompute(
                lambda checkpoint: self.call(partition, i, given, graph, checkpoint), checkpoint
            )
            where.kept = lambda: Kept(inputs.tensors, graph.outs)
        finally:
            self.end(where)
        graph.marks = where.marks
        if not self._keep:
            graph.checkpoint = graph.inputs = None

    def held_gradients(self, j: int) -> list[Tensor]:
        """Return the gradients that a partition holds between its tasks."""
        return self._sums[j].tensors()

    def check_weights(self, partition: PlacedPartition) -> None:
        """Raise if the weights of a partition are no longer those of its forward."""
        if partition.j not in self._checked:
            self._checked.add(partition.j)
            partition.check_weights(self.tape.parameters[partition.j], self.tape.versions[partition.j])

    def receive_gradients(
        self, partition: PlacedPartition, i: int, graph: LocalGraph, where: Where
    ) -> list[Tensor | None]:
        """Wait for the gradients of the outputs and of the skips that left."""
        mailboxes, j = self.mailboxes, partition.j
        count = len(graph.outs) - len(partition.leaving)
        gradients: list[Tensor | None] = [None] * count
        if True in graph.promised[:count]:
            gradients = self.receive(mailboxes.get((i, j + 1), j), partition, i, where)
        for key, promised in zip(partition.leaving, graph.promised[count:], strict=True):
            gradients += self.receive(mailboxes.get((i, key), j), partition, i, where) if promised else [None]
        return gradients

    def _run_task(
        self,
        partition: PlacedPartition,
        i: int,
        graph: LocalGraph,
        gradients: list[Tensor | None],
        where: Where,
        caught: CaughtGradients,
    ) -> None:
        """Run the local graph; send the gradients of its inputs back, and sum those of its parameters."""
        j, first = partition.j, graph.first
        caught.watch(self.partitions[first : j + 1])
        of_ins, of_skips, of_parameters = self.differentiate(partition, i, graph, gradients)
        of_reentrant = caught.take()
        where.end_layer()  # the rest, mainly summing gradients, belongs to no layer
        self.send_gradients(i, j, graph, of_ins, of_skips)
        self._sums[j].add(graph.parameters, of_parameters)
        if of_reentrant is not None:
            self._sums[j].add(*of_reentrant)

    def differentiate(
        self, partition: PlacedPartition, i: int, graph: LocalGraph, gradients: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs of a task, of the skips that arrived, and of the parameters."""
        # A graph that is built again need not be retained. All micro-batches share what outside leaves come from.
        retain = (self._keep and graph.checkpoint is None) or partition.uses_outside_leaves
        return graph.backward(gradients, retain=retain)

    def send_gradients(
        self,
        i: int,
        j: int,
        graph: LocalGraph,
        of_ins: list[Tensor | None],
        of_arriving: list[Tensor | None],
    ) -> None:
        """Send the gradients of a task's inputs to the partitions that they came from."""
        first = graph.first
        shared = first != j  # then the gradients may come from another device's stream
        if any(graph.ins):
            source, target = self.partitions[first].device, self.partitions[max(0, first - 1)].device
            packet = Packet(of_ins, source, ready=ready(source, target, always=shared))
            self.mailboxes.put((i, first), packet, j)
        for (key, _), gradient in zip(graph.arriving, of_arriving, strict=True):
            assert isinstance(key, SkipKey)
            source = self.partitions[self.routes.target[key]].device
            target = self.partitions[self.routes.source[key]].device
            packet = Packet([gradient], source, ready=ready(source, target, always=shared))
            self.mailboxes.put((i, key), packet, j)

    def input_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the inputs, concatenated over micro-batches, after `run`."""
        if not any(needed):
            return [None] * len(needed)
        packets = [self.mailboxes.get((i, 0), 0) for i in range(self.m)]
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
