"""Recording a run: what `observe` writes into a run directory."""

from pipesight.recording.observation import Observation, observe

__all__ = ["Observation", "observe"]
