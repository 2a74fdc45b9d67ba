"""All-reduces as torch's dispatcher sees them: those that C++ code makes, too, such as the reducer of DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from pipesight._launcher import environment_number

__all__ = [
    "CAN_BE_SEEN",
    "Around",
    "AroundAllReduces",
    "is_data_parallel",
    "place_in_world",
    "when_backward_ends",
]

CAN_BE_SEEN = (
    dist.is_available()
    and hasattr(torch._C, "_after_autograd_keyset")
    and all(hasattr(owner, "unbox") for owner in (dist.Work, dist.ProcessGroup))
    and "with_keyset" in inspect.signature(torch.library.Library.impl).parameters
)
"""Whether this torch has what `AroundAllReduces` needs."""

Around: TypeAlias = Callable[[Callable[[], Any], Sequence[Tensor], Callable[[], Any]], Any]
"""Called as ``around(original, tensors, group)``; returns what ``original()``, a `torch.distributed.Work`, does.
``group()`` is the process group."""

when_backward_ends: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Call something after the last gradient of the backward under way, in the thread that waits for it. What asks first
is called first; it can ask again, for after the others."""


def place_in_world() -> tuple[int, int]:
    """Return the rank of this process and how many there are, as its process group or its launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return environment_number("RANK") or 0, environment_number("WORLD_SIZE") or 1


def is_data_parallel(*modules: Any) -> bool:
    """Tell whether gradients of modules are averaged over ranks: DDP calls them now, or FSDP shards one of them."""
    by_ddp: Any = torch.nn.parallel.DistributedDataParallel
    inside = getattr(by_ddp, "_active_ddp_module", None) is not None
    return inside or any(getattr(module, "_is_fsdp_managed_module", False) for module in modules)


class AroundAllReduces:
    """Lets every all-reduce of CPU tensors run inside ``around``, until it is removed."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._library = torch.library.Library("c10d", "IMPL")
        self._library.impl("allreduce_", self._reduce, "AutogradCPU", with_keyset=True)

    def remove(self) -> None:
        """Remove it."""
        self._library._destroy()

    def _reduce(self, keys: Any, tensors: Sequence[Tensor], group: Any, *rest: Any) -> Any:
        results: list[Any] = []

        def original() -> Any:
            below = keys & torch._C._after_autograd_keyset
            results.append(torch.ops.c10d.allreduce_.default.redispatch(below, tensors, group, *rest))
            return dist.Work.unbox(results[0][1])

        self._around(original, tensors, lambda: dist.ProcessGroup.unbox(group))
        return results[0]
