"""A step of any model: forwards, losses and backwards of all micro-batches in one pass, in the order of a schedule.

A worker has a list of tasks, which run in the threads that have the turn (`turns`). All forwards of a micro-batch run
in one thread, which runs the model (`trips`); everything else runs in any. The loss of a micro-batch is computed at the
end of its last forward, and its gradient put where the backward waits for it, so that neither outputs nor graphs of all
micro-batches are alive at once.

    worker 0   F0 F1 .. B0 ..      F: a thread goes on with the model, which comes from the partition before
    worker 1      F0 B0 F1 B1      B: a free thread, when the forward has ended and the gradients are there
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesight.context import Observers, Where, enter_thread
from pipesight.pipeline.gradients import GradientSum, silence_hooks
from pipesight.pipeline.local_graph import LocalGraph
from pipesight.pipeline.mailbox import AbortedError, Packet
from pipesight.pipeline.partition import PlacedPartition
from pipesight.pipeline.placed_units import Placement
from pipesight.pipeline.randomness import begin_task, end_task, isolated
from pipesight.pipeline.reentrant_checkpoint import CaughtGradients
from pipesight.pipeline.split_backward import SplitBackward
from pipesight.pipeline.step_losses import StepLosses
from pipesight.pipeline.trip import Trip, TripGraph
from pipesight.pipeline.trips import TripBackward, TripEngine, Trips, TripTape, one_by_one
from pipesight.pipeline.turns import Turns
from pipesight.schedule.task_orders import B, F, R, W
from pipesight.schedule.worker_orders import Task, WorkerOrders

__all__ = ["StepPass"]


class StepPass(TripBackward):
    """Runs a mini-batch forward and backward.

    Args:
        tape: An empty one.
        placement: That of the model.
        orders: What the workers do.
        losses: What computes and weighs the losses.
    """

    def __init__(self, tape: TripTape, placement: Placement, orders: WorkerOrders, losses: StepLosses) -> None:
        super().__init__(tape, keep=False)
        self._orders = orders
        self._checked = {*range(self.n)}  # nobody can change weights in the middle of a step
        engine = tape.minibatch.engine
        assert isinstance(engine, TripEngine)
        self.shares = tuple(
            tuple(j for j, home in enumerate(orders.homes) if home == d) for d in range(len(orders.tasks))
        )
        self.threads = engine.step_threads(self.shares, orders.flying)
        self._gradients: dict[Hashable, Packet] = {}
        tasks: Sequence[Sequence[Task]] = orders.tasks
        count = len(tape.minibatch.sizes)
        needs = {task: 1 for row in tasks for task in row if task[0] in (B, R)}  # the forward
        if placement.attributes.learns(count):
            tasks, more = one_by_one(tasks, count)
            needs |= more
        self.turns = Turns(
            tasks,
            orders.homes,
            [thread.ident for thread in self.threads.threads],
            self.mailboxes,
            flying=orders.flying,
            alone=orders.alone,
            needs=needs,
        )
        self._trips = _StepTrips(self, tape, placement, losses)
        self._split: dict[tuple[int, int], SplitBackward] = {}
        self.called: set[int] = self._trips.called
        """The partitions whose first module was called."""

    def run_step(self) -> GradientSum:
        """Run all tasks; return the gradients of parameters and of the caller's tensors."""
        silence_hooks(p for p in self._trips.placement.model.parameters())
        for partition in self.partitions:
            self.tape.parameters[partition.j] = partition.trainable()
        jobs = [self._run_tasks] * len(self.threads.threads)
        try:
            self.run_jobs(self.threads, jobs)
        except BaseException:
            self.tape.graphs, self._gradients = {}, {}
            raise
        finally:
            self._trips.attributes.end(failed=sys.exception() is not None)
            del self._trips  # it has this step, and what it holds would wait for the garbage collector
        for partition in self.partitions:
            partition.new = False
        return self.total()

    def cpu_workers(self) -> int:
        """Return how many threads compute on the CPU at once."""
        return sum(self.minibatch.streams.compute[share[0]] is None for share in self.shares)

    def _run_tasks(self, own: Where) -> None:
        """Run what the calling thread gets a turn for: forwards of a micro-batch, from the first to the last, or one
        task that is no forward."""
        where = own
        try:
            self.limit_threads()
            for stream in {*self.minibatch.streams.compute}:
                if stream is not None:
                    torch.cuda.set_stream(stream)
            task = self.turns.next()
            while task is not None:
                while task is not None and task[0] == F:
                    self._trips.travel(task[1], self.tape.call, own)
                    self.turns.supply([((F, task[1] + 1, 0), 1)])
                    task = self._next_after((F, task[1], self.n - 1))
                if task is None:
                    break
                # Autograd would run the nodes of a GPU in a thread of its own.
                with isolated(), torch.autograd.set_multithreading_enabled(False), CaughtGradients() as caught:
                    while task is not None and task[0] != F:
                        kind, i, j = task
                        where = self._trips.enter(j)
                        self._run(kind, i, self.partitions[j], where, caught)
                        task = self._next_after(task)
        except AbortedError:
            pass
        except BaseException as error:
            self.fail(error, where)
        finally:
            enter_thread(own)

    def _next_after(self, task: Task) -> Task | None:
        self.turns.end(task)
        return self.turns.next()

    def _run(self, kind: int, i: int, partition: PlacedPartition, where: Where, caught: CaughtGradients) -> None:
        """Run a task that is no forward."""
        j = partition.j
        if kind == W:
            self._run_weights(i, partition, where)
            return
        graph = self._graphs[i, j]
        if kind == R:
            self.recompute(partition, i, graph, where)
            return
        if (i, j) not in self._orders.split:
            del self._graphs[i, j]
        self._step(partition, i, graph, where, caught)

    def runs_twice(self, i: int, j: int) -> bool:
        """Whether the backward of a task is split."""
        return (i, j) in self._orders.split

    def differentiate(
        self, partition: PlacedPartition, i: int, graph: LocalGraph, gradients: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of a task, or those that others wait for."""
        if (i, partition.j) not in self._orders.split:
            return super().differentiate(partition, i, graph, gradients)
        split = self._split[i, partition.j] = SplitBackward(graph)
        return [], split.run_inputs(gradients), [None] * len(graph.parameters)

    def leave(self, box: Hashable, packet: Packet, j: int) -> None:
        """Leave gradients for a task, which does not begin without them."""
        self._gradients[box] = packet

    def collect(self, box: Hashable, j: int) -> Packet:
        """Return the gradients that were left for a task."""
        return self._gradients.pop(box)

    def arrived(self, i: int, graphs: Sequence[TripGraph]) -> None:
        """Let the backwards of a micro-batch begin, whose forward has ended, once they have the gradients they need."""
        there = []
        for graph in graphs:
            awaited = len({*graph.consumers} - {self.n})
            there += [((R, i, graph.first), 1), ((B, i, graph.first), 1 - awaited)]
        self.turns.supply(there)

    def send_gradients(
        self, i: int, j: int, graph: LocalGraph, of_ins: list[Tensor | None], of_arriving: list[Tensor | None]
    ) -> None:
        """Send the gradients of a task's inputs to the partitions that made them, whose backwards may need no more."""
        super().send_gradients(i, j, graph, of_ins, of_arriving)
        assert isinstance(graph, TripGraph)
        self.turns.supply(((B, i, s), 1) for s in {*graph.sources})

    def held_gradients(self, j: int) -> list[Tensor]:
        """Return the gradients that a partition holds, also those that tasks of its own wait for."""
        waiting = [split.waiting() for (_, k), split in [*self._split.items()] if k == j]
        return [*super().held_gradients(j), *(gradient for some in waiting for gradient in some)]

    def _run_weights(self, i: int, partition: PlacedPartition, where: Where) -> None:
        """Run the rest of a backward: the gradients of the weights."""
        j = partition.j
        graph, split = self._graphs.pop((i, j)), self._split.pop((i, j))
        self.begin(where, partition, i, "weight", marks=graph.marks)
        where.gradients = functools.partial(self.held_gradients, j)
        begin_task(self.minibatch.randomness, (i, j, "weight"))
        observers, where.observers = where.observers, Observers(())  # weights come in no order of layers
        try:
            gradients = self.minibatch.caller.run(split.run_weights)
            self._sums[j].add(graph.parameters, gradients)
        finally:
            where.observers = observers
            end_task()
            self.end(where)


class _StepTrips(Trips):
    """Runs the forwards of a step, and computes their losses."""

    def __init__(self, step: StepPass, tape: TripTape, placement: Placement, losses: StepLosses) -> None:
        self._step, self._losses = step, losses
        super().__init__(tape, placement, step.threads.threads, step.shares)
        self.mailboxes, self.observers, self.turns = step.mailboxes, step.observers, step.turns
        for where in self.wheres:
            where.observers = step.observers

    def limit_threads(self) -> None:
        """Give the calling thread its share of intra-op threads."""
        self._step.limit_threads()

    def fail(self, error: BaseException, where: Where) -> None:
        """End the step because of an exception."""
        self._step.fail(error, where)

    def loss_of(self, i: int) -> Callable[[Any], Tensor]:
        """Return what computes the loss of a micro-batch."""
        return functools.partial(self._losses.compute, i)

    def targets_of(self, i: int) -> list[Tensor]:
        """Return the tensors in the target of a micro-batch."""
        return self._losses.targets_of(i)

    def keep(self, trip: Trip, output: Any) -> None:
        """Put the gradient of a loss where the backward waits for it, and let the graphs of its micro-batch be used."""
        i, n, loss = trip.i, self.n, output
        if not loss.requires_grad:
            raise RuntimeError(
                "the loss has no graph to differentiate: no parameter that requires grad was used for it, or it was "
                "detached; use eval_step() for a loss without gradients"
            )
        start = self._losses.start(i, loss)
        self.keep_graphs(trip, [] if start is None else [loss])
        for graph in trip.graphs:
            if n in graph.consumers:
                self._step.leave((i, graph.first, n), Packet([start], self.partitions[graph.first].device), n - 1)
        self._step.arrived(i, trip.graphs)
