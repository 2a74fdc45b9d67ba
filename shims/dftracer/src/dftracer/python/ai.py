"""``dftracer.python.ai``, for pipesight."""

from pipesight.trace import ai

from .ai_common import (
    INIT_NAME,
    ITER_COUNT_NAME,
    CheckpointEvent,
    CommunicationEvent,
    ComputeEvent,
    DataEvent,
    DataLoaderEvent,
    DeviceEvent,
    DFTracerAI,
    PipelineEvent,
    ProfileCategory,
)

__all__ = [
    "INIT_NAME",
    "ITER_COUNT_NAME",
    "CheckpointEvent",
    "CommunicationEvent",
    "ComputeEvent",
    "DFTracerAI",
    "DataEvent",
    "DataLoaderEvent",
    "DeviceEvent",
    "PipelineEvent",
    "ProfileCategory",
    "ai",
    "checkpoint",
    "comm",
    "compute",
    "data",
    "dataloader",
    "device",
    "pipeline",
]

checkpoint = ai.checkpoint
comm = ai.comm
compute = ai.compute
data = ai.data
dataloader = ai.dataloader
device = ai.device
pipeline = ai.pipeline
