"""The forward pass of a mini-batch: what the workers do with each task, and what they keep for backward.

::

    box (i, j) ──> enter ──> layers ──> detach ──> box (i, j + 1)
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipesight.context import Unrepeatable, Where
from pipesight.pipeline.aliasing import region_of
from pipesight.pipeline.checkpoint import changes_input
from pipesight.pipeline.mailbox import Packet
from pipesight.pipeline.microbatch import Form, lone
from pipesight.pipeline.passes import Pass
from pipesight.pipeline.task import Checkpoint, Graph, Inputs, Stage
from pipesight.pipeline.transfer import ready
from pipesight.schedule.gpipe_order import forward_tasks

if TYPE_CHECKING:
    from pipesight.pipeline.minibatch import MiniBatch

__all__ = ["ForwardPass"]


class ForwardPass(Pass):
    """Runs the tasks of a mini-batch forward, and leaves their graphs with it."""

    def __init__(self, minibatch: MiniBatch) -> None:
        super().__init__(minibatch, minibatch.m, minibatch.workers.forward_pace)
        self._grad, self._checkpoint_stop = minibatch.grad, minibatch.checkpoint_stop

    def run(self, inputs: list[Packet]) -> list[Packet]:
        """Run all micro-batches through all partitions; return the outputs of the last. ``inputs`` is emptied."""
        for i, packet in enumerate(inputs):
            self.relay.put((i, 0), packet, 0)
        inputs.clear()
        self.relay.run(self.minibatch.workers, self._work)
        return [self.relay.get((i, self.n), 0) for i in range(self.m)]

    def _work(self, partitions: tuple[int, ...], where: Where) -> None:
        """Do all that one worker has to do."""
        self.enter(where)
        stages = [self.stages[j] for j in partitions]
        for stage in stages if self._grad else ():
            self.parameters[stage.j] = stage.trainable()
            stage.changes_input = changes_input(stage.partition, stage.leaves_input)
        # A layer may differentiate something. Autograd's own threads are no help if one of them is the caller, who
        # waits for the layer.
        alone = self.surroundings.in_backward
        with (
            torch.set_grad_enabled(self._grad),
            torch.autograd.set_multithreading_enabled(False) if alone else contextlib.nullcontext(),
        ):
            for i, j in forward_tasks(self.m, partitions):
                self._step(self.stages[j], i, where)
        self.minibatch.note_versions(stages)

    def _step(self, stage: Stage, i: int, where: Where) -> None:
        """Wait for what a task needs, run it, and send its outputs on."""
        relay = self.relay
        packet = relay.get((i, stage.j), stage.j)
        regions = [region_of(t) for t in packet.tensors] if self._grad and packet.graph is None else []
        tensors = self.receive(packet, stage, i, where)
        graph: Graph | None = packet.graph
        # What comes as part of a graph is no root of it.
        needed = packet.needed if graph is None else [False] * len(packet.needed)
        inputs = Inputs(tensors, needed, len(tensors), packet.form, regions)
        for key in stage.arriving:
            packet = relay.get((i, key), stage.j)
            if self._grad and packet.graph is None:
                regions.append(region_of(packet.tensors[0]))
                self.minibatch.changes[i].check_skip(key.name, self.routes.source[key], regions[-1])
            inputs.tensors += self.receive(packet, stage, i, where)
            inputs.needed += packet.needed if packet.graph is None else [False]
        del packet, tensors, needed
        output, *leaving = self._task(stage, i, inputs, graph, where)
        for key, skip in zip(stage.leaving, leaving, strict=True):
            relay.put((i, key), skip, stage.j)
        relay.put((i, stage.j + 1), output, stage.j)

    def _task(self, stage: Stage, i: int, inputs: Inputs, graph: Graph | None, where: Where) -> list[Packet]:
        learns = graph is not None or True in inputs.needed or bool(self.parameters[stage.j])
        checkpointed = learns and graph is None and i < self._checkpoint_stop and stage.repeatable
        self.begin(where, stage, i, "forward", checkpointing=checkpointed)
        try:
            if checkpointed:
                try:
                    return self._run_checkpointed(stage, i, inputs)
                except Unrepeatable:
                    stage.repeatable = False
                    where.checkpointing = False
                    where.phase, where.repeating = "recompute", True
                    where.marks = []
            if self._grad and graph is None:
                graph = Graph(stage.j, marks=where.marks)
            return self._run_kept(stage, i, inputs, graph)
        finally:
            self.end(where)

    def _run_kept(self, stage: Stage, i: int, inputs: Inputs, graph: Graph | None) -> list[Packet]:
        """Run a task and keep its graph, if it has one."""
        given = inputs
        if graph is not None:
            # Micro-batches are views of one tensor: a change to one of them would count as a change to all.
            given = inputs.safe_from(stage, self.minibatch.input_storages)
        versions = given.versions()
        outputs, form = self.call(stage, i, given, graph)
        if graph is not None and inputs.regions:
            self._note_changes(stage, i, inputs, given, versions)
        if graph is not None and graph.first == stage.j and True not in inputs.needed and not any(graph.outs):
            graph = None  # nothing here gets a gradient
        if graph is not None and self.tokens[i].asked and stage.j < self.n - 1:
            return self._pack(stage, outputs, [_wants(t) for t in outputs], form, graph)
        return self._hand_on(stage, i, outputs, form, graph)

    def _run_checkpointed(self, stage: Stage, i: int, inputs: Inputs) -> list[Packet]:
        """Run a task, and keep what it takes to run it again.

        It has a graph like any other, which tells what leads where, and goes when the task ends. No more memory is
        needed for it than backward needs: then, too, one micro-batch has its activations and all have their inputs.
        """
        checkpoint = Checkpoint(inputs, inputs.versions(), stage.buffers.save(), {})
        graph = Graph(stage.j)
        given = inputs.safe_from(stage)
        versions = given.versions()
        try:
            outputs, form = self.call(stage, i, given, graph, saves=checkpoint)
        except Unrepeatable:
            stage.buffers.restore(checkpoint.buffers)
            raise
        stage.buffers.learn(checkpoint.buffers)
        if inputs.versions() != checkpoint.versions:
            raise RuntimeError(
                "a layer of a checkpointed partition changed the partition's input in place, so that it cannot be "
                "recomputed; give that layer an attribute inplace = True to have the input copied, or use "
                "checkpoint='never'"
            )
        self._note_changes(stage, i, inputs, given, versions)
        return self._hand_on(stage, i, outputs, form, graph, checkpoint)

    def _note_changes(self, stage: Stage, i: int, inputs: Inputs, given: Inputs, versions: list[int | None]) -> None:
        """Note what a task changed in place of ``inputs``, or of copies of them, which it was ``given``."""
        changed = [k for k, (now, before) in enumerate(zip(given.versions(), versions, strict=True)) if now != before]
        if changed:
            self.minibatch.changes[i].note(stage.j, inputs.regions, changed)
        elif given is not inputs:
            stage.leaves_input = True

    def _hand_on(
        self,
        stage: Stage,
        i: int,
        outputs: list[Tensor | None],
        form: Form,
        graph: Graph | None,
        checkpoint: Checkpoint | None = None,
    ) -> list[Packet]:
        """Keep the graph of a task, or what it takes to make it again; pack the outputs."""
        wanted = [graph is not None and _wants(t) for t in outputs]
        if graph is not None:
            self.parameters[stage.j] += self.minibatch.reach.note(i, stage, graph)
            if checkpoint is not None and True in wanted:
                graph = Graph(stage.j, checkpoint=checkpoint)
            graph.promised = wanted
            self.minibatch.graphs[i, stage.j] = graph
        return self._pack(stage, [None if t is None else t.detach() for t in outputs], wanted, form)

    def _pack(
        self, stage: Stage, outputs: list[Tensor | None], wanted: list[bool], form: Form, graph: Graph | None = None
    ) -> list[Packet]:
        """Pack the outputs of a task for the next partition, and each skip for the one that pops it."""
        count = len(outputs) - len(stage.leaving)
        target = self.stages[min(stage.j + 1, self.n - 1)].device
        event = ready(stage.device, target)
        packets = [Packet(outputs[:count], stage.device, wanted[:count], form, event, graph)]
        for key, tensor, want in zip(stage.leaving, outputs[count:], wanted[count:], strict=True):
            event = ready(stage.device, self.stages[self.routes.target[key]].device)
            packets.append(Packet([tensor], stage.device, [want], lone, event, graph))
        return packets


def _wants(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad
