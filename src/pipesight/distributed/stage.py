"""The tasks of one partition on a rank; torch.distributed.pipelining's schedules decide when each runs.

A schedule calls, in its own order, for each micro-batch i::

    get_fwd_recv_ops(i)                  forward_one_chunk(i)    get_fwd_send_ops(i)
    get_bwd_recv_ops(i)   recompute(i)   backward_one_chunk(i)   get_bwd_send_ops(i)

or, where it splits the backward, ``backward_one_chunk(i, full_backward=False) ... backward_weight_one_chunk(i)``.
A partition recomputes while the gradient is on its way.

The tasks, in the middle, are here; what comes in and goes out is in `transfers`. What differs from torch's own stage:
shapes may differ between micro-batches and steps, skips travel along with the output, partitions can be checkpointed,
the context is set, and errors name partition, layer and micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pipesight._torch.autograd import next_sequence_number
from pipesight.distributed.minibatch import LocalGraph
from pipesight.distributed.recomputing_layers import RecomputingLayers
from pipesight.distributed.skip_forwarding import SkipForwarding
from pipesight.distributed.transfers import TransferringStage
from pipesight.pipeline.aliasing import Changes, region_of
from pipesight.pipeline.checkpoint import Checkpoint, Checkpointer, run_layers
from pipesight.pipeline.microbatch import Form, as_tuple, form_of
from pipesight.pipeline.partition import Partition, SkipRoutes
from pipesight.pipeline.randomness import begin_task, end_task
from pipesight.pipeline.skip import SkipKey, SkipTracker, skip_keys
from pipesight.pipeline.split_backward import run_backward, run_input_backward

__all__ = ["Stage"]


class Stage(TransferringStage):
    """A partition of this rank."""

    def __init__(
        self,
        partition: Partition,
        j: int,
        partitions: int,
        *,
        routes: SkipRoutes,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(partition, j, partitions, device=device, group=group)
        self._skips = SkipForwarding(j, routes)
        self._has_skips = any(skip_keys(partition))
        self._checkpointer = Checkpointer(partition)
        self._recomputing_layers = RecomputingLayers(partition)
        self._graphs: dict[int, LocalGraph] = {}

    def clear_runtime_states(self) -> None:
        """Drop what an earlier step, which may have failed, has left."""
        super().clear_runtime_states()
        self._graphs.clear()

    # Tasks.

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> list[Tensor]:
        """Run the partition on a micro-batch; return what goes to the next one."""
        i, batch = fwd_chunk_id, self.batch
        came = list(batch.inputs[i]) if self.is_first else self._received.pop(i)
        if self.has_backward and not self.is_first:
            came = _made_leaves(came)
        own, passing = self._skips.sort(came, self._cut(i, before=True))
        checkpointed = self.has_backward and i < batch.where.checkpoint_stop and self._checkpointer.allowed
        self._start("forward", i, checkpointing=checkpointed)
        try:
            if self.is_first:  # only here it is known whether the caller gave one tensor twice
                Changes().note(self.j, [region_of(t) for t in own], batch.flows[i].changed[self.j])
            outputs, form, leaving, checkpoint = self._forward(i, own, checkpointed)
            going = self._skips.merge(outputs, leaving, passing, self._cut(i))
            graph = LocalGraph(own, [*outputs, *(t for t in leaving.values() if t is not None)], checkpoint)
            if self.is_last:
                self._finish(i, graph, form)
            if self.has_backward:
                target = batch.loss.targets[i] if self.is_last and batch.loss.targets else None
                batch.where.kept = functools.partial(graph.kept, target)
        except BaseException as error:
            self._fail(error)
            raise
        self._end()
        if self.has_backward:
            graph.marks = batch.where.marks
            if checkpoint is not None:
                graph.outputs = []
            self._graphs[i] = graph
        self._sent[i] = [t.detach() for t in going]
        if self.is_last and save_forward_output:  # before torch 2.9, schedules put these together
            self.output_chunks.append(torch.empty(1))
        return going

    def _forward(
        self, i: int, own: list[Tensor], checkpointed: bool
    ) -> tuple[list[Tensor], Form, dict[SkipKey, Tensor | None], Checkpoint | None]:
        def run(checkpoint: Checkpoint) -> tuple[list[Tensor], Form, dict[SkipKey, Tensor | None]]:
            with torch.no_grad():
                return self._call(i, own, checkpoint)

        if checkpointed:
            result = self._checkpointer.forward(
                run,
                own,
                self.batch.where,
                # Layers that do are found out without hooks, when shapes are.
                changed="the input of a checkpointed partition was changed in place by a hook, so that it cannot be "
                "recomputed; return a new tensor from the hook, or use checkpoint='never'",
            )
            if result is not None:
                (outputs, form, leaving), checkpoint = result
                return outputs, form, leaving, checkpoint
        outputs, form, leaving = self._call(i, own)
        return outputs, form, leaving, None

    def _call(
        self, i: int, own: list[Tensor], checkpoint: Checkpoint | None = None
    ) -> tuple[list[Tensor], Form, dict[SkipKey, Tensor | None]]:
        """Run the layers; return the tensors of their output, its form, and the skips that leave."""
        cut = self._cut(i, before=True)
        # Nothing else uses a received tensor, but autograd refuses to change a leaf in place, and a recomputation needs
        # it unchanged.
        tensors = [t.clone() for t in own] if self.batch.flows[i].changed[self.j] else own
        tracker = None
        if self._has_skips:
            tracker = SkipTracker(dict[Hashable, Tensor | None](self._skips.arriving(tensors, cut).items()))
        output = run_layers(
            self.submod,
            cut.form(tensors[: len(cut.output)]),
            self.batch.randomness,
            (i, self.j, "forward"),
            tracker=tracker,
            checkpoint=checkpoint,
        )
        leaving = {} if tracker is None else {key: tracker.pop(key) for key in self._skips.leaving}
        return list(as_tuple(output, "the output of a partition")), form_of(output), leaving

    def _finish(self, i: int, graph: LocalGraph, form: Form) -> None:
        """Compute the loss, in the last partition, or keep the output if none is wanted."""
        batch, loss = self.batch, self.batch.loss
        if not loss.targets:
            batch.outputs[i] = form, [t.detach() for t in graph.outputs]
            return
        layer, batch.where.layer = batch.where.layer, "loss_fn"
        batch.where.marks.append((next_sequence_number(), "loss_fn"))
        graph.ends = [t.detach() for t in graph.outputs]
        if self.has_backward:
            graph.ends = _made_leaves(graph.ends)
        begin_task(batch.randomness, (i, self.j, "loss"))
        try:
            value = loss.loss_fn(form(graph.ends), loss.targets[i])
        finally:
            end_task()
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"loss_fn must return one number, as a tensor, but returned {what}")
        graph.loss = loss.add(i, value, (form, graph.outputs))
        batch.where.layer = layer

    def recompute(self, i: int) -> None:
        """Run a checkpointed micro-batch again, unless that was done."""
        graph = self._graphs.get(i)
        if graph is None or graph.checkpoint is None:
            return
        self._start("recompute", i)
        try:
            outputs, _, leaving = self._checkpointer.recompute(
                lambda checkpoint: self._call(i, graph.leaves, checkpoint), graph.checkpoint
            )
        except BaseException as error:
            self._fail(error)
            raise
        graph.outputs = [*outputs, *(t for t in leaving.values() if t is not None)]
        graph.marks = self.batch.where.marks
        graph.checkpoint = None
        self.batch.where.kept = graph.kept
        self._end()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a micro-batch, or only the part that the partition before waits for."""
        if not self.has_backward:
            return
        i = bwd_chunk_id
        self.recompute(i)
        graph = self._graphs.pop(i)
        self._start("backward", i, marks=graph.marks)
        try:
            ends, gradients, passed = self._gradients(i, graph)
            self._prepare_sharded()
            with self._running_backward(i):
                if full_backward or self._recomputing_layers.in_graph(ends):
                    run_backward(ends, gradients)
                else:
                    with self._recomputing_layers.noticed(self.j):
                        graph.rest = run_input_backward(ends, gradients, graph.leaves)
                        self.batch.where.gradients = graph.rest.waiting
            self.batch.where.end_layer()  # the rest belongs to no layer
            own = [leaf.grad for leaf in graph.leaves]
            for leaf in graph.leaves:
                leaf.grad = None
        except BaseException as error:
            self._fail(error)
            raise
        self._end()
        if not full_backward:
            self._graphs[i] = graph
        self._gradients_sent[i] = self._skips.merge_gradients(own, passed, self._cut(i, before=True))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of a backward: the gradients of the weights."""
        if not self.has_backward:
            return
        graph = self._graphs.pop(bwd_chunk_id)
        self._start("weight", bwd_chunk_id, marks=graph.marks)
        try:
            self._prepare_sharded()
            self._run_rest(bwd_chunk_id, graph.rest)
        except BaseException as error:
            self._fail(error)
            raise
        self._end()

    def _gradients(self, i: int, graph: LocalGraph) -> tuple[list[Tensor], list[Tensor], dict[SkipKey, Tensor | None]]:
        """Return the outputs that have a graph, their gradients, and the gradients of skips that only pass."""
        passed: dict[SkipKey, Tensor | None] = {}
        if self.is_last:
            if graph.loss is not None and graph.loss.requires_grad:
                begin_task(self.batch.randomness, (i, self.j, "backward"))
                try:
                    graph.loss.backward()
                finally:
                    end_task()
            elif graph.loss is None:
                for end in graph.ends:
                    end.grad = torch.zeros_like(end) if end.requires_grad else None
            received = [t.grad for t in graph.ends]
            if self.batch.loss.evidence is not None and i < self.batch.loss.evidence.count:
                self.batch.loss.evidence.gradients[i] = received
            graph.loss, graph.ends = None, []
        else:
            received, passed = self._skips.sort_gradients(self._gradients_received.pop(i), self._cut(i))
        pairs = zip(graph.outputs, received, strict=True)
        chosen = [(output, g) for output, g in pairs if g is not None and output.requires_grad]
        graph.outputs = []
        return [output for output, _ in chosen], [gradient for _, gradient in chosen], passed

    # Data parallelism.

    def _prepare_sharded(self) -> None:
        """Make FSDP accumulate gradients, and reduce them only after the last micro-batch."""
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients over replicas, after the last micro-batch."""
        if not self.has_backward:
            return
        if isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(1)
        if self.averaging is not None:
            self.averaging.start()


def _made_leaves(tensors: list[Tensor]) -> list[Tensor]:
    """Make the tensors that can have a gradient require one, in place."""
    return [t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in tensors]
