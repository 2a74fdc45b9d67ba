"""The passes of a mini-batch through any model: forward as trips, one a micro-batch; backward on the workers.

Partitions take micro-batches in the same order as those of a `GPipe`, and each task has a local graph. What differs is
that a task's inputs and outputs are found while the model runs: a tensor of partition s that partition j uses.

    forward    trip i: partition 0 ──> 1 ──> 2, each when it is its turn there
    backward   task (i, s) waits for the gradients from every task (i, j) that used one of its tensors
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesight.context import Kept, Unrepeatable, Where, enter_thread
from pipesight.pipeline.attributes import PassAttributes
from pipesight.pipeline.backward import BackwardPass
from pipesight.pipeline.calls import SplitCall
from pipesight.pipeline.dependencies import LeakError
from pipesight.pipeline.flattening import Flat
from pipesight.pipeline.gradients import GradientSum, OutputGradients
from pipesight.pipeline.local_graph import LocalGraph
from pipesight.pipeline.loss_watch import LossWatch
from pipesight.pipeline.mailbox import AbortedError, Packet, ready
from pipesight.pipeline.minibatch import Engine, MiniBatch, Pass, Tape
from pipesight.pipeline.outputs import Merge, flatten_output
from pipesight.pipeline.partition import PlacedPartition, SkipRoutes
from pipesight.pipeline.placed_units import Placement
from pipesight.pipeline.randomness import isolated
from pipesight.pipeline.trip import Trip, TripGraph
from pipesight.pipeline.turns import Turns
from pipesight.pipeline.workers import Threads, Workers, worker_name
from pipesight.schedule.task_orders import F
from pipesight.schedule.worker_orders import Task, gpipe_tasks

__all__ = ["TripBackward", "TripEngine", "TripTape", "Trips"]


@dataclass(frozen=True, slots=True)
class TripEngine(Engine):
    """What runs the partitions of any model, for all its mini-batches."""

    placement: Placement
    travellers: list[Threads]
    """One pool of threads, which run the model, where the workers are too few."""
    steppers: dict[tuple[tuple[int, ...], ...], Threads]
    """For the partitions of each worker, a pool of threads for steps: the workers, then those that run the model."""

    @classmethod
    def of(cls, placement: Placement) -> TripEngine:
        """Return an engine for a model that has been placed."""
        return cls(list(placement.placed), SkipRoutes([]), Workers(placement.devices), placement, [], {})

    def threads(self) -> Threads:
        """Return threads that run the model, kept for the next mini-batches: the workers, where these are enough.

        So many micro-batches are on their way at once: with fewer, a partition could be idle though there is work, and
        with more, threads would only hand over to each other, or compete for the GIL to launch kernels on one GPU. A
        GPU that a micro-batch comes back to, after a partition elsewhere, needs a thread for each partition.
        """
        n = len(self.partitions)
        if all(map(_adjacent, self.workers.shares)):
            return self.workers
        if not self.travellers:
            names = [f"pipesight-trip-{k}" for k in range(n)]
            self.travellers.append(Threads(names, self.placement.devices))
        return self.travellers[0]

    def step_threads(self, shares: tuple[tuple[int, ...], ...], travellers: int) -> Threads:
        """Return threads for a step, kept for the next ones: first a worker for each share of the partitions."""
        pool = self.steppers.get(shares)
        if pool is None or len(pool.threads) < len(shares) + travellers:
            devices = [self.placement.devices[share[0]] for share in shares]
            names = [*map(worker_name, shares), *(f"pipesight-trip-{k}" for k in range(travellers))]
            pool = self.steppers[shares] = Threads(names, [*devices, *[devices[0]] * travellers])
        return pool


class TripTape(Tape):
    """What the forward of a mini-batch leaves for its backward."""

    def __init__(self, minibatch: MiniBatch, call: SplitCall) -> None:
        super().__init__(minibatch, [True] * len(call.inputs))
        self.call = call
        self.merge: Merge | None = None
        self.copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By partition and id, parameters that live on another device, and their copies there."""

    def used(self) -> tuple[set[int], list[Tensor]]:
        """Return what the outputs depend on: the positions of inputs, and the parameters."""
        assert self.merge is not None
        _, used = self.dependencies.of_outputs(len(self.minibatch.sizes), len(self.parameters), self.merge.count)
        inputs = {k for pieces in self.call.pieces for k, piece in enumerate(pieces) if id(piece) in used}
        found = {id(p): p for parameters in self.parameters for p in parameters if id(p) in used}
        found |= {id(p): p for p, copy in self.copies.values() if id(copy) in used}
        return inputs, list(found.values())


class _Abandoned(BaseException):
    """The mini-batch has failed elsewhere. Not an ``Exception``, so that the model does not catch it."""


class Trips(Pass):
    """Runs a mini-batch forward.

    Args:
        tape: What passes from forward to backward.
        placement: That of the model.
        workers: The threads in which tasks are drawn, one for each share.
        shares: The partitions of each worker.
    """

    tape: TripTape

    def __init__(
        self,
        tape: TripTape,
        placement: Placement,
        workers: Sequence[threading.Thread],
        shares: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(tape, len(tape.minibatch.sizes), tape.minibatch.engine.workers.forward_pace)
        self.placement = placement
        self.attributes = PassAttributes(self.m, placement.attributes, self.n)
        self.called: set[int] = set()
        """The partitions whose first module was called."""
        self._copies, self._copying = tape.copies, threading.Lock()
        self._watches: Sequence[LossWatch] = ()
        self._outputs: dict[int, tuple[Flat, list[bool]]] = {}
        drawn_in = {j: thread.ident for thread, share in zip(workers, shares, strict=False) for j in share}
        self.wheres = [Where() for _ in range(self.n)]
        for j, where in enumerate(self.wheres):
            self.describe(where, self.minibatch.streams.compute[j])
            where.partition, where.thread = j, drawn_in[j] or 0
        self.turns: Turns

    def boxes(self) -> Iterable[Hashable]:
        """Return the mailboxes of the pass: only its turns have some."""
        return ()

    def run(
        self, threads: Threads, call: SplitCall, watches: Sequence[LossWatch] = ()
    ) -> list[tuple[Flat, list[bool]]]:
        """Call the model with each micro-batch; return its outputs, and which of their tensors want a gradient.

        Args:
            threads: One for each micro-batch.
            call: Their arguments.
            watches: What notes their losses, if any.
        """
        self._watches = watches
        if self.minibatch.grad:
            for partition in self.partitions:
                self.tape.parameters[partition.j] = partition.trainable()
        shares, used = self.minibatch.engine.workers.shares, threads.threads[: self.m]
        homes = [d for j in range(self.n) for d, share in enumerate(shares) if j in share]
        orders: Sequence[Sequence[Task]] = [_turns(self.m, share) for share in shares]
        needs: dict[Task, int] = {}
        if self.attributes.learns:
            orders, needs = one_by_one(orders, self.m)
        threads_used = [thread.ident for thread in used]
        self.turns = Turns(orders, homes, threads_used, self.mailboxes, flying=len(used), needs=needs)
        try:
            self.run_jobs(threads, [functools.partial(self._travel_on, call)] * len(used))
        finally:
            self.attributes.end(failed=sys.exception() is not None)
        self.tape.note_versions(self.partitions)
        return [self._outputs[i] for i in range(self.m)]

    def _travel_on(self, call: SplitCall, own: Where) -> None:
        """Run the model with one micro-batch after the other, in a thread."""
        with contextlib.suppress(AbortedError):
            while (task := self.turns.next()) is not None:
                self.travel(task[1], call, own)
                self.turns.supply([((F, task[1] + 1, 0), 1)])
                self.turns.end((F, task[1], self.n - 1))

    def travel(self, i: int, call: SplitCall, own: Where) -> None:
        """Run the model with one micro-batch."""
        trip = Trip(self, i, [piece for piece in call.pieces[i] if piece.requires_grad])
        args, kwargs = call.calls[i]
        call.calls[i] = ((), {})
        try:
            self.limit_threads()
            for stream in {*self.minibatch.streams.compute}:
                if stream is not None:
                    torch.cuda.set_stream(stream)
            with isolated(), torch.set_grad_enabled(self.minibatch.grad):
                with self._watches[i] if self._watches else contextlib.nullcontext():
                    run = functools.partial(trip.run, loss=self.loss_of(i))
                    output = self.minibatch.caller.run(run, self.placement.model, args, kwargs)
                self.keep(trip, output)
                del output
                trip.finish()
        except _Abandoned:
            pass
        except Unrepeatable:
            message = "a checkpointed model must not call current_microbatch(); use checkpoint='never'"
            self.fail(RuntimeError(message), self.wheres[trip.j])
        except BaseException as error:
            self.fail(error, self.wheres[trip.j])
        finally:
            enter_thread(own)

    def loss_of(self, i: int) -> Callable[[Any], Tensor] | None:
        """Return what makes a loss of the output of a micro-batch, if the pass does."""
        return None

    def targets_of(self, i: int) -> list[Tensor]:
        """Return what the loss of a micro-batch is computed with, besides the output."""
        return []

    def keep(self, trip: Trip, output: Any) -> None:
        """Keep the output of a micro-batch, and put its graphs onto the tape."""
        flat = flatten_output(output, self.tape.call.dims)
        if not self.placement.on_one_device:  # else what was changed is the tensor itself
            flat.tensors[:] = map(trip.roots.left, flat.tensors)
        self._outputs[trip.i] = flat, self.keep_graphs(trip, flat.tensors)

    def keep_graphs(self, trip: Trip, outputs: Sequence[Tensor]) -> list[bool]:
        """Put the graphs of a micro-batch onto the tape; return which of its outputs want a gradient."""
        wanted = [trip.export_output(k, tensor) for k, tensor in enumerate(outputs)]
        for graph in trip.graphs:
            partition = self.partitions[graph.first]
            try:
                found = self.tape.dependencies.note(trip.i, partition, graph, graph.places, graph.floor)
            except LeakError as leak:
                raise RuntimeError(
                    f"partition {partition.j} uses a tensor of an earlier partition in a way that cannot be seen, in "
                    f"an autograd function of its own outside all modules (it leads to {leak}); pass that tensor to "
                    "a module as an argument, or cut elsewhere"
                ) from None
            if found:  # maybe by another micro-batch that was under way, too, and one after both must have each once
                known = {id(parameter) for parameter in self.tape.parameters[partition.j]}
                self.tape.parameters[partition.j] += [leaf for leaf in found if id(leaf) not in known]
            self.tape.graphs[trip.i, partition.j] = graph
        return wanted

    # For the trips.

    def go_on(self, i: int, j: int) -> None:
        """Let the next task of partition j begin; wait until the partition after it is free for micro-batch i."""
        try:
            self.turns.go_on((F, i, j), (F, i, j + 1))
        except AbortedError:
            raise _Abandoned from None

    def enter(self, j: int) -> Where:
        """Let the calling thread work in partition j."""
        where, device = self.wheres[j], self.partitions[j].device
        enter_thread(where)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return where

    def moved(self, tensor: Tensor, j: int, i: int) -> Tensor:
        """Return a tensor on the device of partition j."""
        target = self.partitions[j].device
        if tensor.device == target or tensor.device not in self.placement.devices:
            return tensor
        where, details = self.wheres[j], (str(tensor.device), str(target), tensor.nbytes)
        if self.observers.members:
            self.observers.transfer_started(where, *details)
        copy = tensor.to(target, non_blocking=target.type == "cuda")
        if self.observers.members:
            self.observers.transfer_ended(where, *details)
        return copy

    def copy_of(self, parameter: Tensor, j: int) -> Tensor:
        """Return the copy of a parameter in partition j, which is on another device."""
        with self._copying:
            known = self._copies.get((j, id(parameter)))
            if known is None:
                copy = parameter.detach().to(self.partitions[j].device).requires_grad_()
                known = self._copies[j, id(parameter)] = (parameter, copy)
        return known[1]


def _adjacent(partitions: Sequence[int]) -> bool:
    """Whether a micro-batch goes from each of these partitions to the next without leaving their device."""
    return partitions[-1] - partitions[0] == len(partitions) - 1


@functools.lru_cache
def _turns(m: int, partitions: tuple[int, ...]) -> tuple[Task, ...]:
    """Return the forward tasks of a worker's partitions, in the order in which trips take them.

    >>> _turns(2, (0, 1))
    ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1))
    >>> _turns(2, (0, 2))
    ((0, 0, 0), (0, 1, 0), (0, 0, 2), (0, 1, 2))
    """
    if _adjacent(partitions):  # a thread stays with its micro-batch
        return tuple((F, i, j) for i in range(m) for j in partitions)
    return tuple((F, i, j) for i, j in gpipe_tasks(F, m, partitions))


def one_by_one(orders: Sequence[Sequence[Task]], count: int) -> tuple[Sequence[Sequence[Task]], dict[Task, int]]:
    """Return orders, and what tasks wait for, by which a micro-batch begins when the one before has ended its forward.

    >>> one_by_one([((0, 0, 0), (0, 1, 0), (0, 0, 2), (0, 1, 2))], 2)
    ([[(0, 0, 0), (0, 0, 2), (0, 1, 0), (0, 1, 2)]], {(0, 1, 0): 1})
    """
    forwards = [[i for kind, i, _ in row if kind == F] for row in orders]
    if any(row != sorted(row) for row in forwards):
        orders = [sorted(row, key=operator.itemgetter(1)) for row in orders]
    return orders, {(F, i, 0): 1 for i in range(1, count)}


class TripBackward(BackwardPass):
    """Runs a mini-batch backward."""

    tape: TripTape

    def __init__(self, tape: TripTape, *, keep: bool) -> None:
        super().__init__(tape, keep=keep)
        self._total = GradientSum()

    def boxes(self) -> Iterable[Hashable]:
        """Return the mailboxes of the pass: for each task, one for each partition that used a tensor of it."""
        return [(i, j, k) for (i, j), graph in self.tape.graphs.items() for k in {*_trip(graph).consumers}]

    def leave(self, box: Hashable, packet: Packet, j: int) -> None:
        """Leave gradients from partition j for the task that waits for them."""
        self.mailboxes.put(box, packet, j)

    def collect(self, box: Hashable, j: int) -> Packet:
        """Return the gradients that were left for a task of partition j."""
        return self.mailboxes.get(box, j)

    def fail(self, error: BaseException, where: Where) -> None:
        """End the pass because of an exception."""
        if isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error):
            error.add_note(
                "micro-batches may share a tensor that one of them computed, from a list or dict where the model keeps "
                "it for other calls: detach() it there, or use chunks=1"
            )
        super().fail(error, where)

    def total(self) -> GradientSum:
        """Return the gradients of all partitions; those of copies of a parameter are its own."""
        self._total = super().total()
        for parameter, copy in self.tape.copies.values():
            gradient = self._total.take(copy)
            self._total.add([parameter], [None if gradient is None else gradient.to(parameter.device)])
        return self._total

    def send_outputs(self, outputs: OutputGradients) -> None:
        """Split the gradients of the merged outputs by micro-batch and by the partition that made the output."""
        merge = self.tape.merge
        assert merge is not None
        parts = [
            [None] * self.m if gradient is None else merge.split_gradient(k, gradient)
            for k, gradient in enumerate(outputs.gradients)
        ]
        outputs.gradients.clear()
        for (i, j), graph in self._graphs.items():
            numbers = [p[1] for p, c in zip(_trip(graph).places, _trip(graph).consumers, strict=True) if c == self.n]  # type: ignore[index]
            if numbers:
                tensors = [parts[k][i] for k in numbers]
                self.mailboxes.put((i, j, self.n), Packet(tensors, self.partitions[j].device, ready=outputs.ready), 0)

    def recompute(self, partition: PlacedPartition, i: int, graph: LocalGraph, where: Where) -> None:
        """Run the checkpointed units of a task again."""
        units = _trip(graph).units
        if not units:
            return
        self.begin(where, partition, i, "recompute")
        try:
            self.check_weights(partition)
            for unit in units:
                self.minibatch.caller.run(functools.partial(unit.recompute, keep=self.runs_twice(i, partition.j)))
            where.kept = lambda: Kept(recomputed=[unit.saved() for unit in units])
        finally:
            self.end(where)
        if not self._keep:
            _trip(graph).units = []

    def runs_twice(self, i: int, j: int) -> bool:
        """Whether the graph of a task is run again after its backward."""
        return self._keep

    def receive_gradients(
        self, partition: PlacedPartition, i: int, graph: LocalGraph, where: Where
    ) -> list[Tensor | None]:
        """Wait for the gradients from all that used a tensor of this task."""
        consumers = _trip(graph).consumers
        gradients: list[Tensor | None] = [None] * len(consumers)
        for k in sorted({*consumers}, reverse=True):
            found = self.receive(self.collect((i, partition.j, k), partition.j), partition, i, where)
            places = [place for place, consumer in enumerate(consumers) if consumer == k]
            for place, gradient in zip(places, found, strict=True):
                gradients[place] = gradient
        return gradients

    def send_gradients(
        self, i: int, j: int, graph: LocalGraph, of_ins: list[Tensor | None], of_arriving: list[Tensor | None]
    ) -> None:
        """Send the gradients of a task's inputs to the partitions that made them."""
        sources = _trip(graph).sources
        device = self.partitions[j].device
        for s in sorted({*sources}, reverse=True):
            tensors = [g for g, source in zip(of_arriving, sources, strict=True) if source == s]
            packet = Packet(tensors, device, ready=ready(device, self.partitions[s].device))
            self.leave((i, s, j), packet, j)

    def input_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the caller's tensors, after `run`."""
        call = self.tape.call
        parts = [[self._total.take(call.pieces[i][k]) for i in range(self.m)] for k in range(len(needed))]
        return [call.join_gradients(k, parts[k]) if need else None for k, need in enumerate(needed)]


TripTape.backward_pass = TripBackward


def _trip(graph: Any) -> TripGraph:
    assert isinstance(graph, TripGraph)
    return graph
