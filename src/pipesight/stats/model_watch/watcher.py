"""`watch`: log the tensors of a model's layers without changes to the training loop.

input ──▶ layer ──▶ output = activation
  ▲          │          ▲
dgrad     weight     gradient (of the output)
          wgrad (of the weight)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipesight import context
from pipesight._patches import Patches
from pipesight._torch.module_internals import WRAPPER_NAMES, forward_hook_tables, is_compiled, uncompiled
from pipesight.stats import api
from pipesight.stats.config.steps import Steps
from pipesight.stats.config_errors import shown
from pipesight.stats.current_session import running
from pipesight.stats.layer_names import named_layers, partitions_of
from pipesight.stats.model_watch._compiled_parts import CompiledParts
from pipesight.stats.model_watch._hook import Hook, Once
from pipesight.stats.model_watch._input_gradients import InputGradients
from pipesight.stats.model_watch._layer_hooks import LayerHooks
from pipesight.stats.model_watch._output_hook import GradientHook, OutputHook
from pipesight.stats.model_watch._readable import has_values, numbers
from pipesight.stats.model_watch._step_counter import AgreedSteps
from pipesight.stats.model_watch._weights import Weights
from pipesight.stats.model_watch.model_part import Model, is_distributed, part_of
from pipesight.stats.recomputation import in_checkpoint, is_recomputing
from pipesight.stats.stats_session import StatsSession
from pipesight.stats.unmatched_names import OUTPUTS, TENSORS, missing_layers, unknown_tensors
from pipesight.stats.watched_tensor import Tap

__all__ = ["TENSORS", "Watch", "watch"]


def watch(
    model: Model,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    auto_step: bool = True,
    **kwargs: Any,
) -> Watch:
    """Log the tensors of a model's layers that a configuration selects.

    The micro-batches of a step are merged into one value; recomputations are not counted. ::

        with pipesight.stats.watch(model, "stats.yaml", log_dir="run"):
            train(model)

    Args:
        model: A plain module or a `GPipe`, before or after it is wrapped by ``DistributedDataParallel`` or
            ``torch.compile``; or a `DistributedPipeline`, whose statistics are merged over the ranks of a stage.
        config: The path of a YAML file, or a dict. Without one, the session of ``initialize`` is used.
        auto_step: End a step when the model is called again after an optimizer's step, and ignore calls in eval mode
            or under ``torch.no_grad()``. Otherwise, call ``step()`` of the session or of the returned `Watch`.
        **kwargs: As for ``initialize``: ``log_dir``, ``tb_writer``, ``statistics_logger`` and so on.

    Returns:
        The watch; its ``remove()``, or the end of its ``with`` block, ends it.

    Raises:
        ConfigError: The configuration has mistakes, or two of its sections select one layer.
        TypeError: Something else was passed for the model, or an argument is unknown.
    """
    _check_arguments(model, config)
    api.refuse_unknown("watch", kwargs, more=["model", "config", "auto_step"])
    if config is None:
        if kwargs:
            raise TypeError(
                f"watch() takes {', '.join(kwargs)} with a configuration, watch(model, config, ...); without one it "
                "uses the session of initialize(), which takes them"
            )
        return Watch(running(), model, auto_step=auto_step, own=False)
    session = api.open_session(config, **kwargs)
    try:
        return Watch(session, model, auto_step=auto_step, own=True)
    except BaseException:
        session.close()
        raise


class Watch:
    """A watched model, from `watch`. Leaving its ``with`` block, or `remove`, ends it.

    Attributes:
        layers: The layers that the configuration selects, and for each the tensors it can log.
    """

    def __init__(self, session: StatsSession, model: Model, *, auto_step: bool, own: bool, prefix: str = "") -> None:
        self._session, self._own, self._auto = session, own, auto_step
        self._part = part_of(model)
        self._wrapped, self._model = self._part.module, _unwrapped(self._part.module)
        self._what = f"this {type(self._model if isinstance(model, nn.Module) else model).__name__}"
        self.layers: dict[str, tuple[str, ...]] = {}
        self._handles: list[RemovableHandle] = []
        self._leaves: list[RemovableHandle] = []  # hooks of tensors that outlive the step
        self._hooks: list[Hook] = []  # of the model
        self._layer_hooks = LayerHooks()
        self._logged: frozenset[Steps] = frozenset()  # the steps that need the hooks of the layers
        self._differentiated = False  # whether gradients are logged
        self._patches = Patches()
        self._compiled = CompiledParts(
            self, self._model, self._wrapped, self._layer_hooks, compilable=self._part.group is None
        )
        self._skipped: set[tuple[str, str]] = set()
        self._stepped = False
        self._steps: AgreedSteps | None = None
        self.inside: bool | None = None
        """Whether a call of the model is under way that counts; None if there is none."""
        self._called = self._trained = False  # the model, at all and in a call that counts
        self._first_step = session.step_count
        self._weights = Weights(
            self._model,
            self._log_weights,
            begins=self._begin,
            repeats=self._begin_unseen,
            ended=self._after_optimizer,
        )
        names = {prefix + plain: layer for name, layer in named_layers(self._model) if (plain := _plain_name(name))}
        scripted = [name for name, layer in names.items() if isinstance(layer, torch.jit.ScriptModule)]
        if scripted:
            session.messages.warning(
                f"{len(scripted)} layers of {self._what}, such as {scripted[0]!r}, are not watched: "
                "modules made by torch.jit.script or torch.jit.trace take no hooks"
            )
        names = {name: layer for name, layer in names.items() if name not in scripted}
        partitions = partitions_of(self._model if isinstance(model, nn.Module) else model)
        session.layers.add(names, {name: partitions[layer] for name, layer in names.items() if layer in partitions})
        selected = session.config.select(names)
        try:
            for name in selected:
                tensors = tuple(t for t in TENSORS if session.actions_of(name, t) is not None)
                if tensors:
                    self.layers[name] = tensors
                    self._attach(name, names[name], tensors)
            self._attach_to_model()
        except BaseException:
            self._detach()
            raise
        if self._part.group is not None:
            session.merging.adopt(self._part.group, self.layers)
        self._warn_of_mistakes(names, list(selected))
        session.before_step.append(self._before_step)
        session.after_step.append(self._prepare)
        self._prepare()
        session.before_close.append(self._warn_if_idle)

    def _warn_of_mistakes(self, names: Collection[str], selected: Sequence[str]) -> None:
        """Say what the configuration names and a model does not have."""
        warn, what = self._session.messages.warning, self._what
        if not selected:
            warn(f"the configuration selects no layer of {what}; its layers have names such as {list(names)[:3]}")
        elif not self.layers:
            warn(f"the configuration logs no tensor of {what}; the tensors of a layer are {', '.join(TENSORS)}")
        config = self._session.config
        missing = [line for section in config.sections if section.enabled for line in missing_layers(section, names)]
        used = {section.name: section for section in config.select(selected).values()}
        unknown = [line for section in used.values() for line in unknown_tensors(section)]
        for line in dict.fromkeys([*missing, *unknown]):
            warn(line)

    def _warn_if_idle(self) -> None:
        """Say why nothing was logged, if so, and if it has not been said at the beginning."""
        if self._session.met or not self.layers:
            return
        what = self._what
        first, last = self._first_step, max(self._first_step, self._session.step_count - 1)
        if not self._called:
            why = f"{what} was not called"
        elif not self._trained:
            why = f"{what} was called in eval mode or under torch.no_grad() only; pass auto_step=False to log that"
        else:
            why = f"the configuration includes none of its steps, {first} to {last}"
        self._session.messages.warning(f"nothing was logged by watch(): {why}")

    def step(self) -> None:
        """End a step, where ``auto_step=False``."""
        if self._auto:
            raise RuntimeError("the optimizer ends the steps; to end them yourself, use watch(..., auto_step=False)")
        self._session.step()

    def flush(self) -> None:
        """Log what was measured so far."""
        self._session.flush()

    def remove(self) -> None:
        """End the watch: log the remaining values and restore the model."""
        self._remove(failed=False)

    def _remove(self, *, failed: bool) -> None:
        """End the watch; if the training failed, do not wait for other ranks, which may be gone."""
        if not self._handles:
            return
        self._detach()
        try:
            if self._auto and not failed and (self._stepped or self._own):
                self._session.step()
            if not failed:
                self._warn_if_idle()
        finally:
            self._session.before_step.remove(self._before_step)
            self._session.after_step.remove(self._prepare)
            self._session.before_close.remove(self._warn_if_idle)
            if self._own:
                self._session.close(alone=failed)

    def _detach(self) -> None:
        for handle in (*self._handles, *self._leaves):
            handle.remove()
        for hook in self._hooks:
            hook.stop()
        self._layer_hooks.remove()
        self._compiled.stop()
        self._session.prepare_anew()
        self._patches.undo()
        self._handles.clear()
        self._leaves.clear()
        self._hooks.clear()
        self._weights.stop()
        if self._steps is not None:
            self._steps.detach()
            self._steps = None
        _forget_compiled(self._wrapped)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._remove(failed=kind is not None)

    def _attach(self, name: str, layer: nn.Module, tensors: tuple[str, ...]) -> None:
        if "input" in tensors:
            self._layer_hooks.before(layer, Hook(partial(self._before_layer, Tap(name, "input"))))
        if "dgrad" in tensors:
            self._attach_to_inputs(name, layer)
        outputs = tuple(Tap(name, t) for t in OUTPUTS if t in tensors)
        if outputs or "gradient" in tensors:
            gradient = self._gradient_hook(name, "gradient") if "gradient" in tensors else None
            hook = OutputHook(self, outputs, gradient)
            self._layer_hooks.after(layer, hook)
            self._compiled.add_layer(layer, hook)
        if "weight" in tensors or "wgrad" in tensors:
            self._weights.add(name, layer, tensors)
        for tensor in tensors:
            actions = self._session.actions_of(name, tensor)
            if tensor not in ("weight", "wgrad") and actions is not None:
                self._logged |= actions.steps
                self._differentiated |= tensor in ("gradient", "dgrad")
                if tensor in ("input", "dgrad") or actions.stops:
                    self._compiled.refuse(layer)

    def _gradient_hook(self, name: str, tensor: str) -> GradientHook:
        return GradientHook(self, (Tap(name, tensor),), as_it_is=self._part.replicas == 1)

    def _attach_to_inputs(self, name: str, layer: nn.Module) -> None:
        gradient = self._gradient_hook(name, "dgrad")
        inputs = InputGradients(layer, partial(self.hook_gradient, gradient), partial(self._warn_of_change, name))

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return inputs.before(args, kwargs) if self.differentiates(gradient) else None

        def after(*_: object) -> None:
            inputs.after()

        self._layer_hooks.before(layer, Hook(before))
        self._layer_hooks.after(layer, Hook(after))

    def _warn_of_change(self, name: str) -> None:
        self._session.messages.warning(
            f"'dgrad' of layer {name!r} is not logged: the layer changes its input in place; "
            "give it an attribute inplace = True"
        )

    def _attach_to_model(self) -> None:
        self._handles += self._weights.attach()
        self._patches.wrap(torch.jit, "script", self._without_hooks)
        self._patches.wrap(torch, "compile", self._guarded)
        self._compiled.attach()
        if self._auto and not isinstance(self._model, torch.jit.ScriptModule):
            self._handles += [
                self._model.register_forward_pre_hook(self._hook(self._before_model), prepend=True),
                self._model.register_forward_hook(self._hook(self._after_model)),
            ]
        if self._auto and self._part.group is not None:
            self._steps = AgreedSteps(self._session, lambda: self._stepped)
            self._steps.attach()
        _forget_compiled(self._wrapped)

    def _without_hooks(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let a model be scripted, which would compile its hooks."""
        tables = [table for m in self._model.modules() for table in forward_hook_tables(m)]
        before = [dict(table) for table in tables]
        try:
            for table in tables:
                for key in [key for key, hook in table.items() if isinstance(hook, Hook)]:
                    del table[key]
            return original(*args, **kwargs)
        finally:
            for table, hooks in zip(tables, before, strict=True):
                table.clear()
                table.update(hooks)

    def _guarded(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note what is compiled, and let code that calls the model be compiled with and without hooks."""
        compiled = original(*args, **kwargs)
        self._compiled.add(compiled, self._prepare)
        return compiled

    def _hook(self, function: Callable[..., object]) -> Hook:
        self._hooks.append(Hook(function))
        return self._hooks[-1]

    def _before_model(self, *_: object) -> None:
        if self._compiled.may_be_new:
            self._prepare()
        self.inside = self._counts() and not self._session.is_captured()
        if self.inside:
            self._begin()

    def _after_model(self, *_: object) -> None:
        self.inside = None
        self._session.measure_waiting()

    def _counts(self) -> bool:
        """Whether a forward that begins is one of training, and the first of it: one that keeps a graph, or will."""
        self._called = True
        if is_recomputing() or (self._auto and not self._model.training):
            return False
        counts = not self._auto or torch.is_grad_enabled() or context.is_checkpointing() or in_checkpoint()
        self._trained |= counts
        return counts

    def _begin(self) -> None:
        """End the last step, if an optimizer has."""
        if self._stepped and self._auto:
            self._stepped = False
            self._session.step()

    def _begin_unseen(self) -> None:
        """End the last step, if layers may have been called since without the model: they say so if they have hooks."""
        if not self._layer_hooks.on:
            self._called = self._trained = True
            self._begin()

    def counted(self) -> bool:
        """Whether a layer's forward is logged: the model's call decides, or the layer's where there is none."""
        if self.inside is not None:
            return self.inside and not is_recomputing()
        if not self._counts():
            return False
        self._begin()
        return True

    def _prepare(self) -> None:
        """Have the layers call, if the step that begins is logged."""
        on = self._needs_hooks(self._session.step_count + (self._stepped and self._auto))
        self._layer_hooks.turn(on=on)
        self._compiled.run(hooked=on)

    def _needs_hooks(self, step: int) -> bool:
        # Without auto_step, the backward may belong to another step than the forward.
        later = self._differentiated and not self._auto
        return later or any(steps.includes(step) for steps in self._logged)

    def _wants(self, tap: Tap) -> bool:
        """Whether a tensor is logged in this step."""
        return self._session.wants(tap)

    def _before_layer(self, tap: Tap, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.counted():
            self.log(tap, numbers((args, kwargs)))

    def differentiates(self, gradient: GradientHook) -> bool:
        """Whether a gradient of this forward will be logged."""
        # Without auto_step, the backward may belong to another step than the forward.
        return self.keeps_graph() and (not self._auto or self._wants(gradient.tap))

    def keeps_graph(self) -> bool:
        """Whether a backward through this forward may be logged."""
        training = not self._auto or self._model.training
        return training and torch.is_grad_enabled() and not self._session.is_captured()

    def measure_here(self) -> None:
        """Measure what waits on the current stream to be measured together."""
        self._session.measure_waiting(here=True)

    def hook_gradient(self, gradient: GradientHook, tensor: Tensor) -> None:
        """Have the gradient of a tensor logged."""
        if self._part.group is not None:
            handle = tensor.register_hook(Once(gradient))
            if tensor.is_leaf:
                self._leaves.append(handle)
        elif (handle := gradient.put_on(tensor)) is not None:
            self._leaves.append(handle)

    def log_gradient(self, tap: Tap, gradient: Tensor) -> None:
        """Log a gradient, as it would be for the whole batch."""
        if self._handles and (self._part.replicas == 1 or self._wants(tap)):
            self.log(tap, (self._part.of_whole_batch(gradient),))

    def log(self, tap: Tap, tensors: Sequence[Tensor]) -> None:
        """Log tensors, if they are logged in this step."""
        for tensor in tensors:
            if self._session.measure_quickly(tap, tensor):
                continue
            if has_values(tensor):
                self._session.log_tensor_stats(tap.layer, tensor, tap.tensor)
            elif (name := (tap.layer, tap.tensor)) not in self._skipped:
                self._skipped.add(name)
                self._session.messages.warning(
                    f"{tap.tensor!r} of layer {tap.layer!r} is skipped: its values cannot be read as real numbers "
                    f"({type(tensor).__name__}, {tensor.dtype})"
                )

    def _log_weights(self, weights: list[tuple[str, str, Tensor]], early: bool) -> None:
        # Every rank of a DistributedDataParallel has all of them, and they are the same.
        alike = self._part.alike
        self._session.log_many([entry for entry in weights if has_values(entry[2])], skip_reduction=alike, early=early)

    def _after_optimizer(self) -> None:
        self._stepped = True
        self._prepare()

    def _before_step(self) -> None:
        self._weights.end_step()
        self._stepped = False
        for handle in self._leaves:
            handle.remove()
        self._leaves.clear()


def _check_arguments(model: object, config: object) -> None:
    """Raise if the model is none, or if it was passed in the place of the configuration."""
    if isinstance(model, nn.Module) or is_distributed(model):
        return
    if isinstance(config, nn.Module) or is_distributed(config):
        raise TypeError(
            "watch() takes the model first, then the configuration "
            f"(model: {shown(model)}, config: {type(config).__name__}); call watch(model, {shown(model)})"
        )
    call = f"watch(model, {shown(model)})" if isinstance(model, str | os.PathLike) else "watch(model, config)"
    raise TypeError(f"model of watch() must be an nn.Module (model: {shown(model)}); call {call}")


def _forget_compiled(model: nn.Module) -> None:
    """Have a compiled model compiled again: compiled code ignores hooks that are added or removed later."""
    if any(is_compiled(m) for m in model.modules()):
        torch.compiler.reset()


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        inner: nn.Module = uncompiled(model)
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def _plain_name(name: str) -> str:
    """Leave out what wrappers put into the names of layers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)
