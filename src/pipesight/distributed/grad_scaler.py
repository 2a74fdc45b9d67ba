"""Loss scaling over ranks: an overflow on one rank counts on all, so that they skip the same steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from pipesight.distributed.pipeline import DistributedPipeline

__all__ = ["GradScaler", "refuse_plain_scalers"]


class GradScaler(torch.amp.GradScaler):
    """Scales the loss of a :class:`DistributedPipeline` against underflow in float16, the same on every rank.

    Every rank makes the same calls::

        scaler = pipesight.distributed.GradScaler(pipeline)
        for input, target in loader:
            optimizer.zero_grad()
            loss = pipeline.step(input, target, scaler=scaler)
            scaler.unscale_(optimizer)
            pipeline.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()

    The loss that ``step`` returns is not scaled. A rank without parameters has no optimizer, and passes ``None``.

    Args:
        pipeline: Its ranks agree on overflows.
        init_scale: As for ``torch.amp.GradScaler``, and so are the others.
        growth_factor: See ``init_scale``.
        backoff_factor: See ``init_scale``.
        growth_interval: See ``init_scale``.
        enabled: See ``init_scale``.
    """

    def __init__(
        self,
        pipeline: DistributedPipeline,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._mesh, self._monitor = pipeline._mesh, pipeline._monitor
        device = self._mesh.device.type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def factor(self) -> float | None:
        """Return what a step multiplies its loss by; ``None`` if the scaler is not enabled."""
        if not self.is_enabled():
            return None
        self.scale(torch.zeros((), device=self._mesh.device))  # so that there is a scale
        return float(self.get_scale())

    def unscale_(self, optimizer: Optimizer | None) -> None:
        """Divide gradients by the scale, as ``torch.amp.GradScaler`` does."""
        if optimizer is not None:
            super().unscale_(optimizer)
        elif self.is_enabled():
            state = self._per_optimizer_states[id(None)]
            state["found_inf_per_device"], state["stage"] = self._agreed({}), OptState.UNSCALED

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Let the optimizer make its step, unless a gradient on any rank was infinite or NaN."""
        if optimizer is not None:
            return super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and self._per_optimizer_states[id(None)]["stage"] is OptState.READY:
            self.unscale_(None)
        return None

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        return self._agreed(super()._unscale_grads_(*args, **kwargs))

    def _agreed(self, found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Return for every device what was found on any rank."""
        flags = [float(t.full_tensor() if hasattr(t, "full_tensor") else t) for t in found.values()]
        shared = torch.tensor(max(flags, default=0.0), device="cpu")
        with self._monitor.explaining("the overflows of other ranks"):
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._mesh.control_group)
        return {device: shared.to(device) for device in found or (self._mesh.device,)}


_guarded: Any = WeakIdKeyDictionary()


def refuse_plain_scalers(parameters: Iterable[nn.Parameter]) -> None:
    """Make torch's own scaler, which knows only this rank, raise if it is used for one of these parameters."""
    _install()
    for parameter in parameters:
        _guarded[parameter] = True


def _is_guarded(optimizer: Optimizer) -> bool:
    return any(parameter in _guarded for group in optimizer.param_groups for parameter in group["params"])


@functools.cache
def _install() -> None:
    original = torch.amp.GradScaler.step

    @functools.wraps(original)
    def step(self: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self.is_enabled() and not isinstance(self, GradScaler) and _is_guarded(optimizer):
            raise RuntimeError(
                f"torch's {type(self).__name__} sees only the overflows of this rank, so the ranks of a pipeline would "
                "skip different steps and scale differently; use pipesight.distributed.GradScaler(pipeline), and "
                "pipeline.step(..., scaler=scaler)"
            )
        return original(self, optimizer, *args, **kwargs)

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
