"""Pipelines over many processes: the same model under ``torchrun``."""

from pipesight.distributed.agreement import DisagreementError
from pipesight.distributed.pipeline import DistributedPipeline
from pipesight.distributed.schedules import names as schedule_names

__all__ = ["DisagreementError", "DistributedPipeline", "schedule_names"]
