"""The costs of a model that has not been run: its layers are timed one by one, and their bytes counted.

Each layer is timed with the whole sample and with a quarter of it, which tells the part of its time that grows with the
samples from the part that every micro-batch takes, however small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipesight.schedule.costs import Costs, Layer, Link, Peak

if TYPE_CHECKING:
    from torch import nn

    from pipesight.pipeline.profiling import Device, LayerProfile, Sample

__all__ = ["grown", "profile", "with_sizes"]


def profile(
    model: nn.Sequential, sample: Sample, *, timeout: float = 2.0, device: Device = None, link: Link | None = None
) -> Costs:
    """Time the layers of a model, as `pipesight.balance.balance_by_time` does, and count their bytes.

    Example::

        costs = profile(model, torch.rand(256, 3, 224, 224))

    Args:
        model: It is left as it was.
        sample: A whole batch.
        timeout: Seconds to spend, about.
        device: Where to run; by default the current CUDA device, or the CPU where there is none.
        link: The way between devices; by default, it takes no time.
    """
    from pipesight.pipeline.microbatch import as_tuple
    from pipesight.pipeline.partition import verify_sequential
    from pipesight.pipeline.profiling import profile_layers

    verify_sequential(model)
    tensors = as_tuple(sample, "sample")
    samples = int(tensors[0].shape[0])
    whole = profile_layers(model, sample, timeout=timeout / 2, device=device)
    few = max(1, samples // 4)
    part = whole
    if few < samples:
        cut = tuple(tensor[:few] for tensor in tensors)
        part = profile_layers(model, cut if isinstance(sample, tuple) else cut[0], timeout=timeout / 2, device=device)
    names = list(model._modules)  # named_children() skips repeated layers
    before = [None, *whole[:-1]]
    layers = [_layer(*known, few / samples) for known in zip(names, whole, part, before, strict=True)]
    inputs = float(sum(t.nbytes for t in tensors))
    note = "the loss is not in the model, so the memory that it takes is not counted"
    return Costs(tuple(layers), samples=samples, input_bytes=inputs, link=link or Link(), notes=(note,))


def with_sizes(costs: Costs, profiled: Costs) -> Costs:
    """Return costs that were recorded, with bytes that were counted.

    Raises:
        ValueError: They are of different models.
    """
    if len(costs.layers) != len(profiled.layers):
        raise ValueError(
            f"the model must be the one of the run (layers of the model: {len(profiled.layers)}, "
            f"of the run: {len(costs.layers)})"
        )
    layers = [_with_size(layer, known) for layer, known in zip(costs.layers, profiled.layers, strict=True)]
    samples, input_bytes = costs.samples or profiled.samples, profiled.input_bytes
    notes = tuple(note for note in costs.notes if "memory" not in note and "activations" not in note)
    found = replace(costs, layers=tuple(layers), samples=samples, input_bytes=input_bytes, notes=notes)
    if not profiled.loss_bytes:  # a loss that the model does not compute
        return found
    return replace(found, loss_bytes=profiled.loss_bytes, loss_peak=profiled.loss_peak)


def _with_size(layer: Layer, known: Layer) -> Layer:
    sizes = {
        name: getattr(known, name)
        for name in ("kept_bytes", "shared_bytes", "waiting_bytes", "output_bytes", "parameter_bytes", "peak")
    }
    return replace(layer, **sizes)


def _layer(name: str, whole: LayerProfile, part: LayerProfile, before: LayerProfile | None, share: float) -> Layer:
    forward = grown(whole.forward, part.forward, share)
    backward = grown(whole.backward, part.backward, share)
    # What it keeps of its input, the layer before may keep as its output; nobody is before the first one.
    given = 0 if before is None else before.output_bytes
    new = 0 if before is None else max(whole.kept.of_input - before.kept.of_output, 0)
    shared = 0 if before is None else new + given - whole.kept.of_input
    return Layer(
        name,
        forward,
        backward,
        forward_each=whole.forward - forward,
        backward_each=whole.backward - backward,
        kept_bytes=float(whole.kept.own + new),
        shared_bytes=float(shared),
        waiting_bytes=float(whole.kept.waiting),
        output_bytes=float(whole.output_bytes),
        parameter_bytes=float(whole.parameter_bytes),
        peak=_peak(whole, whole.kept.own + new, shared, given),
    )


def _peak(layer: LayerProfile, kept: int, shared: int, given: int) -> Peak:
    """Return what a layer takes of a GPU; what it leaves follows from what it keeps, gets and puts out."""
    if layer.peaks is None:
        return Peak()
    forward, backward = layer.peaks
    left = kept - shared + layer.output_bytes - layer.kept.of_output
    return Peak(forward, left, backward, given - kept - layer.output_bytes)


def grown(whole: float, part: float, share: float) -> float:
    """Return the part of a time that grows with the samples, from the times for all of them and for a share."""
    return whole if share >= 1 else min(max((whole - part) / (1 - share), 0.0), whole)
