"""What an operator costs that has next to nothing to compute: the time of its launch, forward and backward.

Where operators of a model take little longer, its time is that of launching them.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear, relu

from pipesight._torch.autograd import next_sequence_number, run_backward
from pipesight._torch.tensors import without_function_overrides

__all__ = ["operator_cost"]

_LAYERS = 32
_TIMES = 7


def operator_cost(device: torch.device) -> tuple[float, float]:
    """Return the seconds that an operator takes, forward and backward: the median of a few short chains of layers."""
    forward, backward = [], []
    with (
        without_function_overrides(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        x, bias = (
            torch.ones(1, 8, device=device, dtype=torch.float32),
            torch.zeros(8, device=device, dtype=torch.float32),
        )
        weight = torch.ones(8, 8, device=device, dtype=torch.float32, requires_grad=True)
        for _ in range(_TIMES):
            first, begin, out = next_sequence_number(), time.perf_counter(), x
            for _ in range(_LAYERS):
                out = relu(linear(out, weight, bias))
            between, operators = time.perf_counter(), next_sequence_number() - first
            run_backward((get_gradient_edge(out),), (torch.ones_like(out),), (weight,), keep_graph=False)
            end = time.perf_counter()
            forward.append((between - begin) / operators)
            backward.append((end - between) / operators)
    return statistics.median(forward), statistics.median(backward)
