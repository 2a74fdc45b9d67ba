"""Recording a run: what `observe` writes into a run directory."""

from pipesight.recording.observing import Observation, observe

__all__ = ["Observation", "observe"]
