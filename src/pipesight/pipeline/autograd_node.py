"""The pipeline as one node of the caller's autograd graph.

::

    input, parameters ──> Inlet ──> phony ──> Outlet ──> outputs
                                       outputs of the last partition ─┘

The partitions' own graphs are not part of it. In backward, ``Outlet`` (on the output's device) puts the gradients of
the outputs aside; ``Inlet`` hands them to the mini-batch, which runs its backward on the workers, and returns the
gradients of the input and the parameters. The phony tensor is on the CPU, so autograd runs ``Inlet`` in the thread that
called ``backward()``; in a thread of a CUDA device, it would wait for ever for workers that need that same thread.

``Inlet`` keeps the mini-batch, with all that the layers saved. Inside of ``torch.utils.checkpoint``, that is for the
checkpoint to decide: the mini-batch hangs on an empty tensor, the keepsake, which is saved as any layer would save its
input. The checkpoint drops it, and when ``Inlet`` asks for it, calls the pipeline again and has another one to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipesight.pipeline.gradients import OutputGradients

if TYPE_CHECKING:
    from pipesight.pipeline.minibatch import MiniBatch

__all__ = ["edge_of", "enter", "tie"]

Returned: TypeAlias = dict[int, OutputGradients]
"""Gradients on their way from ``Outlet`` to ``Inlet``. Several threads may differentiate one output: what belongs
together has autograd's number of the run."""


def tie(minibatch: MiniBatch, inputs: Sequence[Tensor], outputs: Sequence[Tensor], differentiable: list[bool]) -> Any:
    """Return ``outputs`` as results of the caller's graph: those marked ``differentiable`` lead to ``minibatch``."""
    used, parameters = minibatch.dependencies()
    inputs = [t if k in used else t.detach() for k, t in enumerate(inputs)]
    returned: Returned = {}
    phony = _Inlet.apply(minibatch, returned, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    device = minibatch.stages[-1].device
    return _Outlet.apply(returned, device, differentiable, phony, *outputs)  # type: ignore[no-untyped-call]


class _Inlet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, minibatch: MiniBatch, returned: Returned, count: int, *leaves: Tensor) -> Tensor:
        ctx.returned, ctx.count, ctx.parameters = returned, count, leaves[count:]
        inputs = [leaf for leaf in leaves[:count] if leaf.requires_grad]
        if minibatch.surroundings.in_checkpoint:
            ctx.minibatch = None
            ctx.save_for_backward(_keepsake(minibatch), *inputs)
        else:
            ctx.minibatch = minibatch
            ctx.save_for_backward(*inputs)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        twice = torch.is_grad_enabled()
        minibatch: MiniBatch | None = ctx.minibatch
        inputs: tuple[Tensor, ...] = ()
        if minibatch is None:
            keepsake, *inputs = ctx.saved_tensors  # only once, since a checkpoint gives a tensor only once
            minibatch = _kept_by(keepsake)
            _check_same(ctx.parameters, minibatch)
        elif twice:
            inputs = ctx.saved_tensors
        with torch.no_grad():
            gradients = minibatch.backward(
                ctx.returned.pop(torch._C._current_graph_task_id()),
                ctx.needs_input_grad[3 : 3 + ctx.count],
                ctx.parameters,
            )
        if twice:
            leaves = (*inputs, *ctx.parameters)
            gradients = _Once.apply(len(leaves), *leaves, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, None, *gradients)


class _Outlet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        returned: Returned,
        device: torch.device,
        differentiable: list[bool],
        phony: Tensor,
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.returned, ctx.device = returned, device
        ctx.set_materialize_grads(False)
        # An output that is an input would come back as a view that cannot be changed in place.
        results = tuple(t.detach() for t in outputs)
        ctx.mark_non_differentiable(*(t for t, d in zip(results, differentiable, strict=True) if not d))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ready = torch.cuda.current_stream(ctx.device).record_event() if ctx.device.type == "cuda" else None
        ctx.returned[torch._C._current_graph_task_id()] = OutputGradients(list(gradients), ready)
        return (None, None, None, torch.empty(0, device="cpu"), *(None for _ in gradients))


def _keepsake(minibatch: MiniBatch) -> Tensor:
    """Return an empty tensor that keeps a mini-batch: on its storage, which what autograd makes of it shares."""
    keepsake = torch.empty(0, device="cpu")
    keepsake.untyped_storage().minibatch = minibatch  # type: ignore[attr-defined]
    return keepsake


def _kept_by(keepsake: Tensor) -> MiniBatch:
    return keepsake.untyped_storage().minibatch  # type: ignore[attr-defined, no-any-return]


def _check_same(parameters: Sequence[Tensor], minibatch: MiniBatch) -> None:
    """Raise if a pipeline that a checkpoint called again has other parameters than in its first call."""
    known = {id(parameter) for stage in minibatch.parameters for parameter in stage}
    if any(parameter.requires_grad and id(parameter) not in known for parameter in parameters):
        raise RuntimeError(
            "a parameter of a pipeline has been replaced between its forward and its recomputation by "
            "torch.utils.checkpoint, for example by torch.func.functional_call; keep the pipeline out of the checkpoint"
        )


class _Once(torch.autograd.Function):
    """Lets gradients pass, but not be differentiated again, with respect to whatever they depend on."""

    @staticmethod
    def forward(ctx: Any, count: int, *leaves_and_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.detach() for g in leaves_and_gradients[count:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "gradients that came through GPipe cannot be differentiated again: it does not support double backward "
            "(create_graph=True)"
        )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (phony.data, *[t.detach() for t in tensors])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise AssertionError("gradients are taken out of the graph before they get here")


# What `_Enter.apply` comes to, less a look at functorch, whose transforms have no place in a worker.
_enter: Any = super(torch.autograd.Function, _Enter).apply


def enter(
    phony: Tensor, tensors: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[list[Tensor | None], list[GradientEdge | None], Tensor | None]:
    """Make tensors the roots of a partition's own graph.

    Return them, the edges their gradients arrive at, and an empty tensor that keeps the edges valid. The roots are no
    leaves, so that a first layer may change them in place, and nothing here keeps them alive. ``phony`` is any empty
    tensor that requires grad, for the roots to require it too.
    """
    places = [k for k, need in enumerate(needed) if need and tensors[k] is not None]
    entered = list(tensors)
    edges: list[GradientEdge | None] = [None] * len(entered)
    if not places:
        return entered, edges, None
    roots = _enter(phony, *[tensors[k] for k in places])
    anchor = roots[0]
    node = anchor.grad_fn
    for output_nr, k in enumerate(places, start=1):
        entered[k], edges[k] = roots[output_nr], GradientEdge(node, output_nr)
    return entered, edges, anchor


class _PythonEdge(GradientEdge):
    """Leads to a node that is written in Python. Such a node does not keep its graph alive, but one above it does.

    `get_gradient_edge` sees to that only from torch 2.9 on.
    """

    owner: Node | None


def edge_of(tensor: Tensor | None, anchor: Tensor | None = None) -> GradientEdge | None:
    """Return where the gradient of ``tensor`` arrives in its graph, without keeping the tensor alive.

    ``anchor`` is that of the graph's roots, one of which the tensor may be.
    """
    if tensor is None or not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, torch._C._FunctionBase) and (anchor is None or node is not anchor.grad_fn):
        edge = _PythonEdge(node, tensor.output_nr)
        with torch.enable_grad():
            edge.owner = tensor.view_as(tensor).grad_fn
        return edge
    return GradientEdge(node, tensor.output_nr)  # what `get_gradient_edge` returns, sooner
