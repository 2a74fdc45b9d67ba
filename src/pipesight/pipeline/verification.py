"""Compare a pipeline with the plain model on one mini-batch: outputs, and the gradients of all parameters.

Both are copies, so that nothing is left behind. The plain one is called with each micro-batch in turn. A model that
draws random numbers, such as one with dropout, is compared in eval mode: in a pipeline, each task has a stream of its
own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipesight._logger import own_logger
from pipesight.pipeline.calls import SplitCall, split_call
from pipesight.pipeline.flattening import Flat
from pipesight.pipeline.outputs import Merge, flatten_output

if TYPE_CHECKING:
    from pipesight.pipeline.any_model import Pipeline

__all__ = ["verify_call"]

logger = own_logger(__name__)

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-9}
_USUAL_TOLERANCE = 1e-4


def verify_call(
    pipe: Pipeline,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    merge: Callable[[Sequence[Flat], SplitCall], Merge],
) -> None:
    """Raise if a pipeline computes something else for a call than its model does.

    Args:
        pipe: The pipeline.
        args: Of the call.
        kwargs: Of the call.
        merge: Puts the outputs of micro-batches together.
    """
    with torch.random.fork_rng():
        mode = "training"
        outputs, plain = _run_plain(pipe, args, kwargs, merge, trains=True)
        if outputs is None:  # it drew random numbers
            mode = "eval"
            outputs, plain = _run_plain(pipe, args, kwargs, merge, trains=False)
        assert outputs is not None
        twin = copy.deepcopy(pipe).train(mode == "training")
        twin.zero_grad()
        some, more = split_call(args, kwargs, 1, pipe._dims).calls[0]  # its own: a call may fill a cache among them
        found = flatten_output(twin(*some, **more), pipe._dims)
    for names, truth, tensor in zip(found.names, outputs, found.tensors, strict=True):
        _compare(names[0], truth, tensor)
    _differentiate(outputs)
    _differentiate(found.tensors)
    # Some gradients are what is left where others cancel, such as those of the biases of keys in attention.
    scale = max(
        (float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None and p.numel()), default=0.0
    )
    for (name, truth), parameter in zip(plain.named_parameters(), twin.parameters(), strict=True):
        if (truth.grad is None) != (parameter.grad is None):
            who = "pipeline" if parameter.grad is None else "plain model"
            raise RuntimeError(f"the {who} has no gradient of {name!r}, though the other has one; {_ADVICE}")
        if truth.grad is not None and parameter.grad is not None:
            _compare(f"{name}.grad", truth.grad, parameter.grad, scale / 100)
    logger.info("compared with the plain model in %s mode: same outputs, same gradients", mode)


_ADVICE = "do not train with these cuts, and report the model to pipesight"


def _run_plain(
    pipe: Pipeline, args: Any, kwargs: Any, merge: Callable[[Sequence[Flat], SplitCall], Merge], *, trains: bool
) -> tuple[list[Tensor] | None, nn.Module]:
    """Return the outputs of the plain model, if it drew no random numbers in training mode, and a copy of it."""
    plain = copy.deepcopy(pipe.module).train(trains)
    if len({*pipe.devices}) > 1:
        plain.to(pipe.devices[0])
    plain.zero_grad()
    call = split_call(args, kwargs, pipe.chunks, pipe._dims)
    before = torch.get_rng_state()
    flats = [flatten_output(plain(*some, **more), call.dims) for some, more in call.calls]
    if trains and not torch.equal(before, torch.get_rng_state()):
        return None, plain
    together = merge(flats, call)
    return [together.join(k, [flat.tensors[k] for flat in flats]) for k in range(together.count)], plain


def _differentiate(tensors: Sequence[Tensor]) -> None:
    """Run a backward in which every number of every output counts, each differently."""
    terms = [t.double().sin().sum() + t.double().square().mean() for t in tensors if t.requires_grad]
    if terms:
        torch.stack([term.to(terms[0].device) for term in terms]).sum().backward()


def _compare(name: str, truth: Tensor, tensor: Tensor, least: float = 1e-3) -> None:
    truth, tensor = truth.detach(), tensor.detach().to(truth.device)
    if truth.shape != tensor.shape or truth.dtype != tensor.dtype:
        raise RuntimeError(
            f"{name!r} has shape {tuple(tensor.shape)} and type {tensor.dtype} in the pipeline, but "
            f"{tuple(truth.shape)} and {truth.dtype} in the plain model; {_ADVICE}"
        )
    if not truth.is_floating_point():
        difference, limit = float((truth != tensor).sum()), 0.0
    else:
        wide, other = truth.double(), tensor.double()
        same = (wide == other) | (wide.isnan() & other.isnan())
        difference = float((wide - other).abs().masked_fill(same, 0).nan_to_num(torch.inf).max()) if wide.numel() else 0
        largest = float(wide.abs().nan_to_num(0, 0, 0).max()) if wide.numel() else 0.0
        limit = _TOLERANCE.get(truth.dtype, _USUAL_TOLERANCE) * max(largest, least)
    if difference > limit:
        raise RuntimeError(
            f"{name!r} differs from the plain model's by up to {difference:.3g} (allowed: {limit:.3g}); {_ADVICE}"
        )
