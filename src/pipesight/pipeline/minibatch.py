"""One mini-batch on its way through the partitions: what its tasks share, and how a pass runs them on the workers.

A task (i, j) runs micro-batch i through partition j, in the partition's worker. Each has an autograd graph of its own
(`local_graph`). In backward, the task waits for the gradients of its outputs, runs that graph, and sends the gradients
of its inputs to partition j - 1::

    forward    mailbox (i, j) ──> enter ──> layers ──> detach ──> mailbox (i, j + 1)
    backward   mailbox (i, j) <── autograd.grad(local graph) <─── mailbox (i, j + 1)

Skips that cross partitions are more outputs of one task and more inputs of another, in mailboxes (i, key). What a task
does in either pass is in `forward` and `backward`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesight import context
from pipesight.context import MicrobatchToken, Phase, Where
from pipesight.pipeline.caller_state import CallerState
from pipesight.pipeline.checkpoint import Checkpoint, run_layers
from pipesight.pipeline.dependencies import Dependencies
from pipesight.pipeline.local_graph import Inputs, LocalGraph
from pipesight.pipeline.mailbox import AbortedError, Mailboxes, Packet, Streams, receive
from pipesight.pipeline.microbatch import Form, as_tuple, form_of
from pipesight.pipeline.partition import PlacedPartition, SkipRoutes
from pipesight.pipeline.randomness import PassRandomness, isolated
from pipesight.pipeline.skip import SkipTracker
from pipesight.pipeline.workers import Job, Pace, Threads, Workers, annotate

__all__ = ["Engine", "MiniBatch", "Pass", "Tape", "next_serial"]

next_serial = itertools.count(1).__next__
"""Returns a number for each mini-batch of the process, whichever engine runs it."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs the partitions of a model, for all its mini-batches."""

    partitions: list[PlacedPartition]
    routes: SkipRoutes
    workers: Workers


class MiniBatch:
    """What all tasks of one mini-batch know.

    Micro-batches below ``checkpoint_stop`` are checkpointed, if gradients are wanted at all.
    """

    def __init__(
        self, engine: Engine, caller: CallerState, sizes: Sequence[int], *, checkpoint_stop: int, step: int
    ) -> None:
        self.engine, self.caller, self.sizes = engine, caller, sizes
        self.step, self.serial = step, next_serial()
        self.grad = torch.is_grad_enabled()
        self.checkpoint_stop = checkpoint_stop if self.grad else 0
        self.tokens = [MicrobatchToken(i) for i in range(len(sizes))]
        self.randomness = PassRandomness()
        self.streams = Streams([partition.device for partition in engine.partitions])


class Tape:
    """What the forward of a mini-batch leaves for its backward."""

    backward_pass: Any = None
    """The class of its backward, if not `BackwardPass`."""

    def __init__(self, minibatch: MiniBatch, inputs_needed: Sequence[bool]) -> None:
        self.minibatch = minibatch
        self.inputs_needed = [minibatch.grad and need for need in inputs_needed]
        self.graphs: dict[tuple[int, int], LocalGraph] = {}
        self.dependencies = Dependencies(len(inputs_needed))
        self.parameters: list[list[Tensor]] = [[] for _ in minibatch.engine.partitions]
        """The tensors of each partition that get gradients."""
        self.versions: list[list[int]] = [[] for _ in minibatch.engine.partitions]
        """Those of the parameters."""
        self.output_sizes: list[list[int]] = []
        """How many samples each output of each micro-batch has."""
        self.spent = False
        """A backward has freed what was kept."""
        self.differentiating = threading.Lock()

    def used(self) -> tuple[set[int], list[Tensor]]:
        """Return what the outputs depend on: the positions of inputs, and the parameters."""
        inputs, used = self.dependencies.of_outputs(
            len(self.minibatch.sizes), len(self.parameters), len(self.output_sizes[0])
        )
        found = {id(p): p for parameters in self.parameters for p in parameters if id(p) in used}
        return inputs, list(found.values())

    def note_versions(self, partitions: Iterable[PlacedPartition]) -> None:
        """Note the versions of the parameters of some partitions as they are now."""
        for partition in partitions:
            self.versions[partition.j] = [parameter._version for parameter in self.parameters[partition.j]]


class Pass:
    """One pass of a mini-batch over the workers, forward or backward: what both have in common."""

    def __init__(self, tape: Tape, tasks: int, pace: Pace) -> None:
        self.tape, self.minibatch = tape, tape.minibatch
        engine = tape.minibatch.engine
        self.partitions, self.routes = engine.partitions, engine.routes
        self.m, self.n = len(tape.minibatch.sizes), len(engine.partitions)
        self.mailboxes = Mailboxes(self.boxes(), self.n)
        self.observers = context.observers()
        self._tasks, self._pace, self._busiest = tasks, pace, 0.0
        self._intra_op_threads = 1
        self._failing = threading.Lock()
        self._failure: BaseException | None = None

    def boxes(self) -> Iterable[Hashable]:
        """Return the mailboxes of the pass."""
        return itertools.product(range(self.m), [*range(self.n + 1), *self.routes.target])

    def run_workers(self) -> None:
        """Let each worker do its share of the pass; raise the first exception of any of them."""
        workers, streams = self.minibatch.engine.workers, self.minibatch.streams
        began = time.perf_counter()
        in_turns = self._pace.in_turns and all(stream is None for stream in streams.compute)
        if in_turns:
            self.mailboxes.take_turns(began + Pace.BRIEF * self._tasks * self.n)
        self.run_jobs(workers, [functools.partial(self._job, share) for share in workers.shares])
        average = (time.perf_counter() - began) / (self._tasks * self.n)
        self._pace.learn(max(average, self._busiest / self._tasks), in_turns=in_turns)

    def run_jobs(self, threads: Threads, jobs: Sequence[Job]) -> None:
        """Run jobs in threads, under the observers; raise the first exception that any of them passed to `fail`."""
        streams = self.minibatch.streams
        # Partitions on the CPU share the caller's intra-op threads; each thread keeps a count of its own.
        self._intra_op_threads = max(1, torch.get_num_threads() // max(1, self.cpu_workers()))
        streams.follow_caller()
        self.observers.pass_started()
        try:
            threads.run(jobs, self.mailboxes.abort)
        finally:
            self.observers.pass_ended()
            streams.lead_caller()
            if None in streams.compute:
                # The last count set anywhere is the default of threads to come.
                torch.set_num_threads(torch.get_num_threads())
            failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame

    def cpu_workers(self) -> int:
        """Return how many threads compute on the CPU at once."""
        return self.minibatch.streams.compute.count(None)

    def _job(self, share: tuple[int, ...], where: Where) -> None:
        """Run the tasks of one worker, in its thread."""
        stream = self.minibatch.streams.compute[share[0]]  # the same for all its partitions
        self.describe(where, stream)
        began = time.thread_time()
        try:
            if stream is None:
                self.limit_threads()
            with isolated(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                self.work(share, where)
            for j in share:
                self.mailboxes.release(j)
            self._busiest = max(self._busiest, time.thread_time() - began)
        except AbortedError:
            pass
        except BaseException as error:
            self.fail(error, where)
        finally:
            where.phase = None
            where.layer = None
            where.token = None
            where.gradients = None

    def describe(self, where: Where, stream: torch.cuda.Stream | None) -> None:
        """Set what is the same for all tasks of the pass."""
        minibatch = self.minibatch
        where.observers, where.stream = self.observers, stream
        where.step, where.serial, where.samples = minibatch.step, minibatch.serial, sum(minibatch.sizes)
        where.microbatches, where.partitions = self.m, self.n
        where.checkpoint_stop = minibatch.checkpoint_stop

    def limit_threads(self) -> None:
        """Give the calling thread its share of intra-op threads."""
        if torch.get_num_threads() != self._intra_op_threads:
            torch.set_num_threads(self._intra_op_threads)

    def fail(self, error: BaseException, where: Where) -> None:
        """End the pass because of an exception, in the thread that raised it."""
        with self._failing:
            if self._failure is None:
                self._failure = error
                annotate(error, where)
        self.mailboxes.abort()

    def work(self, share: tuple[int, ...], where: Where) -> None:
        """Run all tasks of the partitions of one worker."""
        raise NotImplementedError

    def begin(
        self,
        where: Where,
        partition: PlacedPartition,
        i: int,
        phase: Phase,
        *,
        checkpointing: bool = False,
        marks: list[tuple[int, str]] | None = None,
    ) -> None:
        """Set the context, and tell the observers that a task begins."""
        token = self.minibatch.tokens[i]
        where.begin_task(phase, partition.j, i, partition.device, token, checkpointing=checkpointing, marks=marks)

    def end(self, where: Where) -> None:
        """Tell the observers that the task has ended."""
        if self.observers.members:
            self.observers.task_ended(where)
        where.kept = None  # it holds tensors
        if sys.exception() is None:  # or else the note on the error needs it
            where.phase = None

    def receive(self, packet: Packet, partition: PlacedPartition, i: int, where: Where) -> list[Tensor | None]:
        """Return the tensors of a packet on the partition's device."""
        here = packet.device == partition.device
        if here and packet.ready is None:
            return packet.tensors
        streams = self.minibatch.streams
        if here or not self.observers.members:
            return receive(packet, partition.device, streams, partition.j, i)
        where.partition, where.microbatch = partition.j, i
        moved = [t for t in packet.tensors if t is not None and t.device == packet.device]
        details = (str(packet.device), str(partition.device), sum(t.nbytes for t in moved))
        self.observers.transfer_started(where, *details)
        try:
            return receive(packet, partition.device, streams, partition.j, i)
        finally:
            self.observers.transfer_ended(where, *details)

    def call(
        self,
        partition: PlacedPartition,
        i: int,
        inputs: Inputs,
        graph: LocalGraph | None,
        checkpoint: Checkpoint | None = None,
    ) -> tuple[list[Tensor | None], Form]:
        """Run the layers of a partition, for the first time or again, and extend ``graph`` by them.

        Return the outputs, then the skips that leave, and what makes a value like the output.
        """
        minibatch, tensors = self.minibatch, inputs.tensors
        if graph is not None:
            tensors = graph.begin(partition, inputs, self.tape.parameters[partition.j])
        tracker = None
        if partition.skips:
            tracker = SkipTracker(dict(zip(partition.arriving, tensors[inputs.count :], strict=True)))
        output = run_layers(
            functools.partial(minibatch.caller.run, partition.layers),
            inputs.form(tensors[: inputs.count]),
            minibatch.randomness,
            (i, partition.j, "forward"),
            tracker=tracker,
            checkpoint=checkpoint,
        )
        leaving = [] if tracker is None else [tracker.pop(key) for key in partition.leaving]
        outputs: list[Tensor | None] = [*as_tuple(output, "the output of a partition"), *leaving]
        if graph is not None:
            graph.end(outputs)
        return outputs, form_of(output)
