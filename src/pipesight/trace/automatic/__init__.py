"""Record what PyTorch does, without changes to the program."""

from pipesight.trace.automatic.instrumentation import Instrumentation, instrument
from pipesight.trace.automatic.modules import on_outermost

__all__ = ["Instrumentation", "instrument", "on_outermost"]
