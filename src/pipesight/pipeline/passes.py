"""A pass of one mini-batch over the workers: what forward and backward have in common."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor

from pipesight.context import Phase, Where
from pipesight.pipeline.mailbox import Packet, Relay
from pipesight.pipeline.microbatch import Form, as_tuple, form_of
from pipesight.pipeline.randomness import begin_task, end_task
from pipesight.pipeline.skip import SkipTracker, use_tracker
from pipesight.pipeline.task import Checkpoint, Graph, Inputs, Stage
from pipesight.pipeline.transfer import receive
from pipesight.pipeline.workers import Pace

if TYPE_CHECKING:
    from pipesight.pipeline.minibatch import MiniBatch

__all__ = ["Pass"]


class Pass:
    """One pass, forward or backward, and the relay that it runs on.

    Args:
        minibatch: What is on its way.
        tasks: How many tasks each partition has.
        pace: That of passes in this direction.
    """

    def __init__(self, minibatch: MiniBatch, tasks: int, pace: Pace) -> None:
        self.minibatch = minibatch
        self.stages, self.routes = minibatch.stages, minibatch.routes
        self.parameters = minibatch.parameters
        self.tokens, self.randomness, self.surroundings = minibatch.tokens, minibatch.randomness, minibatch.surroundings
        self.m, self.n = minibatch.m, minibatch.n
        boxes: list[Hashable] = [(i, j) for i in range(self.m) for j in range(self.n + 1)]
        boxes += [(i, key) for i in range(self.m) for key in self.routes.target]
        self.relay = Relay([stage.device for stage in self.stages], minibatch.streams, boxes, tasks, pace)

    def enter(self, where: Where) -> None:
        """Tell a worker what is the same in all tasks of this mini-batch."""
        minibatch = self.minibatch
        where.step, where.serial, where.samples = minibatch.step, minibatch.serial, sum(minibatch.sizes)
        where.microbatches, where.partitions = self.m, self.n
        where.checkpoint_stop = minibatch.checkpoint_stop

    def begin(
        self,
        where: Where,
        stage: Stage,
        i: int,
        phase: Phase,
        *,
        checkpointing: bool = False,
        marks: list[tuple[int, str]] | None = None,
    ) -> None:
        """Tell the worker and the observers that a task begins."""
        token = self.tokens[i]
        where.begin_task(phase, stage.j, i, stage.device, token, checkpointing=checkpointing, marks=marks)

    def end(self, where: Where) -> None:
        """Tell them that it has ended."""
        if self.relay.observers.members:
            self.relay.observers.task_ended(where)
        if sys.exception() is None:  # or else the note on the error needs it
            where.phase = None

    def receive(self, packet: Packet, stage: Stage, i: int, where: Where) -> list[Tensor | None]:
        """Return the tensors of a packet on the stage's device."""
        relay = self.relay
        if packet.device == stage.device or not relay.observers.members:
            return receive(packet, stage.device, relay.streams, stage.j, i)
        where.partition, where.microbatch = stage.j, i
        moved = [t for t in packet.tensors if t is not None and t.device == packet.device]
        details = (str(packet.device), str(stage.device), sum(t.nbytes for t in moved))
        relay.observers.transfer_started(where, *details)
        try:
            return receive(packet, stage.device, relay.streams, stage.j, i)
        finally:
            relay.observers.transfer_ended(where, *details)

    def call(
        self,
        stage: Stage,
        i: int,
        inputs: Inputs,
        graph: Graph | None = None,
        *,
        saves: Checkpoint | None = None,
        replays: Checkpoint | None = None,
    ) -> tuple[list[Tensor | None], Form]:
        """Call the partition, in forward or to recompute it, and let ``graph`` grow by it.

        Return its outputs, then the skips that leave it, and what makes a value like its output.
        """
        tensors = inputs.tensors
        if graph is not None:
            tensors = graph.begin(stage, inputs, self.parameters[stage.j])
        value = inputs.form(tensors[: inputs.count])
        leaving: list[Tensor | None] = []
        begin_task(self.randomness, (i, stage.j, "forward"), None if replays is None else replays.generators)
        try:
            if stage.skips:
                tracker = SkipTracker(dict(zip(stage.arriving, tensors[inputs.count :], strict=True)))
                with use_tracker(tracker):
                    output = self.surroundings.run(stage.partition, value)
                leaving = [tracker.pop(key) for key in stage.leaving]
            else:
                output = self.surroundings.run(stage.partition, value)
        finally:
            generators = end_task()
        if saves is not None:
            saves.generators = generators
        outputs: list[Tensor | None] = [*as_tuple(output, "the output of a partition"), *leaving]
        if graph is not None:
            graph.end(outputs)
        return outputs, form_of(output)
