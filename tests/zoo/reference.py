"""The truth: the plain model fed the same micro-batches one after the other, its gradients added up.

Shares no code with pipesight.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entry import BATCH, CHUNKS, Call, Entry

RELATIVE = 1e-5
ROUNDING = 3e-7
"""Of the largest gradient: what is left where gradients cancel, such as those of the bias of keys."""


@dataclass
class Result:
    """Outputs of a mini-batch put together, gradients, and buffers after it."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def split(value: Any, batch: int, chunks: int, dims: Mapping[str, int], name: str = "") -> list[Any]:
    """Return what each micro-batch gets of a value: a part of each tensor that has the batch, all else whole."""
    size = -(-batch // chunks)
    count = -(-batch // size)
    if isinstance(value, Tensor):
        dim = dims.get(name, 0)
        if value.dim() > dim and value.size(dim) == batch:
            return list(value.split(size, dim))
        return [value] * count
    if isinstance(value, dict):
        parts = {key: split(one, batch, chunks, dims, key) for key, one in value.items()}
        return [{key: one[i] for key, one in parts.items()} for i in range(count)]
    if isinstance(value, list | tuple):
        lists = [split(one, batch, chunks, dims, name) for one in value]
        return [type(value)(one[i] for one in lists) for i in range(count)]
    return [value] * count


def tensors(value: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value and where they are; those of caches too, which are objects with lists of objects."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for k, one in enumerate(value):
            yield from tensors(one, f"{path}.{k}")
    elif dataclasses.is_dataclass(value) or (hasattr(value, "__dict__") and not callable(value)):
        for key, one in vars(value).items():
            yield from tensors(one, f"{path}.{key}")


def objective(value: Any) -> Tensor:
    """Return the loss of a model; of one without, a sum over all numbers that no two of them weigh alike in."""
    loss = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", None)
    if loss is not None:
        return loss
    found = [t for _, t in tensors(value) if t.requires_grad]
    return torch.stack([(t.sin() + t.square() / 2).sum() / 100 for t in found]).sum()


def micro_batches(entry: Entry, call: Call, chunks: int = CHUNKS, batch: int = BATCH) -> list[Call]:
    """Return the call of each micro-batch."""
    dims = entry.options.get("batch_dim", {})
    names = list(inspect.signature(entry.build().forward).parameters)
    args = [split(one, batch, chunks, dims, name) for one, name in zip(call[0], names, strict=False)]
    named = split(call[1], batch, chunks, dims)
    return list(zip(zip(*args, strict=True) if args else [()] * len(named), named, strict=True))


def shares(calls: list[Call], items: Callable[[dict[str, Any]], float] | None) -> list[float]:
    """Return how much the objective of each micro-batch counts."""
    if items is None:
        return [1.0] * len(calls)
    counts = [items(kwargs) for _, kwargs in calls]
    return [count / sum(counts) for count in counts]


def plain_microbatches(entry: Entry, model: nn.Module, call: Call, chunks: int = CHUNKS, batch: int = BATCH) -> Result:
    """Feed a copy of a model the micro-batches of a call one by one, forward and backward."""
    plain = copy.deepcopy(model)
    calls = micro_batches(entry, call, chunks, batch)
    weights = shares(calls, entry.items)
    outputs = []
    for (args, kwargs), weight in zip(calls, weights, strict=True):
        output = plain(*args, **kwargs)
        (objective(output) * weight).backward()
        outputs.append(dict(tensors(output)))
    merged = {}
    for name in outputs[0]:
        parts = [output[name].detach() for output in outputs]
        if parts[0].dim() == 0 and not parts[0].is_floating_point():
            merged[name] = parts[0]  # a setting of a cache
        elif parts[0].dim() == 0:
            merged[name] = torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum()
        else:
            merged[name] = torch.cat(parts, entry.output_dim)
    return Result(merged, gradients_of(plain), buffers_of(plain))


def piped(pipe: nn.Module, call: Call) -> Result:
    """Run a mini-batch through a pipeline, forward and backward."""
    output = pipe(*call[0], **call[1])
    objective(output).backward()
    outputs = {name: tensor.detach() for name, tensor in tensors(output)}
    return Result(outputs, gradients_of(pipe), buffers_of(pipe))


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def worst(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], floor: float = 0.0
) -> tuple[float, str]:
    """Return the largest difference relative to the largest number of its tensor, and the tensor's name."""
    assert ours.keys() == theirs.keys(), f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
    found = (0.0, "")
    for name, truth in theirs.items():
        mine = ours[name]
        if truth is None or mine is None:
            assert (truth is None) == (mine is None), f"{name}: {'no' if mine is None else 'a'} gradient"
            continue
        assert mine.shape == truth.shape, f"{name}: shape {tuple(mine.shape)}, not {tuple(truth.shape)}"
        assert mine.dtype == truth.dtype, f"{name}: {mine.dtype}, not {truth.dtype}"
        if truth.numel() == 0:
            continue
        difference = (mine.double() - truth.double()).abs().nan_to_num(torch.inf).max().item()
        if not truth.isfinite().all():  # masks are -inf at some places, in both
            same = torch.equal(mine, truth)
            found = max(found, (0.0 if same else torch.inf, name))
        elif difference > 0:
            found = max(found, (difference / (truth.double().abs().max().item() + floor), name))
    return found


def worst_gradient(ours: Result, theirs: Result) -> tuple[float, str]:
    """Return the largest difference of a gradient, and the parameter's name; rounding where they cancel is none."""
    largest = max((g.abs().max().item() for g in theirs.gradients.values() if g is not None), default=0.0)
    assert largest > 0, "the plain model has no gradients"
    return worst(ours.gradients, theirs.gradients, largest * ROUNDING / RELATIVE)


def assert_same(ours: Result, theirs: Result) -> None:
    """Outputs, gradients and buffers are those of the plain model, to rounding."""
    for what, (error, name) in {
        "outputs": worst(ours.outputs, theirs.outputs),
        "gradients": worst_gradient(ours, theirs),
        "buffers": worst(ours.buffers, theirs.buffers),
    }.items():
        assert error <= RELATIVE, f"{what} differ by {error:.2e} of the largest number, most in {name}"
