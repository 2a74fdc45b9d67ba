"""What `run.json` says of a program: its data loaders, optimizers and models, and where those could be cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from pipesight._nested import tensors_in
from pipesight._patches import Patches, harmless
from pipesight._torch.autograd import in_backward, next_sequence_number
from pipesight._torch.module_internals import is_compiled
from pipesight.pipeline.units import find_units
from pipesight.recording.operator_cost import operator_cost
from pipesight.recording.pipeline_description import is_pipeline

__all__ = ["ProgramDescription"]

_MOST = 16
"""How many loaders, optimizers and models are described."""


class ProgramDescription:
    """What a program trains with. It is found as the program uses it, from `attach` to `detach`."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._loaders: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._found: dict[str, list[dict[str, Any]]] = {"loaders": [], "optimizers": [], "models": []}
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Begin to look."""
        self._patches.wrap(DataLoader, "__iter__", self._loading)
        self._patches.keep(register_optimizer_step_post_hook(self._stepped))

    def detach(self) -> None:
        """Look no more, and measure what launching operators takes where the models are."""
        self._take_off()
        self._patches.undo()
        self._measure_operators()

    @harmless
    def _measure_operators(self) -> None:
        counted = [entry for entry in self._found["models"] if entry.get("operators")]
        for device in {entry["device"] for entry in counted if entry["device"].startswith(("cpu", "cuda"))}:
            cost = operator_cost(torch.device(device))
            for entry in counted:
                if entry["device"] == device:
                    entry["operator_seconds"] = list(cost)

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return what is known so far."""
        return {name: list(entries) for name, entries in self._found.items()}

    def meet_module(self, module: nn.Module) -> None:
        """Describe a module that the program calls, unless it is known, a loss or a pipeline."""
        if module not in self._models and torch.is_grad_enabled() and not in_backward():
            self._models.add(module)
            if len(self._found["models"]) < _MOST and not is_pipeline(module):
                self._describe(module)

    def _describe(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        if not parameters:
            return
        entry: dict[str, Any] = {
            "class": type(module).__name__,
            "device": str(parameters[0].device),
            "parameter_bytes": sum(map(_bytes, parameters)),
            "units": [],
        }
        self._found["models"].append(entry)
        if not any(map(is_compiled, module.modules())):  # whose modules hooks would compile again
            self._watch_units(module, entry)

    def _watch_units(self, module: nn.Module, entry: dict[str, Any]) -> None:
        """Learn from one call in which order the units run, and what they pass on."""
        self._take_off()
        units = find_units(module)
        calls: list[tuple[str, int]] = []
        first = next_sequence_number()  # the call begins now

        @harmless
        def ran(name: str, _: nn.Module, __: Any, output: Any) -> None:
            calls.append((name, sum(map(_bytes, tensors_in(output)))))

        @harmless
        def over(_: nn.Module, __: Any, ___: Any) -> None:
            self._take_off()
            entry["operators"] = next_sequence_number() - first
            order = list(dict.fromkeys(name for name, _ in calls))
            counts = {name: sum(other == name for other, _ in calls) for name in order}
            sizes = dict(calls)
            entry["units"] = [
                {
                    "name": name,
                    "class": type(units[name]).__name__,
                    "calls": counts[name],
                    "parameter_bytes": sum(map(_bytes, units[name].parameters())),
                    "output_bytes": sizes[name],
                }
                for name in order
            ]

        self._handles = [unit.register_forward_hook(partial(ran, name)) for name, unit in units.items()]
        self._handles.append(module.register_forward_hook(over))

    def _take_off(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _loading(self, original: Callable[..., Any], loader: Any) -> Any:
        self._meet_loader(loader)
        return original(loader)

    @harmless
    def _meet_loader(self, loader: Any) -> None:
        if loader not in self._loaders and len(self._found["loaders"]) < _MOST:
            self._loaders.add(loader)
            names = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
            self._found["loaders"].append({name: getattr(loader, name, None) for name in names})

    @harmless
    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._optimizers or len(self._found["optimizers"]) >= _MOST:
            return
        self._optimizers.add(optimizer)
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        first = optimizer.param_groups[0] if optimizer.param_groups else {}
        self._found["optimizers"].append(
            {
                "class": type(optimizer).__name__,
                "module": type(optimizer).__module__,
                "fused": first.get("fused"),
                "foreach": first.get("foreach"),
                "tensors": len(tensors),
                "device": str(tensors[0].device) if tensors else None,
            }
        )


def _bytes(tensor: Tensor) -> int:
    try:
        return int(tensor.nelement()) * tensor.element_size()
    except (RuntimeError, ValueError):  # not initialised yet
        return 0
