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
from collections.abc import Sequence
from types import TracebackType

from torch import Tensor, nn

from pipesight._torch.autograd import override_checkpoint_check
from pipesight.pipeline.partition import PlacedPartition

__all__ = ["CaughtGradients"]


class CaughtGradients:
    """Catches, in the backwards of one worker, the gradients that another backward in them leaves in parameters.

    ::

        with CaughtGradients() as caught:
            caught.watch(partitions)
            run_graph(...)
            gradients = caught.take()
    """

    def __init__(self) -> None:
        self._partitions: Sequence[PlacedPartition] = ()
        self._stand_ins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []

    def watch(self, partitions: Sequence[PlacedPartition]) -> None:
        """Expect a backward of some partitions."""
        self._partitions = partitions

    def replace(self) -> bool:
        """Replace the parameters by stand-ins, unless they are already; return whether there is a backward to watch."""
        if not self._replaced:
            modules = {module: None for partition in self._partitions for module in partition.layers.modules()}
            for module in modules:
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        _, stand_in = self._stand_ins.setdefault(
                            id(parameter), (parameter, nn.Parameter(parameter.detach()))
                        )
                        self._replaced.append((module, name, parameter))
                        module._parameters[name] = stand_in
        return bool(self._partitions)

    def take(self) -> tuple[list[Tensor], list[Tensor | None]] | None:
        """Put the parameters back after a backward; return those that another one left gradients in, and these."""
        self._partitions = ()
        if not self._replaced:
            return None
        for module, name, parameter in self._replaced:
            module._parameters[name] = parameter
        caught = [(parameter, s.grad) for parameter, s in self._stand_ins.values() if s.grad is not None]
        self._stand_ins.clear()
        self._replaced.clear()
        return [parameter for parameter, _ in caught], [gradient for _, gradient in caught]

    def __enter__(self) -> CaughtGradients:
        _install()
        _here.catching = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _here.catching = None
        self.take()


class _PerThread(threading.local):
    catching: CaughtGradients | None = None


_here = _PerThread()


@functools.cache
def _install() -> None:
    """Answer, in a worker's backward, the question that such a checkpoint asks torch before it runs; once a process."""
    override_checkpoint_check(_allow)


def _allow() -> bool:
    return _here.catching is not None and _here.catching.replace()
