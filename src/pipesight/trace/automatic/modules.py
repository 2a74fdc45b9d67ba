"""Record the forward and backward of modules, down to a chosen depth.

The backward of a module begins where autograd reaches its output, and ends where it has reached all of its inputs, the
output of another module of the same depth, or is done: it does not say when a module's last gradient is computed. So
what a model computes between two modules inside it counts as its own. The first outermost module gets the whole time
since ``backward()`` was called, so that no time is in two spans of the same depth::

    backward()       |----------------------------------------|
    depth 0          |- criterion -|---------- model ---------|
    depth 1                        |-- layer 1 --|- layer 0 --|
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from pipesight import context
from pipesight._nested import samples_in, tensors_in
from pipesight._patches import Patches, harmless
from pipesight._torch.autograd import in_backward, next_sequence_number
from pipesight._torch.module_internals import GLOBAL_HOOKS_CHECK, register_end_hook
from pipesight._torch.tensors import in_transform, without_function_overrides
from pipesight.trace import _span_events
from pipesight.trace._span_events import Span, begin, end
from pipesight.trace.ai import ai
from pipesight.trace.automatic._step_argument import with_step
from pipesight.trace.gpu_spans import DeviceSpan, device_spans

__all__ = ["ModuleHooks", "end_inner_backwards", "instrument_modules", "on_outermost"]

_UNKNOWN = -1  # the depth of a backward that has not reached any module
_OF_NONE = -2  # the depth of one that reached an inner module first: it is not the backward of an outermost one


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.era = 0
        self.calls: list[_Call] = []
        self.backwards: list[_Call] = []


class _Call:
    """A forward under way, or a backward."""

    __slots__ = ("args", "depth", "inputs", "left", "module", "on_device", "on_gpu", "span")

    def __init__(
        self,
        module: Any,
        depth: int,
        span: Span | None = None,
        args: dict[str, Any] | None = None,
        on_device: DeviceSpan | None = None,
    ) -> None:
        self.module, self.depth, self.span, self.args, self.on_device = module, depth, span, args or {}, on_device
        self.on_gpu = False
        self.inputs = self.left = 0  # how many autograd reaches, and has still to reach

    def end(self) -> None:
        """End its span, if it has one."""
        if self.on_device is not None:
            device_spans.end(self.on_device, with_step(self.args))
        if self.span is not None:
            end(self.span, with_step({**self.span[0].args, **self.args}))


_here = _PerThread()
_eras = itertools.count(1)
_names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


class ModuleHooks:
    """Hooks on all modules. They slow down every call of every module, so they are attached only while needed.

    That is not while a pipeline runs, which records its layers itself, nor in steps that are not recorded.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.marks: list[tuple[int, str]] | None = None
        """If it is a list, it gets autograd's number at the start of each module of an outermost call, and its name."""
        self.outermost_ended: Callable[[nn.Module, Any, Any], None] | None = None
        """Called with a module, its positional arguments and its output, when a call from outside all others ends."""
        self._handles: list[RemovableHandle] = []
        self._suspensions = 0
        self._era = next(_eras)  # calls of an earlier era may have ended unseen
        self._changing = threading.RLock()
        self._removed = False
        self._attach()
        _span_events.on_pass.append(self.suspend)

    def suspend(self, begins: bool) -> None:
        """Remove the hooks, or attach them again once every suspension has ended."""
        with self._changing:
            self._suspensions += 1 if begins else -1
            if self._suspensions and self._handles:
                self._detach()
            elif not self._suspensions and not self._removed:
                self._attach()

    def pause(self, begins: bool) -> None:
        """Suspend for so long that calls under way may end meanwhile, or end that."""
        self._era = next(_eras)
        self.suspend(begins)

    def without(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Take the hooks away during a check, and put the same ones back: else compiled code is compiled again."""
        with self._changing:
            tables = [
                (table, handle.id)
                for handle in self._handles
                for table in (handle.hooks_dict_ref(), *(ref() for ref in handle.extra_dict_ref))
                if table is not None and handle.id in table
            ]
            taken = [(table, key, table.pop(key)) for table, key in tables]
            try:
                return bool(original(*args, **kwargs))  # it may be one of the tables
            finally:
                for table, key, hook in taken:
                    table[key] = hook

    def remove(self) -> None:
        """Remove the hooks for good."""
        with self._changing:
            self._removed = True
            self._detach()
            if self.suspend in _span_events.on_pass:
                _span_events.on_pass.remove(self.suspend)

    def _attach(self) -> None:
        if not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._called),
                register_end_hook(self._ended),
            ]

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if _span_events.is_compiling():
            return
        calls = _here.calls
        if len(calls) >= self.depth and self.marks is None and _here.era == self._era and not _is_open(module, calls):
            return  # most calls of most steps are too deep to be shown
        # In the worker of a pipeline, which records its layers itself.
        if context.current() is not None or in_transform():
            return
        if _here.era != self._era:
            _here.era, _here.calls = self._era, []
        if not _here.calls:
            for told in on_outermost:
                told(module)
            if not self._handles:  # one of them has paused us
                return
        self._started(module, inputs)

    @harmless
    def _started(self, module: nn.Module, inputs: Any) -> None:
        calls, node = _here.calls, ai.compute.forward
        call = _Call(module, len(calls))
        outermost = calls[0].module if calls else module
        if self.marks is not None:
            if not calls:
                self.marks.clear()
            layer = _args(module, outermost, len(calls)).get("layer")
            self.marks.append((next_sequence_number(), layer or type(module).__name__))
        if len(calls) < self.depth and node.recording:
            if in_backward():  # checkpointing calls a part of the model again
                outermost = next((model for model in _names if id(outermost) in _names[model]), outermost)
            call.args = _args(module, outermost, len(calls))
            if not torch.is_grad_enabled():
                call.args["grad"] = False
            with without_function_overrides():
                first = next(tensors_in(inputs), None)
                call.on_gpu = first is not None and first.is_cuda
                if not calls and (samples := samples_in(inputs)) is not None:
                    call.args["samples"] = samples
            call.span, call.on_device = begin(node), device_spans.begin(node) if call.on_gpu else None
        calls.append(call)

    @harmless
    def _ended(self, module: nn.Module, inputs: Any, *rest: Any) -> None:
        if _span_events.is_compiling():
            return
        calls = _here.calls
        if _here.era != self._era or not _is_open(module, calls):
            return  # its beginning was not seen
        if context.current() is not None or in_transform():
            return
        *more, output = rest  # after an exception, no keyword arguments are passed
        while calls:  # inner ones may have raised
            call = calls.pop()
            call.end()
            if call.module is module:
                if call.span is not None and torch.is_grad_enabled() and ai.compute.backward.recording:
                    _watch_backward((inputs, more), output, call)
                break
        if not calls and self.outermost_ended is not None:
            self.outermost_ended(module, inputs, output)


def _is_open(module: nn.Module, calls: list[_Call]) -> bool:
    """Whether a call of a module is under way."""
    return bool(calls) and (calls[-1].module is module or (len(calls) > 1 and any(c.module is module for c in calls)))


on_outermost: list[Callable[[nn.Module], None]] = []
"""Called with each module that the program calls, before it is recorded."""


def instrument_modules(patches: Patches, depth: int) -> ModuleHooks:
    """Record ``compute.forward`` and ``compute.backward`` of modules that are nested less than ``depth`` deep."""
    hooks = ModuleHooks(depth)
    patches.keep(hooks)
    # Compiled modules call this check, and would warn of our hooks.
    patches.wrap(nn.modules.module, GLOBAL_HOOKS_CHECK, hooks.without)
    patches.wrap(torch.autograd, "backward", _backward)
    patches.wrap(torch.autograd, "grad", _backward)
    return hooks


def _args(module: nn.Module, outermost: nn.Module, depth: int) -> dict[str, Any]:
    if outermost not in _names:
        _names[outermost] = {id(inner): name for name, inner in outermost.named_modules()}
    name = _names[outermost].get(id(module), "")
    return {"module": type(module).__name__, "depth": depth, **({"layer": name} if name else {})}


class _Reached:
    """What autograd ends and begins when it reaches a node of its graph."""

    __slots__ = ("begins", "ends")

    def __init__(self) -> None:
        self.begins: list[_Call] = []
        self.ends: list[_Call] = []


def _watch_backward(inputs: Any, output: Any, call: _Call) -> None:
    """Add hooks for when autograd reaches a module's output and, of an inner one, all of its inputs."""
    with without_function_overrides():
        made = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        got = {tensor.grad_fn for tensor in tensors_in(inputs) if call.depth and tensor.grad_fn is not None}
    if not made:
        return
    # The output of a module is often that of its last child, whose call ended before.
    _reached(made[0]).begins.insert(0, call)
    if got.isdisjoint(made):  # else it returns an input, or has changed one in place
        call.inputs = len(got)
        for node in got:
            _reached(node).ends.append(call)


def _reached(node: Any) -> _Reached:
    kept = node.metadata
    if "pipesight" not in kept:
        kept["pipesight"] = reached = _Reached()
        node.register_prehook(lambda _: _reach(reached))
    found: _Reached = kept["pipesight"]
    return found


@harmless
def _reach(reached: _Reached) -> None:
    backwards = _here.backwards
    for call in reached.ends:
        call.left -= 1
        if not call.left and any(under_way.args is call.args for under_way in backwards):
            _end_backwards(call.depth)
    node = ai.compute.backward
    for call in reached.begins:
        if not backwards or not node.recording:  # on a GPU, autograd runs in a thread of its own
            return
        call.left = call.inputs
        on_device = device_spans.begin(node) if call.on_gpu else None
        if backwards[-1].depth == _UNKNOWN and call.depth == 0:
            whole = backwards[-1]
            whole.module, whole.depth, whole.args, whole.on_device = call.module, 0, call.args, on_device
            continue
        if backwards[0].depth == _UNKNOWN:
            backwards[0].depth = _OF_NONE
        _end_backwards(call.depth)
        backwards.append(_Call(call.module, call.depth, begin(node), call.args, on_device))


def _end_backwards(depth: int) -> None:
    """End the backward of modules that are nested ``depth`` deep or deeper."""
    backwards = _here.backwards
    while backwards and backwards[-1].depth >= depth:
        backwards.pop().end()


def end_inner_backwards() -> None:
    """End the backwards of all modules but the outermost: the last gradient of the backward under way is there."""
    _end_backwards(1)


def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    node = ai.compute.backward
    if not node.recording or context.current() is not None:
        return original(*args, **kwargs)
    outer, _here.backwards = _here.backwards, [_Call(None, _UNKNOWN, begin(node))]
    try:
        return original(*args, **kwargs)
    finally:
        _end_backwards(_OF_NONE)
        _here.backwards = outer
