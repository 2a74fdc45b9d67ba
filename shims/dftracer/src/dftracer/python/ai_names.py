"""The names of the conventions as constants, for pipesight."""

from enum import StrEnum

__all__ = [
    "BLOCK_NAME",
    "CTX_SEPARATOR",
    "INIT_NAME",
    "ITER_COUNT_NAME",
    "ITER_NAME",
    "ROOT_CAT",
    "ROOT_NAME",
    "START_METADATA_NAME",
    "STOP_METADATA_NAME",
    "CheckpointEvent",
    "CommunicationEvent",
    "ComputeEvent",
    "DataEvent",
    "DataLoaderEvent",
    "DeviceEvent",
    "IOEvent",
    "OtherEvent",
    "PipelineEvent",
    "ProfileCategory",
    "get_iter_block_name",
    "get_iter_handle_name",
]

BLOCK_NAME = "block"
CTX_SEPARATOR = "."
INIT_NAME = "init"
ITER_COUNT_NAME = "count"
ITER_NAME = "iter"
ROOT_CAT = "ai_root"
ROOT_NAME = "ai_root"
START_METADATA_NAME = "start"
STOP_METADATA_NAME = "end"


def get_iter_block_name(name: str) -> str:
    """Return what the body of a loop over the event ``name`` is called."""
    return name if name.endswith(".block") else f"{name}.block"


def get_iter_handle_name(name: str) -> str:
    """Return what a wait of a loop over the event ``name`` is called."""
    return name if name.endswith(".iter") else f"{name}.iter"


class ProfileCategory(StrEnum):
    """The categories."""

    COMPUTE = "compute"
    DATA = "data"
    DATALOADER = "dataloader"
    COMM = "comm"
    DEVICE = "device"
    CHECKPOINT = "checkpoint"
    PIPELINE = "pipeline"
    OTHER = "other"


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


class OtherEvent(StrEnum):
    """The names in ``ai.other``, beside ``io``."""

    LOG = "log"


class IOEvent(StrEnum):
    """The names in ``ai.data.io``, ``ai.checkpoint.io`` and ``ai.other.io``."""

    OPEN = "open"
    READ = "read"
    WRITE = "write"
    CLOSE = "close"
