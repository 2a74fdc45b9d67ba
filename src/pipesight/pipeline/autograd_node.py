"""The pipeline as one node of the caller's autograd graph.

::

    input, parameters ──> Inlet ──> phony ──> Outlet ──> outputs
                                       outputs of the last partition ─┘

The partitions' own graphs are not part of it. In backward, ``Outlet`` (on the output's device) puts the gradients of
the outputs aside; ``Inlet`` runs the backward of the mini-batch on the workers, and returns the gradients of the input
and the parameters. The phony tensor is on the CPU, so autograd runs ``Inlet`` in the thread that called ``backward()``,
where it can wait for the workers. Autograd has one thread for each CUDA device: a wait in it would block every other
backward on that device. Two callers could then wait for each other forever, if a layer differentiates something in the
forward of one of them.

``Inlet`` keeps the tape, with all that the layers saved. Inside ``torch.utils.checkpoint``, the checkpoint decides what
is kept: the tape is attached to an empty tensor, its holder, which is saved as any layer would save its input. The
checkpoint drops it, and when ``Inlet`` asks for it, calls the pipeline again, which makes another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipesight._torch.autograd import current_backward
from pipesight.pipeline.backward import run_backward
from pipesight.pipeline.gradients import OutputGradients
from pipesight.pipeline.minibatch import Tape

__all__ = ["connect"]

Returned: TypeAlias = dict[int, OutputGradients]
"""Gradients on their way from ``Outlet`` to ``Inlet``. Several threads may differentiate one output: what belongs
together has autograd's number of the run."""


def connect(tape: Tape, inputs: Sequence[Tensor], outputs: Sequence[Tensor], differentiable: list[bool]) -> Any:
    """Return ``outputs`` as results of the caller's graph: those marked ``differentiable`` lead to ``tape``."""
    used, parameters = tape.used()
    inputs = [t if k in used else t.detach() for k, t in enumerate(inputs)]
    returned: Returned = {}
    phony = _Inlet.apply(tape, returned, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    device = tape.minibatch.engine.partitions[-1].device
    return _Outlet.apply(returned, device, differentiable, phony, *outputs)  # type: ignore[no-untyped-call]


class _Inlet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, returned: Returned, count: int, *leaves: Tensor) -> Tensor:
        ctx.returned, ctx.count, ctx.parameters = returned, count, leaves[count:]
        inputs = [leaf for leaf in leaves[:count] if leaf.requires_grad]
        if tape.minibatch.caller.in_checkpoint:
            ctx.tape = None
            ctx.save_for_backward(_holder_of(tape), *inputs)
        else:
            ctx.tape = tape
            ctx.save_for_backward(*inputs)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        twice = torch.is_grad_enabled()
        tape: Tape | None = ctx.tape
        inputs: tuple[Tensor, ...] = ()
        if tape is None:
            holder, *inputs = ctx.saved_tensors  # only once, since a checkpoint gives a tensor only once
            tape = _tape_of(holder)
            _check_same(ctx.parameters, tape)
        elif twice:
            inputs = ctx.saved_tensors
        with torch.no_grad():
            gradients = run_backward(
                tape,
                ctx.returned.pop(current_backward()),
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
        ctx.returned[current_backward()] = OutputGradients(list(gradients), ready)
        return (None, None, None, torch.empty(0, device="cpu"), *(None for _ in gradients))


def _holder_of(tape: Tape) -> Tensor:
    """Return an empty tensor that keeps a tape on its storage, which copies made by autograd share."""
    holder = torch.empty(0, device="cpu")
    holder.untyped_storage().tape = tape  # type: ignore[attr-defined]
    return holder


def _tape_of(holder: Tensor) -> Tape:
    return holder.untyped_storage().tape  # type: ignore[attr-defined, no-any-return]


def _check_same(parameters: Sequence[Tensor], tape: Tape) -> None:
    """Raise if a pipeline that a checkpoint called again has other parameters than in its first call."""
    known = {id(parameter) for of_partition in tape.parameters for parameter in of_partition}
    if any(parameter.requires_grad and id(parameter) not in known for parameter in parameters):
        raise RuntimeError(
            "a parameter of a pipeline was replaced between its forward and its recomputation by "
            "torch.utils.checkpoint, for example by torch.func.functional_call; keep the pipeline out of the checkpoint"
        )


class _Once(torch.autograd.Function):
    """Passes gradients on, but raises if they are differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, *leaves_and_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.detach() for g in leaves_and_gradients[count:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "gradients that come from a pipeline cannot be differentiated again: it does not support double backward "
            "(create_graph=True)"
        )
