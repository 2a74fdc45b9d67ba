"""`instrument`: record what PyTorch does, without changes to the program."""

from __future__ import annotations

from pipesight._patches import Patches
from pipesight.trace.automatic.checkpoints import instrument_checkpoints
from pipesight.trace.automatic.collectives import instrument_collectives
from pipesight.trace.automatic.cuda_graph_pause import instrument_graphs
from pipesight.trace.automatic.dataloaders import instrument_loading
from pipesight.trace.automatic.device_transfers import instrument_transfers
from pipesight.trace.automatic.gradient_reductions import instrument_reductions
from pipesight.trace.automatic.modules import instrument_modules
from pipesight.trace.automatic.optimizers import instrument_optimizers
from pipesight.trace.automatic.training_curves import instrument_curves

__all__ = ["Instrumentation", "instrument"]


class Instrumentation:
    """An active `instrument`. `remove`, or the end of the last ``with`` block that uses it, undoes it."""

    def __init__(self, depth: int, outer: Instrumentation | None = None) -> None:
        self.depth = depth
        self._outer = outer
        self._calls = 0  # of `instrument` that no block has begun with
        self._blocks = 0
        self._patches = Patches()
        self._apply()

    def _apply(self) -> None:
        instrument_loading(self._patches)
        self.modules = instrument_modules(self._patches, self.depth)
        instrument_optimizers(self._patches)
        instrument_curves(self._patches)
        instrument_transfers(self._patches)
        instrument_collectives(self._patches)
        instrument_reductions(self._patches)
        instrument_checkpoints(self._patches)
        instrument_graphs(self._patches)

    def remove(self) -> None:
        """Restore PyTorch as it was."""
        global _instrumentation
        if _instrumentation is self:
            _instrumentation = None
        self._calls = self._blocks = 0
        self._patches.undo()

    def __enter__(self) -> Instrumentation:
        self._calls = max(0, self._calls - 1)
        self._blocks += 1
        return self

    def __exit__(self, *_: object) -> None:
        global _instrumentation
        self._blocks -= 1
        if self._blocks > 0 or self._calls > 0:
            return
        current = _instrumentation is self
        self.remove()
        outer = self._outer
        while outer is not None and not (outer._blocks or outer._calls):
            outer = outer._outer
        if current and outer is not None:  # of another depth
            outer._apply()
            _instrumentation = outer


_instrumentation: Instrumentation | None = None


def instrument(*, depth: int = 1) -> Instrumentation:
    """Record what PyTorch does, as events of the ``ai`` conventions, while a trace is being written.

    That is DataLoader fetches and epochs, the forward and backward of modules, optimizer steps, copies between devices,
    collectives of ``torch.distributed``, and checkpoints. Calling it again only changes ``depth``; ``with`` blocks can
    be nested.

    Example::

        with pipesight.trace.start("trace.pfw.gz"), pipesight.trace.instrument():
            train()

    Args:
        depth: Which modules to record: 1 for those that the program calls, 2 for their children too, and so on; 0 for
            none.
    """
    global _instrumentation
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
        raise ValueError(f"depth must be an integer of 0 or more (depth: {depth!r})")
    if _instrumentation is None:
        _instrumentation = Instrumentation(depth)
    elif _instrumentation.depth != depth:
        _instrumentation._patches.undo()
        _instrumentation = Instrumentation(depth, outer=_instrumentation)
    _instrumentation._calls += 1
    return _instrumentation
