"""The forward pass of a mini-batch: what the workers do with each task, and what they keep for backward.

::

    mailbox (i, j) ──> enter ──> layers ──> detach ──> mailbox (i, j + 1)
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from pipesight.context import Kept, Where
from pipesight.pipeline.aliasing import Changes, region_of
from pipesight.pipeline.checkpoint import Checkpoint, changes_input, versions_of
from pipesight.pipeline.local_graph import Inputs, LocalGraph
from pipesight.pipeline.mailbox import Packet, ready
from pipesight.pipeline.microbatch import Form, lone
from pipesight.pipeline.minibatch import Pass, Tape
from pipesight.pipeline.partition import PlacedPartition
from pipesight.schedule.task_orders import F
from pipesight.schedule.worker_orders import gpipe_tasks

__all__ = ["ForwardPass"]


class ForwardPass(Pass):
    """Runs the tasks of a mini-batch forward, and leaves their graphs on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape, len(tape.minibatch.sizes), tape.minibatch.engine.workers.forward_pace)
        self._grad = self.minibatch.grad
        self._changes = [Changes() for _ in self.minibatch.sizes]
        self._input_storages: set[int] = set()

    def run(self, microbatches: list[tuple[Tensor, ...]], form: Form) -> list[Packet]:
        """Run all micro-batches through all partitions; return the outputs of the last.

        ``microbatches`` is emptied, so that inputs can be freed as they are used. ``form`` makes of the tensors of one
        what the first layer takes.
        """
        self._input_storages = {t.untyped_storage().data_ptr() for t in microbatches[0]}
        for i, tensors in enumerate(microbatches):
            packet = Packet(list(tensors), self.partitions[0].device, list(self.tape.inputs_needed), form)
            self.mailboxes.put((i, 0), packet, 0)
        microbatches.clear()
        del tensors, packet
        self.run_workers()
        outputs = [self.mailboxes.get((i, self.n), 0) for i in range(self.m)]
        sizes = [[t.size(0) if t is not None and t.dim() else 0 for t in output.tensors] for output in outputs]
        self.tape.output_sizes = sizes
        return outputs

    def work(self, share: tuple[int, ...], where: Where) -> None:
        """Run all forward tasks of the partitions of one worker."""
        partitions = [self.partitions[j] for j in share]
        for partition in partitions if self._grad else ():
            self.tape.parameters[partition.j] = partition.trainable()
            partition.changes_input = changes_input(partition.layers, partition.leaves_input)
        # A layer may differentiate something. That must not need autograd's own threads if one of them is the caller,
        # which waits for the layer.
        alone = self.minibatch.caller.in_backward
        with (
            torch.set_grad_enabled(self._grad),
            torch.autograd.set_multithreading_enabled(False) if alone else contextlib.nullcontext(),
        ):
            for i, j in gpipe_tasks(F, self.m, share):
                self._step(self.partitions[j], i, where)
        self.tape.note_versions(partitions)

    def _step(self, partition: PlacedPartition, i: int, where: Where) -> None:
        """Wait for what a task needs, run it, and send its outputs on."""
        mailboxes, j = self.mailboxes, partition.j
        packet = mailboxes.get((i, j), j)
        # Memory is shared with another input, or with a skip on its way.
        shared = self._grad and packet.graph is None and (len(packet.tensors) > 1 or bool(self.routes.target))
        regions = [region_of(t) for t in packet.tensors] if shared else []
        tensors = self.receive(packet, partition, i, where)
        graph: LocalGraph | None = packet.graph
        # What arrives as part of a graph is not a root of it.
        needed = packet.needed if graph is None else [False] * len(packet.needed)
        inputs = Inputs(tensors, needed, len(tensors), packet.form, regions)
        for key in partition.arriving:
            packet = mailboxes.get((i, key), j)
            if self._grad and packet.graph is None:
                regions.append(region_of(packet.tensors[0]))
                self._changes[i].check_skip(key.name, self.routes.source[key], regions[-1])
            inputs.tensors += self.receive(packet, partition, i, where)
            inputs.needed += packet.needed if packet.graph is None else [False]
        del packet, tensors, needed
        output, *leaving = self._run_task(partition, i, inputs, graph, where)
        for key, skip in zip(partition.leaving, leaving, strict=True):
            mailboxes.put((i, key), skip, j)
        mailboxes.put((i, j + 1), output, j)

    def _run_task(
        self, partition: PlacedPartition, i: int, inputs: Inputs, graph: LocalGraph | None, where: Where
    ) -> list[Packet]:
        learns = graph is not None or True in inputs.needed or bool(self.tape.parameters[partition.j])
        checkpointed = learns and graph is None and i < self.minibatch.checkpoint_stop
        checkpointed = checkpointed and partition.checkpointer.allowed
        self.begin(where, partition, i, "forward", checkpointing=checkpointed)
        try:
            if checkpointed:
                packets = self._run_checkpointed(partition, i, inputs, where)
                if packets is not None:
                    where.kept = functools.partial(Kept, inputs.tensors)
                    return packets
            if self._grad and graph is None:
                graph = LocalGraph(partition.j, marks=where.marks)
            packets = self._run_kept(partition, i, inputs, graph)
            if graph is not None:
                where.kept = functools.partial(Kept, inputs.tensors, graph.outs)
            return packets
        finally:
            self.end(where)

    def _run_checkpointed(
        self, partition: PlacedPartition, i: int, inputs: Inputs, where: Where
    ) -> list[Packet] | None:
        """Run a task and keep what is needed to run it again; return ``None`` if it cannot be repeated.

        It builds a graph, to see which outputs depend on what, and frees it when the task ends. Peak memory does not
        grow: backward, too, holds the activations of one micro-batch and the inputs of all.
        """
        graph = LocalGraph(partition.j)
        given = inputs.safe_from(partition)
        versions = versions_of(given.tensors)
        result = partition.checkpointer.forward(
            lambda checkpoint: self.call(partition, i, given, graph, checkpoint),
            inputs.tensors,
            where,
            changed="a layer of a checkpointed partition changed the partition's input in place, so that it cannot be "
            "recomputed; give that layer an attribute inplace = True to have the input copied, or use "
            "checkpoint='never'",
        )
        if result is None:
            return None
        (outputs, form), checkpoint = result
        self._note_changes(partition, i, inputs, given, versions)
        return self._hand_on(partition, i, outputs, form, graph, inputs, checkpoint)

    def _run_kept(self, partition: PlacedPartition, i: int, inputs: Inputs, graph: LocalGraph | None) -> list[Packet]:
        """Run a task and keep its graph, if it has one."""
        given = inputs
        if graph is not None:
            # Micro-batches are views of one tensor: a change to one of them would count as a change to all.
            given = inputs.safe_from(partition, self._input_storages)
        watched = graph is not None and (given is not inputs or bool(inputs.regions))
        versions = versions_of(given.tensors) if watched else []
        outputs, form = self.call(partition, i, given, graph)
        if watched:
            self._note_changes(partition, i, inputs, given, versions)
        if graph is not None and graph.first == partition.j and True not in inputs.needed and not any(graph.outs):
            graph = None  # nothing here gets a gradient
        if graph is not None and self.minibatch.tokens[i].asked and partition.j < self.n - 1:
            return self._pack(partition, outputs, graph.wanted(), form, graph)
        return self._hand_on(partition, i, outputs, form, graph)

    def _note_changes(
        self, partition: PlacedPartition, i: int, inputs: Inputs, given: Inputs, versions: list[int | None]
    ) -> None:
        """Note what a task changed in place of ``inputs``, or of copies of them, which it was ``given``."""
        pairs = zip(versions_of(given.tensors), versions, strict=True)
        changed = [k for k, (now, before) in enumerate(pairs) if now != before]
        if not changed:
            partition.leaves_input |= given is not inputs
        elif inputs.regions:
            self._changes[i].note(partition.j, inputs.regions, changed)

    def _hand_on(
        self,
        partition: PlacedPartition,
        i: int,
        outputs: list[Tensor | None],
        form: Form,
        graph: LocalGraph | None,
        inputs: Inputs | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> list[Packet]:
        """Keep the graph of a task, or what it takes to build it again; pack the outputs."""
        wanted = [False] * len(outputs) if graph is None else graph.wanted()
        if graph is not None:
            self.tape.parameters[partition.j] += self.tape.dependencies.note(i, partition, graph)
            if checkpoint is not None and True in wanted:
                graph = LocalGraph(partition.j, checkpoint=checkpoint, inputs=inputs)
            graph.promised = wanted
            self.tape.graphs[i, partition.j] = graph
        return self._pack(partition, [None if t is None else t.detach() for t in outputs], wanted, form)

    def _pack(
        self,
        partition: PlacedPartition,
        outputs: list[Tensor | None],
        wanted: list[bool],
        form: Form,
        graph: LocalGraph | None = None,
    ) -> list[Packet]:
        """Pack the outputs of a task for the next partition, and each skip for the one that pops it."""
        count = len(outputs) - len(partition.leaving)
        target = self.partitions[min(partition.j + 1, self.n - 1)].device
        event = ready(partition.device, target)
        packets = [Packet(outputs[:count], partition.device, wanted[:count], form, event, graph)]
        for key, tensor, want in zip(partition.leaving, outputs[count:], wanted[count:], strict=True):
            event = ready(partition.device, self.partitions[self.routes.target[key]].device)
            packets.append(Packet([tensor], partition.device, [want], lone, event, graph))
        return packets
