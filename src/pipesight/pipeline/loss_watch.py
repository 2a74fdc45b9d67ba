"""Note what losses are means over while they are computed without a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesight._nested import tensors_in
from pipesight._torch.loss_graph import LossPart, loss_parts

__all__ = ["LossWatch"]

_F = nn.functional
_REDUCING = {_F.cross_entropy, _F.nll_loss, _F.mse_loss, _F.l1_loss, _F.ctc_loss, _F.smooth_l1_loss, _F.huber_loss}
_REDUCING |= {_F.binary_cross_entropy, _F.binary_cross_entropy_with_logits}
_REDUCING |= {torch.mean, Tensor.mean, torch.sum, Tensor.sum}


class LossWatch(TorchFunctionMode):
    """Records the graph of torch's losses, means and sums, and of what is made of them, for one micro-batch.

    A scalar that is computed without gradients gets a twin with a graph that begins at the function that reduced a
    tensor to it. What is computed of such scalars is computed of their twins, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the one without a graph

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() or "out" in kwargs:
            return function(*args, **kwargs)
        if self._twins and self._is_made_of_twins((*args, *kwargs.values())):
            result = function(*args, **kwargs)
            if isinstance(result, Tensor):
                with torch.inference_mode(False), torch.enable_grad():
                    twin = function(*map(self._twin, args), **{key: self._twin(value) for key, value in kwargs.items()})
                if twin.grad_fn is not None:
                    self._twins[id(result)] = (result, twin)
            return result
        if function not in _REDUCING or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.enable_grad():
            values = {key: _normal(value) for key, value in kwargs.items()}
            twin = function(_normal(args[0]).detach().requires_grad_(), *map(_normal, args[1:]), **values)
        result = twin.detach()
        # A mean over the samples, then one over what is left. Means inside a layer have samples, and no twins.
        if twin.grad_fn is not None and (result.dim() == 0 or _first_is_reduced(args, kwargs)):
            self._twins[id(result)] = (result, twin)
        return result

    def parts(self, loss: Tensor) -> list[LossPart]:
        """Return the parts of a loss."""
        if self._has_twin(loss):
            return loss_parts(self._twin(loss))
        return [LossPart("other", what="what has no graph")]

    def _is_made_of_twins(self, values: Sequence[Any]) -> bool:
        """Whether a call uses tensors with twins and, beside them, nothing but numbers."""
        tensors = list(tensors_in(list(values)))
        return any(self._has_twin(one) for one in tensors) and all(self._has_twin(t) or t.dim() == 0 for t in tensors)

    def _has_twin(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(self._has_twin(one) for one in value)
        return isinstance(value, Tensor) and id(value) in self._twins

    def _twin(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([self._twin(one) for one in value]) if self._has_twin(value) else value
        return self._twins[id(value)][1] if self._has_twin(value) else _normal(value)


def _first_is_reduced(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a mean or sum is over the first dimension."""
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = (dims,) if isinstance(dims, int) else dims
    return isinstance(dims, tuple | list) and (0 in dims or -args[0].dim() in dims)


def _normal(value: Any) -> Any:
    """Return a tensor that a graph may hold, which one of ``torch.inference_mode`` is not."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
