"""The autograd engine: the backward under way, nodes and their numbers, hooks on tensors."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

__all__ = [
    "DIFFERENTIATING",
    "PythonNode",
    "SavedTensorHooks",
    "add_each",
    "around_functions",
    "backward_accumulates",
    "current_backward",
    "hook_gradient",
    "in_backward",
    "in_checkpoint",
    "innermost_saved_tensor_hooks",
    "is_of_function",
    "keeps_graph",
    "multiply_each",
    "next_sequence_number",
    "override_checkpoint_check",
    "post_accumulate_hooks",
    "run_backward",
    "sequence_number",
    "tensor_hooks",
]

SavedTensorHooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack, as given to ``torch.autograd.graph.saved_tensors_hooks``."""

PythonNode: type = torch._C._FunctionBase
"""The class of autograd nodes that are written in Python (``torch.autograd.Function``)."""

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return a number for the backward that this thread runs in, -1 outside any. Another backward has another number."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Return whether the backward that this thread runs in was called with ``retain_graph=True``."""

next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number that the next autograd node made in this thread gets; later nodes have higher ones."""


DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""The functions that run a backward."""


def is_of_function(node: Any, function: Any) -> bool:
    """Tell whether an autograd node is one of an ``autograd.Function``."""
    return isinstance(node, function._backward_cls)


def in_backward() -> bool:
    """Tell whether a backward calls this code, in this thread."""
    return current_backward() != -1


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node, which says when its thread made it."""
    return int(node._sequence_nr())


def backward_accumulates() -> bool:
    """Tell whether the backward under way adds to ``.grad``; ``torch.autograd.grad`` and ``inputs=`` do not."""
    return bool(Variable._execution_engine.is_checkpoint_valid())


def run_backward(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[GradientEdge | Tensor],
    *,
    keep_graph: bool,
) -> Sequence[Tensor | None]:
    """Return the gradients of ``inputs``: ``torch.autograd.grad(allow_unused=True)`` without its checks.

    The checks take as long as the backward of a small layer.
    """
    found: Sequence[Tensor | None] = Variable._execution_engine.run_backward(
        edges, gradients, keep_graph, False, tuple(inputs), True, accumulate_grad=False
    )
    return found


def add_each(sums: list[Tensor], terms: list[Tensor]) -> None:
    """Add each term to its sum in place: one kernel for many tensors."""
    torch._foreach_add_(sums, terms)


def multiply_each(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors by a number in place: one kernel for many tensors."""
    torch._foreach_mul_(tensors, factor)


def tensor_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the live table of hooks of ``Tensor.register_hook``, ``None`` if there never was one."""
    hooks: dict[int, Any] | None = tensor._backward_hooks
    return hooks


def hook_gradient(tensor: Tensor, key: int, hook: Callable[[Tensor], None]) -> bool:
    """Do what ``Tensor.register_hook`` does, in a third of the time; return False, and do nothing, where it must.

    Args:
        tensor: One that requires grad. If it is a leaf, or has hooks already, ``register_hook`` must do it.
        key: The hook's key in the table of the tensor's hooks, below 0: torch gives away the others.
        hook: Called with the gradient.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        return False
    hooks: OrderedDict[int, Any] = OrderedDict()
    hooks[key] = hook
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return True


def post_accumulate_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the live table of hooks of ``register_post_accumulate_grad_hook``, ``None`` if there never was one."""
    hooks: dict[int, Any] | None = tensor._post_accumulate_grad_hooks
    return hooks


AroundFunction: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes the call of an ``apply``, which it gets with its arguments."""


@contextlib.contextmanager
def around_functions(around: AroundFunction) -> Iterator[None]:
    """Let ``around`` make this thread's calls of ``torch.autograd.Function.apply``, which no function mode sees."""
    _follow_functions()
    before, _functions_here.around = _functions_here.around, around
    try:
        yield
    finally:
        _functions_here.around = before


class _FunctionsPerThread(threading.local):
    around: AroundFunction | None = None


_functions_here = _FunctionsPerThread()


@functools.cache
def _follow_functions() -> None:
    """Let each thread have its way with ``torch.autograd.Function.apply``, for good."""
    original = vars(torch.autograd.Function)["apply"]

    @functools.wraps(getattr(original, "__func__", original))  # since torch 2.15 it is written in C
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        call, around = original.__get__(None, cls), _functions_here.around
        return call(*args, **kwargs) if around is None else around(call, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def override_checkpoint_check(allow: Callable[[], bool]) -> None:
    """Let reentrant checkpoints run in a backward wherever ``allow`` returns true, for good.

    Elsewhere torch decides: it refuses ``torch.utils.checkpoint(use_reentrant=True)`` in a backward that does not
    accumulate into ``.grad``.
    """
    original = torch.autograd._is_checkpoint_valid

    @functools.wraps(original)
    def is_checkpoint_valid() -> bool:
        return allow() or bool(original())  # type: ignore[no-untyped-call]

    torch.autograd._is_checkpoint_valid = is_checkpoint_valid


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.hooks: list[SavedTensorHooks] = []


def _follow_hooks() -> Callable[[bool], SavedTensorHooks | None]:
    """Note, from now on, which saved-tensor hooks each thread enters; return what tells the innermost."""
    autograd: Any = torch._C._autograd
    push, pop = autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks
    here = _PerThread()

    def noted_push(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        push(pack, unpack)
        here.hooks.append((pack, unpack))

    def noted_pop() -> None:
        pop()
        del here.hooks[-1:]  # empty, if they were entered before

    autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks = noted_push, noted_pop
    return lambda _: here.hooks[-1] if here.hooks else None


# Torch tells since 2.8.
_top_hooks: Callable[[bool], SavedTensorHooks | None]
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None) or _follow_hooks()


def innermost_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the saved-tensor hooks that apply in this thread, ``None`` if there are none."""
    return _top_hooks(True)


def in_checkpoint(hooks: SavedTensorHooks | None) -> bool:
    """Tell whether saved-tensor hooks are those of ``torch.utils.checkpoint``."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
