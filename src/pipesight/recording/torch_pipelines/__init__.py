"""Pipelines that a program runs with ``torch.distributed.pipelining`` alone: their tasks set the context, too."""

from __future__ import annotations

from pipesight.recording.torch_pipelines.torch_pipeline import TorchPipeline

__all__ = ["TorchPipeline"]
