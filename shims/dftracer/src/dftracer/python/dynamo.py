"""``dftracer.python.dynamo``, for pipesight: an event for each operation of a graph that ``torch.compile`` captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pipesight.trace import Node

from .ai_classes import DFTracerAI
from .env import DFTRACER_ENABLE

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["Dynamo", "create_backend", "dynamo"]

F = TypeVar("F", bound=Callable[..., Any])


class Dynamo:
    """Traces compiled functions and modules, in the category ``dynamo``.

    Example::

        @dynamo.compile
        def forward(x): ...

    Args:
        name: Of the node that all its events are below.
        enable: Whether to record them.
        **args: ``epoch``, ``step``, ``image_idx`` and ``image_size`` of all its events.
    """

    def __init__(self, name: str | None = None, *, enable: bool = True, **args: Any) -> None:
        self.node: Node = DFTracerAI.make(cat="dynamo", name=name, enable=enable, **args)
        self.enable, self.disable, self.update = self.node.enable, self.node.disable, self.node.update
        self.name, self.cat = self.node.name, self.node.category

    def compile(self, f_py: F | None = None, autograd: bool = True) -> Any:
        """Compile a function or module so that each operation is an event; it is returned as it is if tracing is off.

        Args:
            f_py: What to compile; without it, a decorator is returned.
            autograd: Trace the operations that autograd sees, forward and backward, instead of those of the program.
        """
        if f_py is None:
            return lambda function: self.compile(function, autograd)
        if not DFTRACER_ENABLE:
            return f_py
        import torch

        return torch.compile(f_py, backend=self.backend(autograd))

    def backend(self, autograd: bool = True) -> Callable[..., Any]:
        """Return a backend for ``torch.compile``."""
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
        from torch._dynamo.backends.common import aot_autograd

        def compile_graph(graph: GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
            run = self._traced(graph)
            return make_boxed_func(run) if autograd else run

        return aot_autograd(fw_compiler=compile_graph) if autograd else compile_graph

    def _traced(self, graph: GraphModule) -> Callable[..., Any]:
        import torch
        from torch.fx import Interpreter

        events = {
            node: self.node.named(_operation(node, graph))
            for node in graph.graph.nodes
            if node.op in ("call_module", "call_function", "call_method")
        }

        class Traced(Interpreter):
            def run_node(self, n: Any) -> Any:
                if n not in events:
                    return super().run_node(n)
                with events[n](args={"grad_enabled": int(torch.is_grad_enabled())}):
                    return super().run_node(n)

        return Traced(graph).run


def create_backend(name: str | None = None, *, enable: bool = True, autograd: bool = True, **args: Any) -> Any:
    """Return a backend for ``torch.compile`` that traces each operation; see `Dynamo` for the arguments.

    Example::

        model = torch.compile(model, backend=create_backend("model", epoch=0))
    """
    return Dynamo(name, enable=enable, **args).backend(autograd)


def _operation(node: Any, graph: GraphModule) -> str:
    target = str(node.target).replace(".", "_")
    if node.op == "call_module":
        return f"{node.target}.{type(graph.get_submodule(node.target)).__name__}_{target}"
    if node.op == "call_method":
        return f"method.{target}"
    return f"function.{getattr(node.target, '__name__', node.target)}"


dynamo = Dynamo()
