"""Compare a step over ranks with the plain model, which the last rank puts together from the parts of all.

Both get the same micro-batches. A model that draws random numbers is compared in eval mode, since over ranks each task
has a stream of its own. Nothing is left behind: gradients, buffers, modes and generators are what they were.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipesight._logger import own_logger
from pipesight._torch.loss_graph import loss_parts
from pipesight.context import Where, enter_thread
from pipesight.distributed.agreement import Agreement
from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.model_placement import Placement
from pipesight.distributed.model_stage import ModelBatch
from pipesight.distributed.target_counts import weighed_apart
from pipesight.pipeline.calls import SplitCall
from pipesight.pipeline.randomness import isolated
from pipesight.pipeline.verification import compare

__all__ = ["verify_step"]

logger = own_logger(__name__)


def verify_step(
    model: nn.Module,
    placement: Placement,
    buffers: Mapping[str, int],
    last: int,
    mesh: PipelineMesh,
    agreement: Agreement,
    where: Where,
    run: Callable[[], ModelBatch],
    split: Callable[[], SplitCall],
) -> None:
    """Raise on every rank if a step gives another loss, or other gradients, than the plain model.

    ``buffers`` says which rank of the pipeline has the values of each, by name; every rank has the others. ``run``
    makes the step, and ``split`` cuts the arguments anew, as the model may change them.
    """
    plain = _whole_model(model, placement, buffers, mesh, keep=mesh.position == last)
    with _put_aside(model, placement) as clear, torch.random.fork_rng():
        mode = "training"
        batch = run()
        if any(plan.random for plan in batch.flows):
            mode = "eval"
            model.eval()
            clear()
            batch = run()
        error: Exception | None = None
        if plain is not None:
            for mine, theirs in zip(plain.modules(), model.modules(), strict=True):
                mine.training = theirs.training
            try:
                with _unobserved(where), isolated():
                    loss = _run_plain(plain, batch, split())
                compare("loss", loss, torch.stack(list(batch.loss.values.values())).sum())
            except Exception as found:
                error = found
        agreement.settle({"call": "comparison with the plain model"}, error)
        agreement.settle({"call": "comparison of gradients"}, _compare_gradients(plain, placement, last, mesh))
    if plain is not None:
        logger.info("compared with the plain model in %s mode: same loss, same gradients", mode)


def _whole_model(
    model: nn.Module, placement: Placement, buffers: Mapping[str, int], mesh: PipelineMesh, *, keep: bool
) -> nn.Module | None:
    """Return a copy of the model with all values, on the rank that is to keep it."""
    values = {name: _shared(placement.tensor(name), owner, mesh) for name, owner in placement.owner.items()}
    found = {name: _shared(model.get_buffer(name), owner, mesh) for name, owner in buffers.items()}
    if not keep:
        return None
    plain = copy.deepcopy(model)
    for name, names in placement.aliases.items():
        parameter = nn.Parameter(values[name], placement.tensor(name).requires_grad)
        for alias in names:
            home, _, key = alias.rpartition(".")
            plain.get_submodule(home)._parameters[key] = parameter
    for name, buffer in found.items():
        home, _, key = name.rpartition(".")
        plain.get_submodule(home)._buffers[key] = buffer
    return plain


def _shared(tensor: Tensor, owner: int, mesh: PipelineMesh) -> Tensor:
    """Return a copy of what the owner has."""
    if mesh.position == owner:
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
    if value.numel():
        dist.broadcast(value.view(-1).view(torch.uint8), group=mesh.pipeline_group, group_src=owner)
    return value


@contextlib.contextmanager
def _put_aside(model: nn.Module, placement: Placement) -> Iterator[Callable[[], None]]:
    """Let a block have gradients, buffers and modes of its own; give it what makes those as at its beginning."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = {name: placement.tensor(name).grad for name in placement.owner}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def clear() -> None:
        for name in gradients:
            placement.tensor(name).grad = None
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    clear()
    try:
        yield clear
    finally:
        clear()
        for module, training in modes:
            module.training = training
        for name, gradient in gradients.items():
            placement.tensor(name).grad = gradient


@contextlib.contextmanager
def _unobserved(where: Where) -> Iterator[None]:
    """Let hooks on all modules, those of tracing among them, ignore a block."""
    inside = Where()
    inside.phase = "forward"
    enter_thread(inside)
    try:
        yield
    finally:
        inside.phase = None
        enter_thread(where)


def _run_plain(plain: nn.Module, batch: ModelBatch, split: SplitCall) -> Tensor:
    """Run forward and backward of the plain model for each micro-batch; return the loss of the batch."""
    parts = []
    for i, (args, kwargs) in enumerate(split.calls):
        loss = batch.run(plain, args, kwargs)
        weight = batch.loss.weights[i] * batch.loss.share
        if weight:
            value = weighed_apart(loss_parts(loss), batch.factors[i]) if batch.factors else None
            if loss.requires_grad:
                (loss * weight).backward()
            parts.append((loss.detach() if value is None else value).reshape(()) * weight)
    return torch.stack(parts).sum() if parts else torch.stack(list(batch.loss.values.values())).sum()


def _compare_gradients(
    plain: nn.Module | None, placement: Placement, last: int, mesh: PipelineMesh
) -> RuntimeError | None:
    """Send the gradients of the plain model to the owners of parameters; return what is wrong with one of this rank."""
    truths = {} if plain is None else {name: plain.get_parameter(name).grad for name in placement.owner}
    replicas = len(mesh.pipelines)
    scale = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for gradient in truths.values():
        if gradient is not None and gradient.numel():
            scale = torch.maximum(scale, gradient.abs().max().double())
    scale = _shared(scale, last, mesh)
    wrong: RuntimeError | None = None
    for name, owner in placement.owner.items():
        parameter = placement.tensor(name)
        if not parameter.requires_grad:
            continue
        truth = truths.get(name)
        if truth is None:
            truth = torch.zeros(parameter.shape, dtype=parameter.dtype, device=mesh.device)
        elif replicas > 1:
            dist.all_reduce(truth, group=mesh.replica_group)
            truth /= replicas
        truth = _shared(truth, last, mesh)
        if owner == mesh.position and wrong is None:
            found = torch.zeros_like(truth) if parameter.grad is None else parameter.grad
            try:
                compare(f"{name}.grad", truth, found, float(scale) / 100)
            except RuntimeError as error:
                wrong = error
    return wrong
