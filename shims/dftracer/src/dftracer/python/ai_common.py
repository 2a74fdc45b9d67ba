"""``dftracer.python.ai_common``, for pipesight: the names of the conventions, as constants."""

from enum import StrEnum

from pipesight.trace import Node as DFTracerAI

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
]

INIT_NAME = "init"
ITER_COUNT_NAME = "count"


class ProfileCategory(StrEnum):
    """The categories."""

    COMPUTE = "compute"
    DATA = "data"
    DATALOADER = "dataloader"
    COMM = "comm"
    DEVICE = "device"
    CHECKPOINT = "checkpoint"
    PIPELINE = "pipeline"


class ComputeEvent(StrEnum):
    """The names in ``ai.compute``."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class DataEvent(StrEnum):
    """The names in ``ai.data``."""

    PREPROCESS = "preprocess"
    ITEM = "item"


class DataLoaderEvent(StrEnum):
    """The names in ``ai.dataloader``."""

    FETCH = "fetch"


class CommunicationEvent(StrEnum):
    """The names in ``ai.comm``."""

    SEND = "send"
    RECEIVE = "receive"
    BARRIER = "barrier"
    BCAST = "bcast"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    GATHER = "gather"
    ALL_GATHER = "all_gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class DeviceEvent(StrEnum):
    """The names in ``ai.device``."""

    TRANSFER = "transfer"


class CheckpointEvent(StrEnum):
    """The names in ``ai.checkpoint``."""

    CAPTURE = "capture"
    RESTART = "restart"


class PipelineEvent(StrEnum):
    """The names in ``ai.pipeline``."""

    EPOCH = "epoch"
    TRAIN = "train"
    EVALUATE = "evaluate"
    TEST = "test"
