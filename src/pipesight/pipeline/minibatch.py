"""One mini-batch on its way through the partitions: forward, and later backward, on the workers.

A task (i, j) runs micro-batch i through partition j, in the partition's worker. Each task has an autograd graph of its
own: its inputs are made roots of that graph (`tie.enter`), and its outputs go on detached. In backward, the task waits
for the gradients of the outputs, runs the local graph, and sends the gradients of the inputs to partition j - 1::

    forward    box (i, j) ──> enter ──> layers ──> detach ──> box (i, j + 1)
    backward   box (i, j) <── autograd.grad(local graph) <─── box (i, j + 1)

Skips that cross partitions are more outputs of one task and more inputs of another, with boxes (i, key).
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from pipesight.context import MicrobatchToken, Phase, Unrepeatable, Where
from pipesight.pipeline.checkpoint import changes_input
from pipesight.pipeline.gradients import GradientSum, silence_hooks
from pipesight.pipeline.microbatch import Form, as_tuple, form_of, lone
from pipesight.pipeline.partition import SkipRoutes
from pipesight.pipeline.randomness import PassRandomness, begin_task, end_task
from pipesight.pipeline.relay import Packet, Relay
from pipesight.pipeline.schedule import backward_tasks, forward_tasks
from pipesight.pipeline.skip import SkipTracker, use_tracker
from pipesight.pipeline.surroundings import Surroundings
from pipesight.pipeline.task import Checkpoint, Graph, Inputs, Stage
from pipesight.pipeline.transfer import Streams, ready, receive
from pipesight.pipeline.worker import Pace, Workers

__all__ = ["MiniBatch"]

_serials = itertools.count(1)


class MiniBatch:
    """One mini-batch: `forward` once, then `accept` and `backward`, once or, if the graph is retained, again."""

    def __init__(
        self,
        stages: Sequence[Stage],
        routes: SkipRoutes,
        workers: Workers,
        microbatches: Sequence[tuple[Tensor, ...]],
        inputs_needed: Sequence[bool],
        *,
        form: Form,
        checkpoint_stop: int,
        step: int,
    ) -> None:
        self._stages, self._routes, self._workers = stages, routes, workers
        self._m, self._n = len(microbatches), len(stages)
        self._step, self._serial = step, next(_serials)
        self._grad = torch.is_grad_enabled()
        self._checkpoint_stop = checkpoint_stop if self._grad else 0
        self._sizes = [tensors[0].size(0) for tensors in microbatches]
        self._inputs = [
            Packet(list(tensors), stages[0].device, [self._grad and need for need in inputs_needed], form)
            for tensors in microbatches
        ]
        self._input_storages = {t.untyped_storage().data_ptr() for t in microbatches[0]}
        self._tokens = [MicrobatchToken(i) for i in range(self._m)]
        self._randomness = PassRandomness()
        self._surroundings = Surroundings(workers)
        self._streams = Streams([stage.device for stage in stages])
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._surveyed: set[int] = set()  # the partitions of which one graph has been looked over
        self._latecomers: list[list[Tensor]] = [[] for _ in stages]
        self._output_gradients: dict[int, list[Packet]] = {}
        self._differentiating = threading.Lock()
        self._spent = False
        self.parameters: list[list[Tensor]] = [[] for _ in stages]
        """The tensors of each partition that get gradients; `forward` finds them."""
        self._versions: list[list[int]] = [[] for _ in stages]

    def forward(self) -> list[Packet]:
        """Run all micro-batches through all partitions; return the outputs of the last."""
        relay = self._relay(self._m, self._workers.forward_pace)
        for i, packet in enumerate(self._inputs):
            relay.put((i, 0), packet, 0)
        self._inputs.clear()
        relay.run(self._workers, functools.partial(self._forward_pass, relay))
        outputs = [relay.get((i, self._n), 0) for i in range(self._m)]
        self._output_sizes = [[t.size(0) if t is not None and t.dim() else 0 for t in o.tensors] for o in outputs]
        return outputs

    def accept(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of the gathered outputs."""
        sizes = zip(*self._output_sizes, strict=True)
        parts = [[None] * self._m if g is None else g.split(size) for g, size in zip(gradients, sizes, strict=True)]
        device = self._stages[-1].device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        # Several threads may differentiate one output: what belongs together has autograd's number of the run.
        run = torch._C._current_graph_task_id()
        self._output_gradients[run] = [Packet([p[i] for p in parts], device, ready=ready) for i in range(self._m)]

    def backward(self, inputs_needed: Sequence[bool]) -> list[Tensor | None]:
        """Run backward on the workers; return the gradients of the inputs, then those of the parameters."""
        self._surroundings.refuse_inside()
        with self._differentiating:
            return self._backward(self._output_gradients.pop(torch._C._current_graph_task_id()), inputs_needed)

    def _backward(self, output_gradients: list[Packet], inputs_needed: Sequence[bool]) -> list[Tensor | None]:
        if self._spent:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the first backward freed what GPipe's forward "
                "had kept. Specify retain_graph=True in the first one if you need a second"
            )
        self._keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        self._spent = True  # until all went well
        relay = self._relay(self._m + self._checkpoint_stop, self._workers.backward_pace)
        for i, packet in enumerate(output_gradients):
            relay.put((i, self._n), packet, 0)
        output_gradients.clear()
        for parameters in self.parameters:
            silence_hooks(parameters)
        self._checked: set[int] = set()  # the partitions whose weights are what they were
        sums = [GradientSum() for _ in self._stages]
        try:
            relay.run(self._workers, functools.partial(self._backward_pass, relay, sums, self._graphs))
        except BaseException:
            self._graphs = {}  # not emptied: after a second interrupt, workers may still be at it
            raise
        for stage in self._stages:
            stage.new = False
        self._note_versions(self._stages)  # a layer may have changed its own weights when it was recomputed
        self._spent = not self._keep
        for other in sums[1:]:
            sums[0].merge(other)
        for leaf in itertools.chain(*self._latecomers):
            # Forward did not see that a layer uses it, so it is no input of ours in the caller's graph this time.
            if (gradient := sums[0].take(leaf)) is not None:
                torch.autograd.backward([leaf], [gradient])
        gradients = self._input_gradients(relay, inputs_needed)
        gradients += [sums[0].take(parameter) for parameters in self.parameters for parameter in parameters]
        return gradients

    def _relay(self, tasks: int, pace: Pace) -> Relay:
        boxes: list[Hashable] = [(i, j) for i in range(self._m) for j in range(self._n + 1)]
        boxes += [(i, key) for i in range(self._m) for key in self._routes.target]
        return Relay([stage.device for stage in self._stages], self._streams, boxes, tasks, pace)

    def _input_gradients(self, relay: Relay, needed: Sequence[bool]) -> list[Tensor | None]:
        if not any(needed):
            return [None] * len(needed)
        packets = [relay.get((i, 0), 0) for i in range(self._m)]
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
                        for part, size in zip(parts, self._sizes, strict=True)
                    ]
                )
            )
        return gathered

    # Forward, in a worker.

    def _forward_pass(self, relay: Relay, partitions: tuple[int, ...], where: Where) -> None:
        self._enter(where)
        stages = [self._stages[j] for j in partitions]
        for stage in stages if self._grad else ():
            self.parameters[stage.j] = stage.trainable()
            stage.changes_input = changes_input(stage.partition)
        with torch.set_grad_enabled(self._grad):
            for i, j in forward_tasks(self._m, partitions):
                self._forward_step(relay, self._stages[j], i, where)
        self._note_versions(stages)

    def _note_versions(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            self._versions[stage.j] = [parameter._version for parameter in self.parameters[stage.j]]

    def _forward_step(self, relay: Relay, stage: Stage, i: int, where: Where) -> None:
        """Wait for what a task needs, run it, and send its outputs on."""
        packet = relay.get((i, stage.j), stage.j)
        tensors = self._receive(relay, packet, stage, i, where)
        graph: Graph | None = packet.graph
        # What comes as part of a graph is no root of it.
        needed = packet.needed if graph is None else [False] * len(packet.needed)
        inputs = Inputs(tensors, needed, len(tensors), packet.form)
        for key in stage.arriving:
            packet = relay.get((i, key), stage.j)
            inputs.tensors += self._receive(relay, packet, stage, i, where)
            inputs.needed += packet.needed if packet.graph is None else [False]
        del packet, tensors, needed
        output, *leaving = self._forward_task(relay, stage, i, inputs, graph, where)
        for key, skip in zip(stage.leaving, leaving, strict=True):
            relay.put((i, key), skip, stage.j)
        relay.put((i, stage.j + 1), output, stage.j)

    def _forward_task(
        self, relay: Relay, stage: Stage, i: int, inputs: Inputs, graph: Graph | None, where: Where
    ) -> list[Packet]:
        learns = graph is not None or True in inputs.needed or bool(self.parameters[stage.j])
        checkpointed = learns and graph is None and i < self._checkpoint_stop and stage.repeatable
        self._begin(relay, where, stage, i, "forward", checkpointing=checkpointed)
        try:
            if checkpointed:
                try:
                    return self._forward_checkpointed(stage, i, inputs)
                except Unrepeatable:
                    stage.repeatable = False
                    where.checkpointing = False
                    where.phase, where.repeating = "recompute", True
                    where.marks = []
            if self._grad and graph is None:
                graph = Graph(stage.j, marks=where.marks)
            return self._forward_kept(stage, i, inputs, graph)
        finally:
            self._end(relay, where)

    def _forward_kept(self, stage: Stage, i: int, inputs: Inputs, graph: Graph | None) -> list[Packet]:
        """Run a task and keep its graph, if it has one."""
        if graph is not None:
            # Micro-batches are views of one tensor: a change to one of them would count as a change to all.
            inputs = inputs.safe_from(stage, self._input_storages)
        outputs, form = self._call(stage, i, inputs, graph)
        if graph is not None and graph.first == stage.j and True not in inputs.needed and not any(graph.outs):
            graph = None  # nothing here gets a gradient
        if graph is not None and (stage.new or stage.j not in self._surveyed):
            self._surveyed.add(stage.j)
            self.parameters[stage.j] += stage.meet_strangers(graph)
        wanted = [graph is not None and t is not None and t.requires_grad for t in outputs]
        if graph is not None and self._tokens[i].asked and stage.j < self._n - 1:
            return self._pack(stage, outputs, wanted, form, graph)
        if graph is not None:
            graph.promised = wanted
            self._graphs[i, stage.j] = graph
        return self._pack(stage, [None if t is None else t.detach() for t in outputs], wanted, form)

    def _forward_checkpointed(self, stage: Stage, i: int, inputs: Inputs) -> list[Packet]:
        """Run a task without a graph, and keep what it takes to run it again."""
        checkpoint = Checkpoint(inputs, inputs.versions(), stage.buffers.save(), {})
        try:
            with torch.no_grad():
                outputs, form = self._call(stage, i, inputs.safe_from(stage), saves=checkpoint)
        except Unrepeatable:
            stage.buffers.restore(checkpoint.buffers)
            raise
        stage.buffers.learn(checkpoint.buffers)
        if inputs.versions() != checkpoint.versions:
            raise RuntimeError(
                "a layer of a checkpointed partition changed the partition's input in place, so that it cannot be "
                "recomputed; give the first layer an attribute inplace = True to have the input copied, or use "
                "checkpoint='never'"
            )
        # Without a graph, any output that could get a gradient may get one.
        wanted = [t is not None and (t.is_floating_point() or t.is_complex()) and not inputs.passes(t) for t in outputs]
        self._graphs[i, stage.j] = Graph(stage.j, promised=wanted, checkpoint=checkpoint)
        return self._pack(stage, outputs, wanted, form)

    def _call(
        self,
        stage: Stage,
        i: int,
        inputs: Inputs,
        graph: Graph | None = None,
        *,
        saves: Checkpoint | None = None,
        replays: Checkpoint | None = None,
    ) -> tuple[list[Tensor | None], Form]:
        """Call the partition and let ``graph`` grow by it.

        Return its outputs, then the skips that leave it, and what makes a value like its output.
        """
        tensors = inputs.tensors
        if graph is not None:
            tensors = graph.begin(stage, inputs, self.parameters[stage.j] + self._latecomers[stage.j])
        value = inputs.form(tensors[: inputs.count])
        leaving: list[Tensor | None] = []
        begin_task(self._randomness, (i, stage.j, "forward"), None if replays is None else replays.generators)
        try:
            if stage.skips:
                tracker = SkipTracker(dict(zip(stage.arriving, tensors[inputs.count :], strict=True)))
                with use_tracker(tracker):
                    output = self._surroundings.run(stage.partition, value)
                leaving = [tracker.pop(key) for key in stage.leaving]
            else:
                output = self._surroundings.run(stage.partition, value)
        finally:
            generators = end_task()
        if saves is not None:
            saves.generators = generators
        outputs: list[Tensor | None] = [*as_tuple(output, "the output of a partition"), *leaving]
        if graph is not None:
            graph.end(outputs)
        return outputs, form_of(output)

    def _pack(
        self, stage: Stage, outputs: list[Tensor | None], wanted: list[bool], form: Form, graph: Graph | None = None
    ) -> list[Packet]:
        """Pack the outputs of a task for the next partition, and each skip for the one that pops it."""
        count = len(outputs) - len(stage.leaving)
        target = self._stages[min(stage.j + 1, self._n - 1)].device
        event = ready(stage.device, target)
        packets = [Packet(outputs[:count], stage.device, wanted[:count], form, event, graph)]
        for key, tensor, want in zip(stage.leaving, outputs[count:], wanted[count:], strict=True):
            event = ready(stage.device, self._stages[self._routes.target[key]].device)
            packets.append(Packet([tensor], stage.device, [want], lone, event, graph))
        return packets

    # Backward, in a worker.

    def _backward_pass(
        self,
        relay: Relay,
        sums: list[GradientSum],
        graphs: dict[tuple[int, int], Graph],
        partitions: tuple[int, ...],
        where: Where,
    ) -> None:
        self._enter(where)
        # Autograd would hand the nodes of a GPU to a thread of its own. Here it stays in the worker, which saves the
        # way there and back, and lets hooks see where they are.
        with torch.autograd.set_multithreading_enabled(False):
            for i, j in backward_tasks(self._m, partitions):
                graph = graphs.get((i, j)) if self._keep else graphs.pop((i, j), None)
                if graph is not None:
                    self._backward_step(relay, self._stages[j], i, graph, sums[j], where)
                del graph  # hold nothing while waiting

    def _backward_step(
        self, relay: Relay, stage: Stage, i: int, graph: Graph, total: GradientSum, where: Where
    ) -> None:
        """Recompute if need be, while the gradients may still be on their way, wait for them, and run backward."""
        if graph.checkpoint is not None:
            self._recompute(relay, stage, i, graph, where)
        gradients = self._receive_gradients(relay, stage, i, graph, where)
        self._begin(relay, where, stage, i, "backward", marks=graph.marks)
        begin_task(self._randomness, (i, stage.j, "backward"))
        try:
            self._surroundings.run(self._backward_task, relay, stage, i, graph, gradients, total)
        finally:
            end_task()
            self._end(relay, where)

    def _recompute(self, relay: Relay, stage: Stage, i: int, graph: Graph, where: Where) -> None:
        checkpoint = graph.checkpoint
        assert checkpoint is not None
        self._begin(relay, where, stage, i, "recompute")
        resume = stage.buffers.replay(checkpoint.buffers)
        try:
            checkpoint.check()
            if stage.j not in self._checked:
                self._checked.add(stage.j)
                stage.check_weights(self.parameters[stage.j], self._versions[stage.j])
            with torch.enable_grad():
                self._call(stage, i, checkpoint.inputs.safe_from(stage), graph, replays=checkpoint)
        finally:
            resume()
            self._end(relay, where)
        graph.marks = where.marks
        if stage.new or stage.j not in self._surveyed:
            self._surveyed.add(stage.j)
            self._latecomers[stage.j] += stage.meet_strangers(graph)
            silence_hooks(self._latecomers[stage.j])
        if not self._keep:
            graph.checkpoint = None

    def _receive_gradients(self, relay: Relay, stage: Stage, i: int, graph: Graph, where: Where) -> list[Tensor | None]:
        """Wait for the gradients of the outputs and of the skips that left."""
        count = len(graph.outs) - len(stage.leaving)
        gradients: list[Tensor | None] = [None] * count
        if True in graph.promised[:count]:
            gradients = self._receive(relay, relay.get((i, stage.j + 1), stage.j), stage, i, where)
        for key, promised in zip(stage.leaving, graph.promised[count:], strict=True):
            gradients += self._receive(relay, relay.get((i, key), stage.j), stage, i, where) if promised else [None]
        return gradients

    def _backward_task(
        self,
        relay: Relay,
        stage: Stage,
        i: int,
        graph: Graph,
        gradients: list[Tensor | None],
        total: GradientSum,
    ) -> None:
        # A graph that is built again need not be retained. What a stranger comes from is part of all micro-batches.
        retain = (self._keep and graph.checkpoint is None) or stage.has_strangers
        of_ins, of_skips, of_parameters = graph.backward(gradients, retain=retain)
        shared = graph.first != stage.j  # then the gradients may come from another device's stream
        if any(edge is not None for edge in graph.ins):
            source, target = self._stages[graph.first].device, self._stages[max(0, graph.first - 1)].device
            relay.put((i, graph.first), Packet(of_ins, source, ready=ready(source, target, always=shared)), stage.j)
        for (key, _), gradient in zip(graph.arriving, of_skips, strict=True):
            source = self._stages[self._routes.target[key]].device
            target = self._stages[self._routes.source[key]].device
            relay.put((i, key), Packet([gradient], source, ready=ready(source, target, always=shared)), stage.j)
        total.add(graph.parameters, of_parameters)

    # Both.

    def _receive(self, relay: Relay, packet: Packet, stage: Stage, i: int, where: Where) -> list[Tensor | None]:
        """Return the tensors of a packet on the stage's device."""
        if packet.device == stage.device or not relay.observers.members:
            return receive(packet, stage.device, relay.streams, stage.j, i)
        where.partition, where.microbatch = stage.j, i
        moved = [t for t in packet.tensors if t is not None and t.device == packet.device]
        details = (str(packet.device), str(stage.device), sum(t.nbytes for t in moved))
        relay.observers.tell("transfer_started", where, *details)
        try:
            return receive(packet, stage.device, relay.streams, stage.j, i)
        finally:
            relay.observers.tell("transfer_ended", where, *details)

    def _enter(self, where: Where) -> None:
        """Tell a worker what is the same in all tasks of this mini-batch."""
        where.step, where.serial = self._step, self._serial
        where.microbatches, where.partitions = self._m, self._n
        where.checkpoint_stop = self._checkpoint_stop

    def _begin(
        self,
        relay: Relay,
        where: Where,
        stage: Stage,
        i: int,
        phase: Phase,
        *,
        checkpointing: bool = False,
        marks: list[tuple[int, str]] | None = None,
    ) -> None:
        where.partition, where.device = stage.j, stage.device
        where.microbatch, where.token = i, self._tokens[i]
        where.checkpointing = checkpointing
        where.layer = None
        where.marks = [] if marks is None else marks
        where.repeating = False
        where.phase = phase
        if relay.observers.members:
            relay.observers.tell("task_started", where)

    def _end(self, relay: Relay, where: Where) -> None:
        if relay.observers.members:
            if where.phase == "backward" and where.layer is not None:
                relay.observers.tell("layer_ended", where)
            relay.observers.tell("task_ended", where)
        if sys.exception() is None:  # or else the note on the error needs it
            where.phase = None
