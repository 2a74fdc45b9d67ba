"""Compare a pipeline with the plain model on one mini-batch: outputs, and the gradients of all parameters.

Both are copies, so that nothing is left behind. The plain one is called with each micro-batch in turn. A model that
draws random numbers, such as one with dropout, is compared in eval mode: in a pipeline, each task has a stream of its
own.

That finds what the pipeline does wrong, but not arguments that were cut and should not be. So the plain model is also
called with the whole batch, in eval mode. Where it gives something else for it than for micro-batches, other ways to
cut single arguments are tried: if one of them gives the same, it is what is meant.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipesight._logger import own_logger
from pipesight.pipeline.batch_dims import BatchDims
from pipesight.pipeline.calls import split_call
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.loss_merging import LossMerging
from pipesight.pipeline.outputs import Merge, flatten_output
from pipesight.pipeline.step_losses import StepLosses

if TYPE_CHECKING:
    from pipesight.pipeline.any_model import Pipeline
from pipesight._user_warnings import warn_user

__all__ = ["compare", "verify_call", "verify_step"]

logger = own_logger(__name__)

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-9}
_USUAL_TOLERANCE = 1e-4


def verify_call(pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a pipeline computes something else for a call than its model does."""
    args, kwargs = _copied(args, kwargs)
    losses = pipe._losses
    with torch.random.fork_rng():
        if pipe.chunks > 1:
            _check_cutting(pipe, args, kwargs, losses)
        mode = "training"
        outputs, plain = _run_plain(pipe, args, kwargs, losses, trains=True)
        if outputs is None:  # it drew random numbers
            mode = "eval"
            outputs, plain = _run_plain(pipe, args, kwargs, losses, trains=False)
        assert outputs is not None
        twin = copy.deepcopy(pipe).train(mode == "training")
        twin.zero_grad()
        some, more = split_call(args, kwargs, 1, pipe._dims).calls[0]  # its own lists: a call may fill a cache
        found = flatten_output(twin(*some, **more), pipe._dims)
    for names, truth, tensor in zip(found.names, outputs, found.tensors, strict=True):
        compare(names[0], truth, tensor)
    _differentiate(outputs)
    _differentiate(found.tensors)
    _compare_gradients(plain, twin)
    logger.info("compared with the plain model in %s mode: same outputs, same gradients", mode)


def verify_step(pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a step of a pipeline gives another loss, or other gradients, than its model."""
    args, kwargs = _copied(args, kwargs)
    stepper = pipe._stepper
    with torch.random.fork_rng():
        if pipe.chunks > 1:
            _check_cutting(pipe, *stepper.inputs_of(args, kwargs), stepper.merging)
        for mode in ("training", "eval"):
            plain = copy.deepcopy(pipe.module).train(mode == "training")
            if len({*pipe.devices}) > 1:
                plain.to(pipe.devices[0])
            plain.zero_grad()
            call, targets = stepper.split(pipe, args, kwargs)
            losses = StepLosses(stepper.loss_of, stepper.merging, call, targets)
            before = torch.get_rng_state()
            for i, (some, more) in enumerate(call.calls):
                loss = losses.compute(i, plain(*some, **more))
                start = losses.start(i, loss)
                if start is not None:
                    loss.backward(start)
            if mode == "eval" or torch.equal(before, torch.get_rng_state()):
                break  # else it drew random numbers
        truth, factor = losses.finish()
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor
        twin = copy.deepcopy(pipe).train(mode == "training")
        twin.zero_grad()
        some, more = split_call(args, kwargs, 1, pipe._dims).calls[0]  # its own: a call may fill a cache among them
        compare("loss", truth, twin.step(*some, **more))
    _compare_gradients(plain, twin)
    logger.info("compared with the plain model in %s mode: same loss, same gradients", mode)


def _compare_gradients(plain: nn.Module, twin: nn.Module) -> None:
    # Some gradients are what is left where others cancel, such as those of the biases of keys in attention.
    scale = max(
        (float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None and p.numel()), default=0.0
    )
    for (name, truth), parameter in zip(plain.named_parameters(), twin.parameters(), strict=True):
        if (truth.grad is None) != (parameter.grad is None):
            who = "pipeline" if parameter.grad is None else "plain model"
            raise RuntimeError(f"the {who} has no gradient of {name!r}, though the other has one; {_ADVICE}")
        if truth.grad is not None and parameter.grad is not None:
            compare(f"{name}.grad", truth.grad, parameter.grad, scale / 100)


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call with copies of their tensors, which a model may change."""
    flat = flatten((tuple(args), dict(kwargs)))
    args, kwargs = flat.rebuild([tensor.detach().clone() for tensor in flat.tensors])
    return args, kwargs


def _check_cutting(pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any], losses: LossMerging) -> None:
    """Raise if the plain model gives something else for micro-batches than for the batch, and an argument is why.

    Where none is, it only warns: the samples of some models see each other.
    """
    dims = pipe._dims
    guesses = split_call(args, kwargs, pipe.chunks, dims).guesses()
    plain = copy.deepcopy(pipe.module).eval()
    if len({*pipe.devices}) > 1:
        plain.to(pipe.devices[0])

    def together(chunks: int, dims: BatchDims) -> dict[str, Any]:
        call = split_call(args, kwargs, chunks, dims)
        flats = [flatten_output(plain(*some, **more), dims) for some, more in call.calls]
        merged = Merge(flats, call, losses.weigher(call))
        return {
            flats[0].names[k][0]: merged.join(k, [flat.tensors[k].detach() for flat in flats])
            for k in range(merged.count)
        }

    truth = together(1, dims)
    if _first_unlike(truth, together(1, dims)):
        logger.info("not compared with the whole batch: the model is random, or keeps something from call to call")
        return
    failure: Exception | None = None
    found: dict[str, Any] = {}
    try:
        found = together(pipe.chunks, dims)
    except Exception as error:
        failure = error
    for name in [name for name, tensor in truth.items() if tensor.dim() == 0 and losses.is_doubtful(name)]:
        del truth[name]
    unlike = "it fails" if failure is not None else _first_unlike(truth, found)
    if not unlike:
        return
    for name, dim in guesses:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                other = together(pipe.chunks, dims.with_rules([name], dim))
            except Exception:
                continue
        if not _first_unlike(truth, other):
            raise ValueError(
                f"the plain model gives something else for micro-batches than for the batch ({unlike}), and the same "
                f"if {name!r} is {'given whole to each of them' if dim is None else 'cut'}: use "
                f"batch_dim={{{name!r}: {dim!r}}}"
            ) from failure
    if failure is None and not (losses.given is not None or dims.has_contrasts):
        warn_user(
            f"the plain model gives something else for micro-batches than for the batch, even in eval mode ({unlike}): "
            "its samples see each other, or an argument is cut that should not be, or the other way round"
        )


def _first_unlike(truth: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Return which output differs, and how; nothing if all are the same."""
    if missing := [name for name in truth if name not in found]:
        return f"no {missing[0]!r}"
    return next((text for name in truth if (text := _unlike(name, truth[name], found[name]))), "")


_ADVICE = "do not train with these cuts, and report the model to pipesight"


def _run_plain(
    pipe: Pipeline, args: Any, kwargs: Any, losses: LossMerging, *, trains: bool
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
    together = Merge(flats, call, losses.weigher(call))
    return [together.join(k, [flat.tensors[k] for flat in flats]) for k in range(together.count)], plain


def _differentiate(tensors: Sequence[Tensor]) -> None:
    """Run a backward in which every number of every output counts, each differently."""
    terms = [t.double().sin().sum() + t.double().square().mean() for t in tensors if t.requires_grad]
    if terms:
        torch.stack([term.to(terms[0].device) for term in terms]).sum().backward()


def compare(name: str, truth: Tensor, tensor: Tensor, least: float = 1e-3) -> None:
    """Raise if a tensor differs from that of the plain model; numbers below ``least`` need not be as exact."""
    if unlike := _unlike(name, truth, tensor, least):
        raise RuntimeError(f"{unlike}; {_ADVICE}")


def _unlike(name: str, truth: Tensor, tensor: Tensor, least: float = 1e-3) -> str:
    """Return how a tensor differs from that of the plain model; nothing if it does not."""
    truth, tensor = truth.detach(), tensor.detach().to(truth.device)
    if truth.shape != tensor.shape or truth.dtype != tensor.dtype:
        return (
            f"{name!r} has shape {tuple(tensor.shape)} and type {tensor.dtype} in the pipeline, but "
            f"{tuple(truth.shape)} and {truth.dtype} in the plain model"
        )
    if not truth.is_floating_point():
        difference, limit = float((truth != tensor).sum()), 0.0
    else:
        wide, other = truth.double(), tensor.double()
        same = (wide == other) | (wide.isnan() & other.isnan())
        difference = float((wide - other).abs().masked_fill(same, 0).nan_to_num(torch.inf).max()) if wide.numel() else 0
        largest = float(wide.abs().nan_to_num(0, 0, 0).max()) if wide.numel() else 0.0
        limit = _TOLERANCE.get(truth.dtype, _USUAL_TOLERANCE) * max(largest, least)
    if difference <= limit:
        return ""
    return f"{name!r} differs from the plain model's by up to {difference:.3g} (allowed: {limit:.3g})"
