"""The layers of a stage: which modules they are, and which of them runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from pipesight import context
from pipesight._torch.autograd import next_sequence_number
from pipesight._torch.module_internals import intercept_calls, is_compiled, release_calls, uncompiled
from pipesight.pipeline.partition import watch_backward

__all__ = ["LayerWatch", "layers_in"]


def layers_in(stage: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a stage's module, by their names in it: the modules that its forward calls.

    Lists and dictionaries of modules are looked into, and so is what only wraps another module. A stage that is
    compiled as a whole, or has no children, is one layer, with the name of its class.
    """
    found = {name: layer for name, layer in _called(stage) if name}
    return found or {type(uncompiled(stage)).__name__: stage}


def _called(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    children = {} if is_compiled(module) else dict(module.named_children())
    if children and isinstance(module, GraphModule):  # of `pipeline()`: its graph says what it calls
        names = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "call_module")
        yield from ((_joined(prefix, name), module.get_submodule(name)) for name in names)
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        yield from _called(module.module, prefix)
    elif not children:
        yield prefix, module
    elif len(children) == 1 and not any(True for _ in module.parameters(recurse=False)):
        ((name, child),) = children.items()
        yield from _called(child, _joined(prefix, name)) if list(child.children()) else [(_joined(prefix, name), child)]
    else:
        for name, child in children.items():
            place = _joined(prefix, name)
            yield from _contained(child, place) if _only_holds(child) else [(place, child)]


def _contained(container: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in container.named_children():
        place = _joined(prefix, name)
        yield from _contained(child, place) if _only_holds(child) else [(place, child)]


def _only_holds(module: nn.Module) -> bool:
    """Tell whether a module only holds others, since it has no forward."""
    return type(module).forward is nn.Module.forward and not is_compiled(module)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


class _PerThread(threading.local):
    layer: nn.Module | None = None


class LayerWatch:
    """Tells the context when the layers of stages run, until `remove`. A layer that calls another counts as one."""

    def __init__(self) -> None:
        self._watched: list[nn.Module] = []
        self._open = _PerThread()

    def add(self, layers: Mapping[str, nn.Module]) -> None:
        """Watch these layers, too."""
        for name, layer in layers.items():
            if not any(known is layer for known in self._watched):
                intercept_calls(layer, partial(self._run, layer, name))
                self._watched.append(layer)

    def begin_task(self) -> None:
        """Forget a layer that has raised."""
        self._open.layer = None

    def remove(self) -> None:
        """Watch no longer."""
        while self._watched:
            release_calls(self._watched.pop())

    def _run(
        self, layer: nn.Module, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        where = context.current()
        if where is None or where.phase != "forward" or self._open.layer is not None:
            return call(*args, **kwargs)
        self._open.layer, where.layer = layer, name
        where.marks.append((next_sequence_number(), name))
        if not where.observers.members:
            output = call(*args, **kwargs)
        else:
            where.observers.layer_started(where)
            output = call(*args, **kwargs)
            where.observers.layer_ended(where)
            watch_backward(args[0] if len(args) == 1 and not kwargs else (args, kwargs), output, name)
        self._open.layer = None
        return output
