"""Events of PyTorch itself, without a change to the program."""

from pipesight.trace.automatic.everything import Instrumentation, instrument

__all__ = ["Instrumentation", "instrument"]
