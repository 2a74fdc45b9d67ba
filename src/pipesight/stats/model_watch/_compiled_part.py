"""A compiled part of a model: its layers are measured as its compiled code computes them, which runs as it is.

The hooks of its layers are compiled with it, once for all parts of a kind, and only note what comes by. What the
forward notes leaves the compiled code as outputs, and is measured when the part returns. For gradients, autograd runs
a start after all layers that were told of it, which hands what they noted to one operator of compiled code::

    forward     start ──▶ layer ──▶ layer ──▶ ...
    backward    start ◀── layer ◀── layer ◀── ...       start: measure these gradients

Nothing but the start's own gradient, of a tensor without elements, depends on that operator. Without it the compiler
would leave the operator out.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["CompiledPart", "NotedLayer"]

MOST = 16  # gradients that are kept for a start: compiled code holds them until then


class NotedLayer(Protocol):
    """A layer of a compiled part."""

    def take_output(self, output: Tensor) -> None:
        """Log an output."""

    def take_gradient(self, gradient: Tensor) -> None:
        """Log the gradient of an output."""


class CompiledPart:
    """What the layers of a part note in a call.

    Args:
        layers: The layers. Those of parts that share compiled code are in the same order.
        measure: Measures what waits for other tensors, before compiled code overwrites it.

    Attributes:
        differentiates: Whether gradients of this call will be logged.
    """

    def __init__(self, layers: Sequence[NotedLayer], measure: Callable[[], None]) -> None:
        self._layers, self._measure = layers, measure
        self._number = torch.tensor(next(_numbers))  # a tensor: compiled code would be made anew for other numbers
        self._anchor = torch.empty(0, requires_grad=True)
        self._start_gradients, self._pass_by = functions()
        _parts[int(self._number)] = self
        self.begin(differentiates=False)

    def begin(self, *, differentiates: bool) -> None:
        """Begin a call, outside of compiled code."""
        self.differentiates = differentiates
        self._outputs: list[Tensor] = []
        self._places: list[int] = []
        self._start: Tensor | None = None
        self._started = 0

    def note(self, place: int, output: Tensor, *, differentiates: bool) -> Tensor:
        """Note the output of a layer, and return it to those that use it; part of what is compiled."""
        self._outputs.append(output.detach())
        self._places.append(place)
        if not (differentiates and self.differentiates and output.requires_grad):
            return output
        start = self._start
        if start is None or self._started == MOST:
            start = self._start = self._start_gradients(self._anchor, self._number)
            self._started = 0
        self._started += 1
        return self._pass_by(output, start, self._number, place)

    def end(self, returned: Tensor | None, *, counts: bool) -> None:
        """End a call, outside of compiled code: log the outputs, if it counts.

        Args:
            returned: What the part returned, if that is a tensor; it may be the last layer's output as well.
            counts: Whether it does.
        """
        outputs, places = self._outputs, self._places
        self.begin(differentiates=False)
        if counts:
            known = {} if returned is None else {_memory(returned): returned}
            for place, output in zip(places, outputs, strict=True):
                self._layers[place].take_output(known.setdefault(_memory(output), output))

    def take_gradients(self, gradients: Sequence[Tensor], places: Sequence[int]) -> None:
        """Log gradients before they are overwritten."""
        known: dict[object, Tensor] = {}
        for place, gradient in zip(places, gradients, strict=True):
            self._layers[place].take_gradient(known.setdefault(_memory(gradient), gradient))
        self._measure()


def _memory(tensor: Tensor) -> object:
    """Return what only tensors with the same elements share, of those that compiled code hands over together."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


_numbers: Iterator[int] = itertools.count()
_parts: weakref.WeakValueDictionary[int, CompiledPart] = weakref.WeakValueDictionary()


Start: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Makes a tensor without elements of another, given the number of a part."""
PassBy: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Returns a tensor that has the values of another, given the start, the number of the part and the layer's place."""


@functools.cache
def functions() -> tuple[Start, PassBy]:
    """Return what is part of compiled code; imports torch's compiler."""
    library = torch.library.Library("pipesight", "FRAGMENT")
    name = "take_gradients(Tensor[] gradients, Tensor part, int[] places) -> Tensor"
    library.define(name, tags=(torch.Tag.flexible_layout,))

    def take_gradients(gradients: list[Tensor], part: Tensor, places: list[int]) -> Tensor:
        if (known := _parts.get(int(part))) is not None:
            known.take_gradients(gradients, places)
        return torch.empty(0)

    library.impl("take_gradients", take_gradients, "CompositeExplicitAutograd")
    torch.library.register_fake("pipesight::take_gradients", lambda *_: torch.empty(0), lib=library)
    operator = torch.ops.pipesight.take_gradients.default
    _libraries.append(library)

    class StartNode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, anchor: Tensor, part: Tensor) -> Tensor:
            ctx.save_for_backward(part)
            ctx.noted = []
            return anchor.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None]:
            if not ctx.noted:
                return None, None
            gradients, places = zip(*ctx.noted, strict=True)
            ctx.noted.clear()
            return operator(list(gradients), *ctx.saved_tensors, list(places)), None

    class PassByNode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: Tensor, start: Tensor, part: Tensor, place: int, noted: Any) -> Tensor:
            ctx.save_for_backward(part)
            ctx.place, ctx.noted = place, noted
            # Not a view: one that compiled code returns would be made outside of it, where its gradient is not seen,
            # and what is changed in place must not be what was noted. Nor may both be clones: the compiler would
            # take them for one, and the part's output for one without a gradient.
            return output.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
            if ctx.noted is None:  # the start is part of other compiled code, and must wait for this
                return gradient, operator([gradient], *ctx.saved_tensors, [ctx.place]), None, None, None
            ctx.noted.append((gradient, ctx.place))
            return gradient, None, None, None, None

    def start(anchor: Tensor, part: Tensor) -> Tensor:
        made: Tensor = StartNode.apply(anchor, part)  # type: ignore[no-untyped-call]
        return made

    def pass_by(output: Tensor, start: Tensor, part: Tensor, place: int) -> Tensor:
        noted = getattr(start.grad_fn, "noted", None)
        passed: Tensor = PassByNode.apply(output, start, part, place, noted)  # type: ignore[no-untyped-call]
        return passed

    allow: Any = torch.compiler.allow_in_graph
    return allow(start), allow(pass_by)


_libraries: list[torch.library.Library] = []  # what is registered lives as long as its library
