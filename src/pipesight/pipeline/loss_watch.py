"""Note what losses are means over while they are computed without a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesight._torch.loss_graph import LossPart, loss_parts

__all__ = ["LossWatch"]

_F = nn.functional
_REDUCING = {_F.cross_entropy, _F.nll_loss, _F.mse_loss, _F.l1_loss, _F.smooth_l1_loss, _F.huber_loss}
_REDUCING |= {_F.binary_cross_entropy, _F.binary_cross_entropy_with_logits, torch.mean, Tensor.mean}


class LossWatch(TorchFunctionMode):
    """Records the graph of torch's losses and means alone, for one micro-batch without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[Tensor, list[LossPart]]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _REDUCING or torch.is_grad_enabled() or not args or not isinstance(args[0], Tensor):
            return function(*args, **kwargs)
        if not args[0].is_floating_point() or args[0].is_inference():
            return function(*args, **kwargs)
        with torch.enable_grad():
            result = function(args[0].detach().requires_grad_(), *args[1:], **kwargs)
        if not isinstance(result, Tensor) or "out" in kwargs:
            return result
        bare = result.detach()
        if result.dim() == 0 and result.grad_fn is not None:
            self._found.append((bare, loss_parts(result)))
        return bare

    def parts(self, loss: Tensor) -> list[LossPart]:
        """Return the parts of a loss: those of the function that returned it, or else of all, and something else."""
        for result, parts in self._found:
            if result is loss:
                return parts
        return [*(part for _, parts in self._found for part in parts), LossPart("other", what="what has no graph")]
