"""``torch.utils.checkpoint(use_reentrant=True)`` in a layer.

In backward, it runs its function again and calls ``backward()`` on what comes out, which adds to the ``.grad`` of the
parameters that the function uses, and calls their hooks, once a micro-batch. torch allows that only where the backward
around it does the same. Ours does not: it returns gradients, for the sum over all micro-batches to arrive at once.

So when such a checkpoint asks whether it may run, the parameters of its partition are replaced, until the backward of
the task ends, by stand-ins with the same values. What gathers in their ``.grad`` is added to the other gradients.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from types import TracebackType

from torch import Tensor, nn

from pipesight._torch.autograd import override_checkpoint_check

__all__ = ["CaughtGradients"]


class CaughtGradients:
    """Catches, within a backward of some partitions, the gradients that another backward in it leaves in parameters.

    ::

        with CaughtGradients(partitions) as caught:
            run_graph(...)
        sums.add(caught.parameters, caught.gradients)
    """

    def __init__(self, partitions: Iterable[nn.Module]) -> None:
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self._partitions = partitions
        self._stand_ins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []

    def replace(self) -> None:
        """Replace the parameters by stand-ins, unless they are already."""
        if self._replaced:
            return
        modules = {module: None for partition in self._partitions for module in partition.modules()}
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    _, stand_in = self._stand_ins.setdefault(
                        id(parameter), (parameter, nn.Parameter(parameter.detach()))
                    )
                    self._replaced.append((module, name, parameter))
                    module._parameters[name] = stand_in

    def __enter__(self) -> CaughtGradients:
        _install()
        _here.catching = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _here.catching = None
        for module, name, parameter in self._replaced:
            module._parameters[name] = parameter
        for parameter, stand_in in self._stand_ins.values():
            if stand_in.grad is not None:
                self.parameters.append(parameter)
                self.gradients.append(stand_in.grad)
        self._stand_ins.clear()
        self._replaced.clear()


class _PerThread(threading.local):
    catching: CaughtGradients | None = None


_here = _PerThread()


@functools.cache
def _install() -> None:
    """Answer, in a worker's backward, the question that such a checkpoint asks torch before it runs; once a process."""
    override_checkpoint_check(_allow)


def _allow() -> bool:
    if _here.catching is None:
        return False
    _here.catching.replace()
    return True
