"""The compiled modules of a watched model while its layers have hooks: measured as they are, or run uncompiled.

A compiled module inside of the model stays compiled where all that is asked of its layers is their outputs and
gradients, for values that nobody waits for. Others, and a model that is compiled as a whole, run uncompiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from pipesight._torch.compiled_modules import CompiledModules, HookGuards, run_uncompiled_alone
from pipesight.stats.model_watch._compiled_part import CompiledPart
from pipesight.stats.model_watch._hook import OutsideHook
from pipesight.stats.model_watch._layer_hooks import LayerHooks
from pipesight.stats.model_watch._output_hook import OutputHook

__all__ = ["CompiledParts"]


class Watcher(Protocol):
    """Who logs the tensors."""

    def counted(self) -> bool:
        """Whether the forward of a layer is logged."""

    def keeps_graph(self) -> bool:
        """Whether a backward through this forward may be logged."""

    def measure_here(self) -> None:
        """Measure what waits on the current stream."""


class CompiledParts:
    """Runs the compiled modules of a model so that its layers are measured.

    Args:
        watch: Who logs.
        model: The model.
        wrapped: The model in its wrappers.
        hooks: Those of the layers.
        compilable: Whether the hooks of outputs and gradients may be compiled.
    """

    def __init__(
        self, watch: Watcher, model: nn.Module, wrapped: nn.Module, hooks: LayerHooks, *, compilable: bool
    ) -> None:
        self._watch: Watcher = weakref.proxy(watch)  # it has this; a cycle would keep the model
        self._model, self._hooks, self._compilable = model, hooks, compilable
        self._modules, self._guards = CompiledModules(wrapped), HookGuards()
        self._outputs: dict[nn.Module, OutputHook] = {}
        self._refused: set[nn.Module] = set()
        self._kept: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._owned: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the layers of all that is kept
        self._new = False  # whether anything has been compiled since the step was prepared

    @property
    def may_be_new(self) -> bool:
        """Whether a module may have been compiled since `run`."""
        return self._new

    def attach(self) -> None:
        """Begin: what is compiled from now on is valid only for the hooks that layers have then."""
        self._guards.turn_on()

    def add_layer(self, layer: nn.Module, hook: OutputHook) -> None:
        """Note the hook that a layer's outputs and gradients are logged by."""
        self._outputs[layer] = hook

    def refuse(self, layer: nn.Module) -> None:
        """Note a layer whose hooks cannot be compiled."""
        self._refused.add(layer)

    def add(self, compiled: object, prepare: Callable[[], None]) -> None:
        """Note what ``torch.compile`` returned."""
        self._guards.turn_on()
        self._modules.add(compiled)
        self._new = True
        prepare()
        self._new = True  # by `Module.compile`, which has yet to take it

    def run(self, *, hooked: bool) -> None:
        """Have compiled modules run so that the hooks are called, or as they are."""
        if hooked:
            self._modules.run_uncompiled(self._keeps, anew=self._new)
        else:
            self._modules.restore()
        self._new = False

    def stop(self) -> None:
        """End."""
        self._modules.restore()
        self._guards.turn_off()
        self._outputs.clear()

    def _keeps(self, module: nn.Module) -> bool:
        """Whether a module stays compiled; if so, its layers are measured as those of a part."""
        if module is self._model or not self._compilable:
            return False
        if module not in self._kept:
            layers = [*module.modules()]
            noted = [layer for layer in layers[1:] if layer in self._outputs]
            self._kept[module] = self._refused.isdisjoint(layers) and not any(map(self._owned.__contains__, noted))
            if self._kept[module] and noted:
                self._owned.update(noted)
                self._attach(module, [self._outputs[layer] for layer in noted])
        return self._kept[module]

    def _attach(self, module: nn.Module, layers: list[OutputHook]) -> None:
        watch, counts = self._watch, False
        run_uncompiled_alone(OutputHook.__call__)  # where compiled code falls apart
        part = CompiledPart(layers, watch.measure_here)
        for place, hook in enumerate(layers):
            hook.belong_to(part, place)

        def before(*_: Any) -> None:
            nonlocal counts
            counts = watch.counted()
            part.begin(differentiates=watch.keeps_graph())

        outer = self._outputs.get(module)

        def after(layer: nn.Module, args: Any, output: Any) -> None:
            part.end(output if type(output) is Tensor else None, counts=counts)
            if outer is not None:
                outer(layer, args, output)

        self._hooks.before(module, OutsideHook(before))
        if outer is None:
            self._hooks.after(module, OutsideHook(after))
        else:
            self._hooks.replace(outer, OutsideHook(after))
