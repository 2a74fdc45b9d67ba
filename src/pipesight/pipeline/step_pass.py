"""A step of any model: forwards, losses and backwards of all micro-batches in one pass, in the order of a schedule.

A worker has a list of tasks. Forwards are run by threads that run the model (`trips`), everything else by the worker
itself; who has the turn, runs (`turns`). The loss of a micro-batch is computed at the end of its last forward, and its
gradient put where the backward waits for it, so that neither outputs nor graphs of all micro-batches are alive at once.

    worker 0   F0 F1 .. B0 ..      F: a thread goes on with the model, which comes from the partition before
    worker 1      F0 B0 F1 B1      B: the worker, when the forward has ended and the gradients are there
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipesight.context import Observers, Where
from pipesight.pipeline.gradients import GradientSum, silence_hooks
from pipesight.pipeline.local_graph import LocalGraph
from pipesight.pipeline.mailbox import Packet
from pipesight.pipeline.partition import PlacedPartition
from pipesight.pipeline.placed_units import Placement
from pipesight.pipeline.randomness import begin_task, end_task
from pipesight.pipeline.reentrant_checkpoint import CaughtGradients
from pipesight.pipeline.split_backward import SplitBackward
from pipesight.pipeline.step_losses import StepLosses
from pipesight.pipeline.trip import Trip
from pipesight.pipeline.trips import TripBackward, TripEngine, Trips, TripTape
from pipesight.pipeline.turns import NOTHING, Turns
from pipesight.schedule.task_orders import F, R, W
from pipesight.schedule.worker_orders import WorkerOrders

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
        self.mailboxes.add((i, s, k) for i in range(self.m) for k in range(1, self.n + 1) for s in range(k))
        self.turns = Turns(orders.tasks, self.mailboxes)
        self._trips = _StepTrips(self, tape, placement, losses)
        self._arrived: set[tuple[int, int]] = set()  # tasks whose micro-batch has ended its forward
        self._split: dict[tuple[int, int], SplitBackward] = {}

    @property
    def called(self) -> set[int]:
        """The partitions whose first module was called."""
        return self._trips.called

    def run_step(self) -> GradientSum:
        """Run all tasks; return the gradients of parameters and of the caller's tensors."""
        call = self.tape.call
        silence_hooks(p for p in self._trips.placement.model.parameters())
        for partition in self.partitions:
            self.tape.parameters[partition.j] = partition.trainable()
        starts = [i for row in self._orders.tasks for kind, i, j in row if kind == F and j == 0]
        coming = iter([i for i in starts if i not in self._orders.alone])
        jobs = [functools.partial(self._job, share) for share in self.shares]
        jobs += [functools.partial(self._trips.travel_on, coming, call)] * self._orders.flying
        try:
            self.run_jobs(self.threads, jobs)
        except BaseException:
            self.tape.graphs = {}
            raise
        finally:
            self._trips.attributes.end()
        for partition in self.partitions:
            partition.new = False
        return self.total()

    def cpu_workers(self) -> int:
        """Return how many threads compute on the CPU at once."""
        return sum(self.minibatch.streams.compute[share[0]] is None for share in self.shares)

    def work(self, share: tuple[int, ...], where: Where) -> None:
        """Run the tasks of a worker, except forwards that another thread runs."""
        with torch.autograd.set_multithreading_enabled(False), CaughtGradients() as caught:
            for kind, i, j in self._orders.tasks[self._orders.homes[share[0]]]:
                if kind == F:
                    if j == 0 and i in self._orders.alone:
                        self._trips.travel(i, self.tape.call, where)
                    continue
                self.turns.take((kind, i, j))
                self._run(kind, i, self.partitions[j], where, caught)
                self.turns.give((kind, i, j))

    def _run(self, kind: int, i: int, partition: PlacedPartition, where: Where, caught: CaughtGradients) -> None:
        """Run a task that is no forward."""
        j = partition.j
        if kind == W:
            self._run_weights(i, partition, where)
            return
        if (i, j) not in self._arrived:
            self.mailboxes.get((i, j), j)
            self._arrived.add((i, j))
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

    def _run_weights(self, i: int, partition: PlacedPartition, where: Where) -> None:
        """Run the rest of a backward: the gradients of the weights."""
        j = partition.j
        graph, split = self._graphs.pop((i, j)), self._split.pop((i, j))
        self.begin(where, partition, i, "weight", marks=graph.marks)
        where.gradients = self._sums[j].tensors
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
        self.mailboxes, self.observers = step.mailboxes, step.observers
        for where in self.wheres:
            where.observers = step.observers

    def make_turns(self) -> Turns:
        """Return the turns of the step."""
        return self._step.turns

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
                self.mailboxes.put((i, graph.first, n), Packet([start], self.partitions[graph.first].device), 0)
        for j in range(n):
            self.mailboxes.put((i, j), NOTHING, j)
