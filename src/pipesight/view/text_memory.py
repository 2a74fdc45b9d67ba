"""Memory, for the terminal: a row for each partition, or each device, and the layers that keep most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pipesight._formatting import size
from pipesight._plurals import count_of
from pipesight.analysis.memory import MemoryReport
from pipesight.view.text_layout import Style, columns, shown_width

__all__ = ["memory_block"]

ROWS = 16
"""How many partitions are listed; of more, those that need most."""
LAYERS = 5
"""How many layers are listed."""
LONG = ("weights", "gradients", "optimizer", "inputs", "activations")
"""What the parts are called."""
SHORT = ("weights", "grads", "optim.", "inputs", "activ.")
"""Likewise where the terminal is narrow."""


def memory_block(found: MemoryReport, style: Style) -> list[str]:
    """List peaks and what they are made of."""
    if found.partitions:
        entries = sorted(found.partitions, key=lambda entry: -entry.peak)
        kept = {(entry.partition, entry.rank) for entry in entries[:ROWS]}
        ranks = len({entry.rank for entry in entries}) > 1
        head = ["partition", *["rank"] * ranks]
        rows = [
            [str(entry.partition), *[str(entry.rank)] * ranks, size(entry.peak), *_parts(entry.parts)]
            for entry in found.partitions
            if (entry.partition, entry.rank) in kept
        ]
        more, noun = len(entries) - len(rows), "partition"
    else:
        head = ["rank", "device"]
        rows = [[str(e.rank), e.device, size(e.peak), *_parts(e.parts)] for e in found.devices[:ROWS]]
        more, noun = len(found.devices) - len(rows), "device"
    for parts in (LONG, SHORT):
        heads = [style.paint(cell, "dim") for cell in (*head, "peak", *parts)]
        table = columns([heads, *rows], align="r" * len(heads))
        if max(map(shown_width, table)) <= style.width - 2:
            break
    else:
        table = columns([heads, *rows], align="r" * len(heads), width=style.width - 2)
    lines = [style.paint(f"Memory (peak of {count_of(len(found.steps), 'step')} where it was counted)", "bold")]
    lines += [f"  {line}" for line in table]
    if more > 0:
        lines.append(style.paint(f"  and {count_of(more, noun)} that need less", "dim"))
    lines += style.wrapped(_devices(found), indent="    ", first="  ") if _devices(found) else []
    layers = sorted((layer for layer in found.layers if layer.kept), key=lambda layer: -layer.kept)
    if layers:
        often = Counter(layer.name for layer in layers)
        named = ", ".join(
            f"{_name(style.plain(layer.name))}{f' of partition {layer.partition}' if often[layer.name] > 1 else ''} "
            f"{size(layer.kept)}"
            for layer in layers[:LAYERS]
        )
        rest = f", and {len(layers) - LAYERS:,} more" if len(layers) > LAYERS else ""
        what = "Layers that keep most for each micro-batch" if found.partitions else "Modules that keep most of a call"
        lines += style.wrapped(f"{what}: {named}{rest}", indent="    ", first="  ")
    return lines


def _parts(parts: Mapping[str, int]) -> list[str]:
    return [size(count) if count else "-" for count in parts.values()]


def _name(layer: str) -> str:
    """Return the name of a layer; a number, as in an `nn.Sequential`, could be taken for a part of the size."""
    return f"layer {layer}" if layer.isdigit() else layer


def _devices(found: MemoryReport) -> str:
    """Say what was allocated on GPUs, in the middle of tasks too."""
    peaks = [
        f"{entry.device} {size(entry.allocator_peak)}" for entry in found.devices if entry.allocator_peak is not None
    ]
    return f"Allocated at most: {', '.join(peaks)}" if peaks else ""
