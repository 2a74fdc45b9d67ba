"""What is in memory: weights, gradients, optimizer state, inputs and activations, at the ends of tasks."""

from pipesight.recording.memory.memory_recorder import MemoryRecorder

__all__ = ["MemoryRecorder"]
