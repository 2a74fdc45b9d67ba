"""The weights of watched layers and their gradients: logged when an optimizer is about to use them.

forward, backward --> optimizer.step(): before it, weights and gradients --> updated weights
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["Weights"]

Log = Callable[[list[tuple[str, str, Tensor]], bool], None]


def _nothing(*_: object) -> None:
    pass


class Weights:
    """Logs ``weight`` and ``wgrad`` of layers, each once a step.

    Args:
        model: Whose optimizers are meant.
        log: Takes layers, names and tensors, and whether these are as they were before the forward.
        begins: Called when a step begins with the optimizer, which is given a closure and calls the model itself.
        repeats: Called before an optimizer steps for the second time since a step has ended.
        ended: Called when an optimizer has stepped.
    """

    def __init__(
        self,
        model: nn.Module,
        log: Log,
        *,
        begins: Callable[[], None],
        repeats: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._log, self._begins, self._repeats, self._ended = log, begins, repeats, ended
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._model = model
        self._layers: list[tuple[str, nn.Module, tuple[str, ...]]] = []
        self._measured: set[tuple[str, str]] = set()
        self._ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def add(self, name: str, layer: nn.Module, tensors: tuple[str, ...]) -> None:
        """Watch the weight of a layer, or all its parameters if it has no ``weight``."""
        self._layers.append((name, layer, tensors))

    def attach(self) -> list[RemovableHandle]:
        """Begin to listen to optimizers."""
        return [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def stop(self) -> None:
        """Log no more, and hold nobody: who logs holds this, and the model would stay until garbage is collected."""
        self._layers.clear()
        self._log = self._begins = self._repeats = self._ended = _nothing

    def end_step(self) -> None:
        """Log what no optimizer came by, and begin anew."""
        self._log_those(None, ("weight", "wgrad"))
        self._measured.clear()
        self._stepped.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        if optimizer in self._stepped:
            self._repeats()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._log_those(_members(optimizer), ("weight", "wgrad"))
        else:  # it has yet to make the gradients
            self._begins()
            self._log_those(_members(optimizer), ("weight",))

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._is_ours(optimizer):
            self._log_those(_members(optimizer), ("wgrad",))
            self._stepped.add(optimizer)
            self._ended()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._ours:
            self._ours[optimizer] = not _members(optimizer).isdisjoint(map(id, self._model.parameters()))
        return self._ours[optimizer]

    def _log_those(self, among: set[int] | None, tensors: tuple[str, ...]) -> None:
        wanted: dict[bool, list[tuple[str, str, Tensor]]] = {True: [], False: []}
        for name, layer, chosen in self._layers:
            for tensor_name in tensors:
                if tensor_name not in chosen or (name, tensor_name) in self._measured:
                    continue
                members = [p for p in _parameters(layer) if among is None or id(p) in among]
                values = members if tensor_name == "weight" else [p.grad for p in members if p.grad is not None]
                if values:
                    self._measured.add((name, tensor_name))
                    for value in values:
                        # What an optimizer unknown to torch may have changed has a gradient.
                        early = tensor_name == "weight" and (among is not None or value.grad is None)
                        wanted[early].append((name, tensor_name, value))
        for early, entries in wanted.items():
            if entries:
                self._log(entries, early)


def _parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Return the weight of a layer; asked in each step, since wrappers such as FSDP put another in its place."""
    weight = getattr(layer, "weight", None)
    return [weight] if isinstance(weight, nn.Parameter) else list(layer.parameters())


def _members(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
